"""How many collectives a case must cost, from the model of a step in docs/architecture.md, by walking the case's own structure:
forward gathers = calls of units that are sharded then, backward gathers = units that resharded, reductions = units with gradients."""
from case_rules import Layout, called_twice


class Unit:
    def __init__(self, index):
        self.index = index
        self.state = "sharded"      # sharded, or gathered
        self.stale = False          # gathered, but the optimizer has changed the shards since
        self.ran = set()            # modules of the unit that ran in this forward; gathered until all did
        self.forward = self.backward = self.reduces = self.all_reduces = 0
        self.with_gradients = set() # dtypes of gradients in this micro-batch
        self.waiting = set()        # dtypes of gradients kept without synchronisation
        self.changed = False        # has gradients that the optimizer will apply


class Expected:
    """Counts on one rank; `exact` says whether this model of a step covers the case."""

    def __init__(self, case, rank=0):
        self.case, self.rank = case, rank
        self.layout = Layout(case)
        self.units = [Unit(i) for i in range(len(case["units"]))]
        self.exact = not (self.layout.tied_across_units() or self.frozen_and_twice() or self.odd_group())
        self.wire = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
        self.shards = case["ranks"] // max(1, case["replicate"])
        self.replicas = max(1, case["replicate"])
        for _ in range(case["steps"]):
            self.step()

    def frozen_and_twice(self):
        """A unit that runs twice and has parameters without gradients is resharded between its two backwards, or not: depends on its
        neighbours."""
        frozen = {self.layout.unit_of[n] for n, (_, trainable, _) in self.layout.parameters.items() if not trainable or self.skipped(n)}
        return any(called_twice(self.layout, path) for path in self.layout.unit_at if self.layout.unit_at[path] in frozen)

    def odd_group(self):
        """Several modules in one unit, of which one does not run, or twice."""
        return any(called_twice(self.layout, m) or self.layout.nodes[m]["kind"] in ("twice", "unused")
                   for unit in self.case["units"] if len(unit["modules"]) > 1 for m in unit["modules"])

    def skipped(self, name):
        node = self.layout.nodes[name.rpartition(".")[0]]
        return node["kind"] == "gate" and len(node["used_by"]) < self.case["ranks"]

    # -- a step ----------------------------------------------------------------------------------------------------------

    def step(self):
        for unit in self.units:
            unit.changed = unit.changed and not self.case["set_to_none"]  # zeros are gradients too
        for micro in range(self.case["micro"]):
            last = micro + 1 == self.case["micro"]
            self.trace = []
            for unit in self.units:
                unit.with_gradients = set()
            self.call("", False)
            self.run_backward(last)
        for unit in self.units:
            unit.stale = unit.state == "gathered" and unit.changed

    def call(self, path, grad):
        """Walks one module's forward; `grad`: its input requires a gradient. Returns that of its output."""
        unit = self.units[self.layout.unit_at[path]] if path in self.layout.unit_at else None
        if unit:
            self.gather(unit, "forward")
        grad = self.body(path, grad)
        if unit:
            group = self.group(unit)
            unit.ran.add(path)
            whole = len(unit.ran) == len(self.case["units"][unit.index]["modules"])
            if whole:
                unit.ran.clear()
            if whole and not (group == 1 and (self.case["units"][unit.index]["reshard"] is not None or grad)):
                unit.state = "sharded"
            if grad:
                self.trace.append(("leave", unit, None))
        return grad

    def group(self, unit):
        reshard = self.case["units"][unit.index]["reshard"]
        if reshard is None:
            return 1 if unit is self.units[-1] else 0
        return {True: 0, False: 1}[reshard] if isinstance(reshard, bool) else 0 if reshard == self.shards > 1 else reshard

    def body(self, path, grad):
        node = self.layout.nodes[path]
        kind = node["kind"]
        if kind == "unused" or (kind == "gate" and self.rank not in node["used_by"]):
            return grad
        if "children" in node:
            inner = grad
            for i in range(len(node["children"])):
                for _ in range(2 if kind == "twice" else 1):
                    inner = self.call(f"{path}.{i}" if path else str(i), inner)
            return inner or (kind == "residual" and grad)
        names = [f"{node['to']}.weight"] if kind == "tied" else [n for n in self.layout.parameters if n.rpartition(".")[0] == path]
        return self.use(names) or grad

    def use(self, names):
        trainable = [n for n in names if self.layout.parameters[n][1]]
        for name in trainable:
            unit = self.units[self.layout.unit_of[name]]
            self.trace.append(("use", unit, self.layout.parameters[name]))
        return bool(trainable)

    def gather(self, unit, kind):
        if unit.state == "gathered" and unit.stale:
            unit.state = "sharded"
        if unit.state != "sharded":
            return
        unit.state, unit.stale = "gathered", False
        setattr(unit, kind, getattr(unit, kind) + 1)
        if self.shards > 1:
            self.wire["all_gather"] += len(self.buffers(unit))

    def buffers(self, unit):
        """Flat buffers of a unit that hold anything: one for each dtype and trainability."""
        found = {self.layout.parameters[n][:2] for n in self.layout.own[unit.index] if self.layout.parameters[n][2]}
        return found

    # -- backward --------------------------------------------------------------------------------------------------------

    def run_backward(self, last):
        for what, unit, info in reversed(self.trace):
            if what == "leave":
                self.gather(unit, "backward")
            else:
                unit.with_gradients.add((info[0], info[2] > 0))
        for unit in self.units:
            if self.reshards(last):  # also what this backward did not touch: no other one will come for it
                unit.state = "sharded"
            self.finish(unit, last)

    def reshards(self, last):
        return {"always": True, "last": last, "never": False}[self.case["reshard_after_backward"]]

    def finish(self, unit, last):
        gradients = unit.with_gradients | unit.waiting
        if self.case["mode"] == "sync_last" and not last:
            unit.waiting = gradients
            return
        unit.waiting = set()
        if self.case["reduce_unused"]:
            gradients = {(d, n > 0) for d, trainable, n in (self.layout.parameters[p] for p in self.layout.own[unit.index]) if trainable}
        if not gradients:
            return
        unit.changed = True
        unit.reduces += 1
        buffers = {d for d, filled in self.trainable(unit) if filled} & {d for d, _ in gradients}
        if self.shards > 1:
            self.wire["reduce_scatter"] += len(buffers)
        if self.replicas > 1 and buffers and (self.case["mode"] != "all_reduce_last" or last):
            unit.all_reduces += 1
            self.wire["all_reduce"] += len(buffers)

    def trainable(self, unit):
        """(dtype, whether it holds anything) of the unit's trainable buffers."""
        kinds = {}
        for name in self.layout.own[unit.index]:
            dtype, trainable, elements = self.layout.parameters[name]
            if trainable:
                kinds[dtype] = kinds.get(dtype, 0) + elements
        return {(d, n > 0) for d, n in kinds.items()}


def fsdp2_does_more(case):
    """Whether FSDP2 may gather and reduce more often than fsdpp: a module that runs twice is gathered and reduced for each of its
    backwards; what no backward needs (frozen, unused) is gathered ahead all the same, and so is what last micro-batch's order names
    where a backward is said not to be the last."""
    layout = Layout(case)
    twice = any(called_twice(layout, path) for path in layout.unit_at)
    frozen = any(not trainable for _, trainable, _ in layout.parameters.values())
    unused = any(n["kind"] in ("unused", "gate") for n in layout.nodes.values())
    return twice or frozen or unused or (case["is_last"] and case["micro"] > 1)
