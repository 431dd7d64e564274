"""Random small models trained by fsdpp, by PyTorch FSDP2 where it takes them, and by plain PyTorch: see docs of `compare` for what
must be equal. `run_oracle.py --driver oracle_driver --seed S --count N`; `--only K` runs one case and prints it when it differs."""
import argparse
import collections
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

import numpy
import torch

from compare import Comparison
from generate import make_cases

HERE = pathlib.Path(__file__).parent


def run_both(driver, cases, folder):
    """Starts both sides at once; their results by case."""
    with open(f"{folder}/cases.json", "w") as f:
        json.dump(cases, f)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    commands = [[driver, f"{folder}/cases.json", f"{folder}/out.json", f"{folder}/weights.bin"],
                [sys.executable, HERE / "reference.py", f"{folder}/cases.json", folder]]
    logs = [open(f"{folder}/log{i}", "w+") for i in range(2)]
    running = [subprocess.Popen([str(c) for c in command], env=environment, stdout=log, stderr=subprocess.STDOUT)
               for command, log in zip(commands, logs)]
    for process, command, log in zip(running, commands, logs):
        if process.wait() != 0:
            log.seek(0)
            for other in running:
                other.kill()
            at = {path.name: path.read_text() for path in pathlib.Path(folder).glob("at*")}
            sys.exit(f"{' '.join(map(str, command))} ended with {process.returncode}; its ranks were at {at}:\n{log.read()[-6000:]}")
    return read_ours(folder), read_theirs(folder)


def read_ours(folder):
    weights = numpy.fromfile(f"{folder}/weights.bin", dtype=numpy.float64)
    with open(f"{folder}/out.json") as f:
        results = {r["id"]: r for r in json.load(f)}
    for r in results.values():
        r["weights"] = {w["name"]: torch.from_numpy(weights[w["offset"]:w["offset"] + int(numpy.prod(w["shape"], dtype=int))].reshape(w["shape"]))
                        for w in r.get("weights", [])}
    return results


def read_theirs(folder):
    """{"plain": result by case, "fsdp2": likewise, joined over the ranks}."""
    parts = [torch.load(f"{folder}/part{rank}.pt", weights_only=False) for rank in range(4)]
    plain = {k: v for part in parts for k, v in part["plain"].items()}
    fsdp2 = {}
    for k, first in parts[0]["fsdp2"].items():
        of_ranks = [part["fsdp2"][k] for part in parts if k in part["fsdp2"]]
        if any("refused" in r for r in of_ranks):
            fsdp2[k] = next(r for r in of_ranks if "refused" in r)
            continue
        fsdp2[k] = first | {"losses": [r["losses"] for r in of_ranks], "final_losses": [r["final_loss"] for r in of_ranks]}
    return {"plain": plain, "fsdp2": fsdp2}


def kind_of_refusal(text):
    for mark in ("scalar param", "non-contiguous", "uniform original", "uniform reduce", "uniform gradient",
                 "_chunk_cat expects non-empty", "no attribute '_unsharded_param'"):  # the last: without synchronisation, in a unit that did not run
        if mark in text:
            return "FSDP2 raises: " + mark
    return text


def check(cases, ours, theirs, seed, report):
    """Compares one batch; adds to `report` and returns the number of cases that differ."""
    bad = 0
    for case in cases:
        comparison = Comparison(case, ours[case["id"]], theirs["plain"][case["id"]], theirs["fsdp2"][case["id"]])
        comparison.run()
        report.update(comparison.tally)
        for key, value in comparison.largest.items():
            report.largest[key] = max(report.largest.get(key, (0, 0)), (value, case["id"]))
        if comparison.problems:
            bad += 1
            print(f"--seed {seed} --only {case['id']}: " + "; ".join(comparison.problems[:4]))
    return bad


class Report(collections.Counter):
    def __init__(self):
        super().__init__()
        self.largest = {}

    def print(self, seed, count, bad):
        against = {k: v for k, v in self.items() if not k.startswith("refused")}
        print(f"seed {seed}: {count} cases, {bad} differ; " + ", ".join(f"{v} {k}" for k, v in sorted(against.items())))
        for k, v in sorted(self.items()):
            if k.startswith("refused"):
                print(f"  {v} {k}")
        for k, (v, case) in sorted(self.largest.items()):
            print(f"  largest difference, {k}: {v:.2e} of what is allowed (case {case})")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--driver", required=True)
    p.add_argument("--seed", default="1")
    p.add_argument("--count", type=int, default=240)
    p.add_argument("--only", type=int)
    p.add_argument("--batch", type=int, default=250, help="cases of one pair of processes")
    a = p.parse_args()
    seed = str(random.randrange(10**9)) if a.seed == "random" else a.seed
    ids = list(range(a.count)) if a.only is None else [a.only]
    report, bad = Report(), 0
    for first in range(0, len(ids), a.batch):
        cases = make_cases(seed, ids[first:first + a.batch])
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs = run_both(a.driver, cases, folder)
        bad += check(cases, ours, theirs, seed, report)
        if bad and a.only is not None:
            print(json.dumps(cases[0], indent=1))
    report.print(seed, len(ids), bad)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
