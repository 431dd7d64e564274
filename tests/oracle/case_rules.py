"""What follows from a case by itself: which unit owns what, what FSDP2 has no answer for, how many collectives there must be."""
from generate import walk
from nodes import shapes_of


class Layout:
    """Units of a case by module path, and the unit of each parameter (an index into case["units"], or None if it is ignored)."""

    def __init__(self, case):
        self.case = case
        self.nodes = dict(walk(case["model"]))
        self.unit_at = {path: i for i, unit in enumerate(case["units"]) for path in unit["modules"]}
        self.unit_of = {}       # by parameter name; a tied parameter under its first name
        self.parameters = {}    # name -> (dtype, trainable, elements)
        self.borrows = set()    # units that use a tied parameter of another one
        for path, node in self.nodes.items():
            for name, shape in shapes_of(node).items():
                self.add(f"{path}.{name}", path, node, name, shape)
            if node["kind"] == "tied":
                own, tied = self.owner(node["to"]), self.owner(path)
                self.tied_units = (own, tied)
                first = min(own, tied)  # made first
                self.unit_of[f"{node['to']}.weight"] = first
        self.own = [[n for n, u in self.unit_of.items() if u == i] for i in range(len(case["units"]))]

    tied_units = None

    def add(self, full, path, node, name, shape):
        elements = 1
        for n in shape:
            elements *= n
        dtype = "float64" if node["kind"] == "wide" else self.case["dtype"]
        self.parameters[full] = (dtype, name not in node.get("frozen", []), elements)
        ignored = full in self.case["units"][-1]["ignored"]
        self.unit_of[full] = None if ignored else self.owner(path)

    def owner(self, path):
        """The unit of the nearest module at or above `path`."""
        while path not in self.unit_at:
            path = path.rpartition(".")[0]
        return self.unit_at[path]

    def tied_across_units(self):
        return self.tied_units is not None and self.tied_units[0] != self.tied_units[1]


def has_policy(case):
    return any(unit["policy"][k] for unit in case["units"] for k in ("param", "reduce", "output"))


def is_low_precision(case):
    return any(unit["policy"][k] in ("bfloat16", "float16") for unit in case["units"] for k in ("param", "reduce", "output"))


def called_twice(layout, path):
    """Whether the module at `path` or one above it is called twice in a forward."""
    parts = path.split(".") if path else []
    return any(layout.nodes[".".join(parts[:i])]["kind"] == "twice" for i in range(len(parts)))


def is_called(layout, path):
    parts = path.split(".") if path else []
    return not any(layout.nodes[".".join(parts[:i])]["kind"] == "unused" for i in range(len(parts)))


def has_empty_shard(case):
    """Whether torch.chunk leaves a rank without rows of a trainable parameter."""
    shards = case["ranks"] // max(1, case["replicate"])
    for path, node in walk(case["model"]):
        for name, shape in shapes_of(node).items():
            rows = shape[0] if shape else 1
            chunk = -(-rows // shards)
            if name not in node.get("frozen", []) and (rows == 0 or -(-rows // chunk) < shards):
                return True
    return False


def beyond_fsdp2(case):
    """Why FSDP2 2.11 would hang, or silently train something else, on a case that it does not refuse by an exception."""
    layout = Layout(case)
    gates = [n["used_by"] for n in layout.nodes.values() if n["kind"] == "gate"]
    if any(0 < len(g) < case["ranks"] for g in gates):
        return "ranks use different parameters"
    if case["reduce_unused"]:
        return "unused parameters reduced as zeros is newer"
    if layout.tied_across_units():
        return "a parameter tied across units"
    if case["reshard_after_backward"] == "never":
        return "gathered parameters kept over an optimizer step are stale"
    if case["clip"] and case["clip"]["p"] == "inf" and has_empty_shard(case):
        return "the maximum norm of an empty shard raises on its rank, the others hang"
    for unit in case["units"]:
        modules = unit["modules"]
        if len(modules) == 1:
            continue
        if has_policy(case):
            return "several modules in one unit: casts at its first and last module only"
        if not all(is_called(layout, m) and layout.nodes[m]["kind"] != "unused" for m in modules):
            return "several modules in one unit: one of them does not run"
    return None
