"""Faults of fsdpp that the oracle has found and that are not mended yet. A case that shows one is counted under its name; anything
else that differs in it is still an error. The summary has a line for each, also for those that no case shows any more."""
from case_rules import Layout
from generate import walk

FROZEN_NESTED = "frozen parameters around a nested unit: gathered again within a backward"
FIRST_WITHOUT = "several modules in one unit, the first ones without gradients: gathered again within a backward"

ALL = (FROZEN_NESTED, FIRST_WITHOUT)


def excuse(case, problem):
    """The name of the known fault that explains one line of differences, or None."""
    if not problem.startswith("more "):
        return None
    parameters = Layout(case).parameters.values()
    nodes = [n for _, n in walk(case["model"])]
    if any(not trainable for _, trainable, _ in parameters) or any(n["kind"] == "gate" for n in nodes):
        return FROZEN_NESTED
    if any(len(unit["modules"]) > 1 for unit in case["units"]):
        return FIRST_WITHOUT
    return None
