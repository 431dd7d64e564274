"""Faults of fsdpp that the oracle has found and that are not mended yet. A case that shows one is counted under its name; anything
else that differs in it is still an error. The summary has a line for each, also for those that no case shows any more."""
from case_rules import Layout

TIED_INSIDE = "a parameter tied to a unit inside its user's unit is used while it is sharded"
KEPT_LOST = "set_reshard_after_backward(false): resharded when the outputs die"
FROZEN_NESTED = "frozen parameters around a nested unit: gathered again within a backward"
PER_MODULE = "several modules in one unit: gathered for each of them"

KEPT = "one gather serves several modules of a unit, or several iterations: fewer than counted"

ALL = (KEPT, TIED_INSIDE, KEPT_LOST, FROZEN_NESTED, PER_MODULE)


def _is_inside(inner, outer):
    return outer == "" or inner == outer or inner.startswith(outer + ".")


def _tied_inside(case, layout):
    if not layout.tied_across_units():
        return False
    own, user = (case["units"][i]["modules"] for i in layout.tied_units)
    return any(_is_inside(a, b) or _is_inside(b, a) for a in own for b in user)


def excuse(case, problem):
    """The name of the known fault that explains one line of differences, or None."""
    layout = Layout(case)
    if problem.startswith("fsdpp: ") and "while it is sharded" in problem and _tied_inside(case, layout):
        return TIED_INSIDE
    if problem.startswith("fewer ") and (any(len(unit["modules"]) > 1 for unit in case["units"]) or case["reshard_after_backward"] != "always"):
        return KEPT  # what `expected` counts is the plain way: once for each module, and again in each iteration
    if not problem.startswith("more "):
        return None
    if any(len(unit["modules"]) > 1 for unit in case["units"]):
        return PER_MODULE
    if case["reshard_after_backward"] != "always" and "backward_gathers" not in problem:
        return KEPT_LOST
    if any(not trainable for _, trainable, _ in layout.parameters.values()) or any(n["kind"] == "gate" for n in layout.nodes.values()):
        return FROZEN_NESTED
    return None
