"""Trains the same small model from the same weights on the same tokens with `minillm`, PyTorch FSDP2 and plain PyTorch, fp32 on
the CPU, and compares the losses of all steps and all final weights. With one rank also: by LibTorch's operators (`--plain-ops`) bit-equal
to `minillm --no-shard`.

AdamW's step is lr·m/(sqrt(v) + eps). With eps = 1e-8 it turns every gradient into about ±lr, whatever its size: the sign of
rounding noise where the true gradient is zero. That is so here for the key bias (softmax does not see it), and plain PyTorch
then differs from PyTorch FSDP2 by 3e-4. With eps = 1e-3, about the size of the gradients, the step is a smooth function of
them, and both agree to 2e-7."""
import argparse
import filecmp
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from compare import compare_losses, compare_weights, read_metrics

REFERENCE = pathlib.Path(__file__).with_name("fsdp2_reference.py")
MODEL = ["--vocab", "257", "--dim", "64", "--layers", "2", "--heads", "4", "--batch", "2", "--seq", "32", "--steps", "10",
         "--lr", "1e-3", "--adam-eps", "1e-3"]


def run(command, **environment):
    result = subprocess.run([str(c) for c in command], env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nended with {result.returncode}:\n{result.stdout}")


def peer_losses(path):
    with open(path) as f:
        return json.load(f)["losses"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--minillm", required=True)
    p.add_argument("--launcher", required=True)
    p.add_argument("--ranks", type=int, required=True)
    p.add_argument("--more", default="", help="further flags of both sides")
    a = p.parse_args()
    flags = MODEL + a.more.split()
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        run([sys.executable, REFERENCE, "--make", work, *flags])
        files = ["--data", work / "tokens.bin", "--init", work / "init.safetensors"]

        def ours(name, launcher, more=()):
            run([*launcher, a.minillm, "--device", "cpu", *flags, *files, *more, "--metrics", work / f"{name}.jsonl",
                 "--save-full", work / f"{name}.safetensors"])

        def theirs(name, more=()):
            run([sys.executable, REFERENCE, "--ranks", a.ranks, *flags, *files, *more, "--losses", work / f"{name}.json",
                 "--save-full", work / f"{name}.safetensors"])

        ours("ours", [a.launcher, "--nproc-per-node", a.ranks, "--"])
        theirs("fsdp2")
        theirs("plain", ["--plain"])
        problems = []
        for peer in ("fsdp2", "plain"):
            found = compare_losses(read_metrics(work / "ours.jsonl"), peer_losses(work / f"{peer}.json"))
            found += compare_weights(work / "ours.safetensors", work / f"{peer}.safetensors")
            problems += [f"against {peer}: {line}" for line in found]
        if not compare_weights(work / "ours.safetensors", work / "init.safetensors"):
            problems.append("the final weights equal the initial ones: nothing was trained")
        if a.ranks == 1:
            ours("alone", [], ["--no-shard"])
            ours("same_ops", [a.launcher, "--nproc-per-node", 1, "--"], ["--plain-ops"])
            if read_metrics(work / "same_ops.jsonl") != read_metrics(work / "alone.jsonl"):
                problems.append("losses of one rank are not bit-equal to --no-shard")
            if not filecmp.cmp(work / "same_ops.safetensors", work / "alone.safetensors", shallow=False):
                problems.append("weights of one rank are not bit-equal to --no-shard")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
