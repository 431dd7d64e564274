"""What must be equal between the three sides of a case."""
import functools
import math

import numpy
import torch

from case_rules import has_policy, is_low_precision
from generate import walk
from expected import Expected, fsdp2_does_more
from nodes import make_model
from reference import run_plain

# Below this, numbers count as zero: parameters start at a size of 0.3 to 1, losses at 1, and what is left of a number after terms of
# that size cancelled has their absolute error, not its own relative one.
FLOOR = 0.1


class Tolerance:
    """Allowed differences. fp32 and fp64: relative to a tensor's largest element; where fp32 gives more, eight times what rounding alone
    does to plain training (see Comparison.rounding). Low precision: relative to the largest update of
    a tensor since the start, since both sides see the same weights but gradients of 8 bits (fp16: 11). Plain training has no such
    policy at all: it is asked for the first step, and for weights that moved about as far."""

    def __init__(self, case, peer):
        self.low = is_low_precision(case)
        self.fp32 = not self.low and (case["dtype"] == "float32" or has_policy(case))
        self.relative = 1e-12 if case["dtype"] == "float64" and not has_policy(case) else 1e-6
        self.update = {"fsdp2": 0.1, "plain": 1.0}[peer]
        self.loss = {"fsdp2": 0.02, "plain": 0.1}[peer] if self.low else self.relative
        self.norm = {"fsdp2": 0.02, "plain": 0.4}[peer] if self.low else 2 * self.relative


def can_be_bit_equal(case):
    """Whether one rank and no fully_shard do the same operations: fully_shard makes parameters contiguous, so that another matrix
    product runs."""
    transposed = any(n["kind"] == "transposed" for _, n in walk(case["model"]))
    return not (transposed or has_policy(case) or case["reduce_unused"])


class Comparison:
    """fsdpp against itself (one rank unsharded, a second run, all ranks), plain PyTorch, FSDP2, and the expected counts."""

    def __init__(self, case, ours, plain, fsdp2):
        self.case, self.ours, self.plain, self.fsdp2 = case, ours, plain, fsdp2
        self.problems, self.tally, self.largest = [], {}, {}

    def run(self):
        if "error" in self.ours:
            self.problems.append("fsdpp: " + self.ours["error"])
            return
        self.compare_with_itself()
        self.tally["against plain"] = 1
        self.compare_training("plain", self.plain)
        if "refused" in self.fsdp2:
            self.note_refusal()
        else:
            self.tally["against FSDP2"] = 1
            self.compare_training("fsdp2", self.fsdp2)
        self.compare_counts()

    def note_refusal(self):
        from run_oracle import kind_of_refusal
        kind = kind_of_refusal(self.fsdp2["refused"])
        if self.fsdp2.get("raised") and not kind.startswith("FSDP2 raises"):
            self.problems.append("FSDP2 failed for a reason nobody foresaw: " + kind)
        self.tally["refused, " + kind] = 1

    def compare_with_itself(self):
        if not self.ours["equal_ranks"]:
            self.problems.append("ranks ended with different weights or norms")
        if not self.ours["equal_stats"]:
            self.problems.append("ranks counted different collectives")
        if self.ours["unlike_second_run"]:
            self.problems.append(f"a second run is not bit-equal: {self.ours['unlike_second_run']}")
        if self.case["ranks"] == 1 and can_be_bit_equal(self.case):
            self.tally["bit-equal to unsharded"] = 1
            if self.ours["unlike_unsharded"]:
                self.problems.append(f"one rank is not bit-equal to unsharded: {self.ours['unlike_unsharded']}")

    # -- values ----------------------------------------------------------------------------------------------------------

    def compare_training(self, peer, theirs):
        allowed = Tolerance(self.case, peer)
        precision = "low precision" if allowed.low else f"{allowed.relative:.0e}"
        first_step = allowed.low and peer == "plain"
        losses, norms = (self.case["micro"], 1) if first_step else (None, None)
        pairs = [(f"loss of rank {r}", a[:losses], b[:losses]) for r, (a, b) in enumerate(zip(self.ours["losses"], theirs["losses"]))]
        if not first_step:
            pairs.append(("final losses", self.ours["final_losses"], theirs["final_losses"]))
        for name, ours, other in pairs:
            self.compare_numbers(f"{peer}, losses, {precision}", name, ours, other, allowed.loss, allowed)
        self.compare_numbers(f"{peer}, norms, {precision}", "gradient norm", self.ours["norms"][:norms], theirs["norms"][:norms], allowed.norm,
                             allowed)
        self.compare_weights(peer, precision, theirs["weights"], allowed)

    def compare_numbers(self, key, name, ours, theirs, tolerance, allowed):
        if len(ours) != len(theirs):
            self.problems.append(f"{key}: {name}: {len(ours)} numbers against {len(theirs)}")
            return
        for i, (a, b) in enumerate(zip(ours, theirs)):
            self.judge(key, f"{name}[{i}] {a!r} against {b!r}", abs(a - b), tolerance * max(abs(b), FLOOR), allowed)

    def compare_weights(self, peer, precision, theirs, allowed):
        ours = self.ours["weights"]
        if list(ours) != list(theirs):
            self.problems.append(f"{peer}: names differ: {list(ours)} against {list(theirs)}")
            return
        updates = self.updates(theirs) if allowed.low else {}
        for name, b in theirs.items():
            a = ours[name]
            if a.shape != b.shape:
                self.problems.append(f"{peer}: {name}: {list(a.shape)} against {list(b.shape)}")
            elif a.numel():
                limit = 1e-6 * max(b.abs().max().item(), FLOOR)
                if allowed.low:
                    limit += allowed.update * max(updates[name], FLOOR * max(updates.values()))
                else:
                    limit = allowed.relative * max(b.abs().max().item(), FLOOR)
                self.judge(f"{peer}, weights, {precision}", name, (a - b).abs().max().item(), limit, allowed)

    def updates(self, weights):
        """How far each tensor has moved since the start, at most."""
        start = make_model(self.case, 0)[0].named_parameters()
        return {n: (weights[n] - p.detach().double()).abs().max().item() for n, p in start if p.numel()}

    @functools.cached_property
    def rounding(self):
        """What rounding does to the losses, the norms and the weights of this case, at most: plain training against itself in the other
        of fp32 and fp64. A case that shows more than 1e-6 amplifies it: two close numbers subtracted, a norm over few elements."""
        other = run_plain(self.case, torch.float64 if self.case["dtype"] == "float32" else torch.float32)
        largest = {}
        for key in ("losses", "final_losses", "norms"):
            a, b = (numpy.array(side[key], dtype=float) for side in (self.plain, other))
            largest[key.removeprefix("final_")] = max(largest.get(key.removeprefix("final_"), 0), numpy.abs(a - b).max())
        largest["weights"] = max((a - b).abs().max().item() for a, b in zip(self.plain["weights"].values(), other["weights"].values()) if a.numel())
        return largest

    def judge(self, key, what, difference, limit, allowed):
        if difference > limit and allowed.fp32:
            limit = max(limit, 8 * self.rounding[key.split(", ")[1]])
            self.tally["fp32 by its own rounding"] = 1
        if not math.isfinite(difference) or difference > limit:
            self.problems.append(f"{key}: {what}: differs by {difference:.3e}, allowed {limit:.3e}")
        else:
            self.largest[key] = max(self.largest.get(key, 0), difference / limit if limit else 0)

    # -- counts ----------------------------------------------------------------------------------------------------------

    def compare_counts(self):
        expected = Expected(self.case)
        if expected.exact:
            self.tally["with exact counts"] = 1
            for unit, stats in zip(expected.units, self.ours["stats"]):
                if not expected.buffers(unit):
                    continue  # nothing to communicate
                name = ",".join(self.case["units"][unit.index]["modules"]) or "root"
                for key, want in (("forward_gathers", unit.forward), ("backward_gathers", unit.backward),
                                  ("reduces", unit.reduces), ("all_reduces", unit.all_reduces)):
                    if stats[key] != want:
                        self.differs(stats[key], want, f"unit {name}: {stats[key]} {key}, expected {want}")
            for key, want in expected.wire.items():
                seen = self.ours["wire"].get(key, 0)
                if seen != want:
                    self.differs(seen, want, f"{key} on the wire: {seen}, expected {want}")
        if "refused" not in self.fsdp2:
            self.compare_with_fsdp2_counts(expected)

    def compare_with_fsdp2_counts(self, expected):
        filled = [s for unit, s in zip(expected.units, self.ours["stats"]) if expected.buffers(unit)]
        total = {k: sum(s[k] for s in filled) for k in ("gathers", "reduces", "all_reduces")}
        pairs = [("gathers", "all_gather_into_tensor", expected.shards > 1), ("reduces", "reduce_scatter_tensor", expected.shards > 1),
                 ("all_reduces", "all_reduce", expected.replicas > 1)]
        for key, theirs, on_wire in pairs:
            if not on_wire:
                continue
            other = self.fsdp2["counts"].get(theirs, 0)
            fewer = total[key] < other and fsdp2_does_more(self.case)
            self.tally[f"{key} equal to FSDP2's" if total[key] == other else f"fewer {key} than FSDP2"] = 1
            if total[key] != other and not fewer:
                self.differs(total[key], other, f"{total[key]} {key}, FSDP2 {other}")

    def differs(self, seen, wanted, line):
        self.problems.append(("more " if seen > wanted else "fewer ") + line)
