"""The check of the oracle itself: `check_checker.py --driver oracle_driver`. A few cases pass; then each kind of difference, put into
the files that the driver wrote, must be found."""
import argparse
import json
import tempfile

import numpy

from case_rules import has_policy
from compare import Comparison
from generate import make_cases
from run_oracle import read_ours, run_both

SEED, COUNT = "checker", 24


def problems_of(case, ours, theirs):
    comparison = Comparison(case, ours[case["id"]], theirs["plain"][case["id"]], theirs["fsdp2"][case["id"]])
    comparison.run()
    return comparison.problems


def changed_weights(folder, case, theirs, change):
    """What is found once `change` was applied to the case's first weight in the driver's file."""
    before = numpy.fromfile(f"{folder}/weights.bin")
    with open(f"{folder}/out.json") as f:
        first = next(r for r in json.load(f) if r["id"] == case["id"])["weights"][0]
    after = before.copy()
    after[first["offset"]] = change(after[first["offset"]])
    after.tofile(f"{folder}/weights.bin")
    found = problems_of(case, read_ours(folder), theirs)
    before.tofile(f"{folder}/weights.bin")
    return found


def changed_result(folder, case, theirs, change):
    with open(f"{folder}/out.json") as f:
        before = f.read()
    results = json.loads(before)
    change(next(r for r in results if r["id"] == case["id"]))
    with open(f"{folder}/out.json", "w") as f:
        json.dump(results, f)
    found = problems_of(case, read_ours(folder), theirs)
    with open(f"{folder}/out.json", "w") as f:
        f.write(before)
    return found


def expect(what, found, wanted):
    assert any(wanted in line for line in found), f"{what} was not found: {found}"


def check_case(folder, case, theirs):
    assert problems_of(case, read_ours(folder), theirs) == []
    assert changed_weights(folder, case, theirs, lambda w: w + 1e-15) == []
    expect("a weight off by 1e-5", changed_weights(folder, case, theirs, lambda w: w + 1e-5), "weights")
    expect("a weight that is no number", changed_weights(folder, case, theirs, lambda w: float("nan")), "weights")

    def of_result(what, wanted, change):
        expect(what, changed_result(folder, case, theirs, change), wanted)

    of_result("a loss off by 1e-5", "losses", lambda r: r["losses"][0].__setitem__(0, r["losses"][0][0] * (1 + 1e-5)))
    of_result("a missing loss", "numbers against", lambda r: r["losses"][0].pop())
    of_result("a norm off by 1e-5", "norms", lambda r: r["norms"].__setitem__(-1, r["norms"][-1] * (1 + 1e-5)))
    of_result("a gather too few", "forward_gathers", lambda r: r["stats"][-1].__setitem__("forward_gathers", r["stats"][-1]["forward_gathers"] - 1))
    of_result("a reduction too few", "reduces", lambda r: r["stats"][-1].__setitem__("reduces", r["stats"][-1]["reduces"] - 1))
    of_result("an operation dropped on the wire", "on the wire", lambda r: r["wire"].__setitem__("all_gather", r["wire"].get("all_gather", 0) - 1))
    of_result("counts that are not FSDP2's", "FSDP2", lambda r: r["stats"][-1].__setitem__("gathers", r["stats"][-1]["gathers"] + 1000))
    of_result("ranks that differ", "different weights", lambda r: r.__setitem__("equal_ranks", False))
    of_result("a run that differs from the first", "second run", lambda r: r.__setitem__("unlike_second_run", ["weights"]))
    of_result("an exception", "fsdpp: no", lambda r: r.__setitem__("error", "no"))
    of_result("a missing weight", "names differ", lambda r: r["weights"].pop())


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--driver", required=True)
    cases = make_cases(SEED, range(COUNT))
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = run_both(p.parse_args().driver, cases, folder)
        fit = [c for c in cases if not has_policy(c) and c["ranks"] // max(1, c["replicate"]) > 1 and "losses" in theirs["fsdp2"][c["id"]]
               and not problems_of(c, ours, theirs) and ours[c["id"]]["stats"][-1]["reduces"]]
        assert len(fit) >= 2, "too few cases to check the checker with"
        for case in fit[:4]:
            check_case(folder, case, theirs)


if __name__ == "__main__":
    main()
