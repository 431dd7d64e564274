"""The same training under every launcher that is here: fsdpp-run, torchrun --no-python and, if --mpirun is given, Open MPI.
Losses and final weights must be bit-equal; a run with another seed must not be."""
import argparse
import filecmp
import os
import pathlib
import subprocess
import sys
import tempfile

from compare import read_metrics

MODEL = ["--device", "cpu", "--vocab", "257", "--dim", "32", "--layers", "2", "--heads", "2", "--batch", "2", "--seq", "16",
         "--steps", "5", "--data", "synthetic"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--minillm", required=True)
    p.add_argument("--launcher", required=True)
    p.add_argument("--mpirun")
    p.add_argument("--ranks", default="2")
    a = p.parse_args()
    launchers = {
        "fsdpp-run": [a.launcher, "--nproc-per-node", a.ranks, "--"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", a.ranks],
    }
    if a.mpirun:
        launchers["mpirun"] = [a.mpirun, "--allow-run-as-root", "--oversubscribe", "-n", a.ranks]
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)

        def train(name, launcher, seed="3"):
            command = [*launcher, a.minillm, *MODEL, "--seed", seed, "--metrics", str(work / f"{name}.jsonl"),
                       "--save-full", str(work / f"{name}.safetensors")]
            result = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
                                    stderr=subprocess.STDOUT, text=True)
            if result.returncode != 0:
                sys.exit(f"{' '.join(command)}\nended with {result.returncode}:\n{result.stdout}")
            if f"on {a.ranks} ranks" not in result.stdout:
                sys.exit(f"under {name} the ranks did not find each other:\n{result.stdout}")
            return read_metrics(work / f"{name}.jsonl")

        losses = {name: train(name, launcher) for name, launcher in launchers.items()}
        for name in launchers:
            if losses[name] != losses["fsdpp-run"]:
                sys.exit(f"losses under {name} differ: {losses}")
            if not filecmp.cmp(work / f"{name}.safetensors", work / "fsdpp-run.safetensors", shallow=False):
                sys.exit(f"weights under {name} differ")
        if train("other seed", launchers["fsdpp-run"], seed="4") == losses["fsdpp-run"]:
            sys.exit("another seed gave the same losses: the comparison says nothing")


if __name__ == "__main__":
    main()
