"""What "equal" means in the parity tests, and the check of the checker (`compare.py --self-test`)."""
import json
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file

RELATIVE = 1e-6


def compare_losses(ours, theirs):
    """Differences of two lists of losses, as lines; none if all are equal to 1e-6 relative."""
    if len(ours) != len(theirs):
        return [f"{len(ours)} losses against {len(theirs)}"]
    return [f"loss of step {i}: {a!r} against {b!r}, relative {abs(a - b) / abs(b):.2e}"
            for i, (a, b) in enumerate(zip(ours, theirs)) if not abs(a - b) <= RELATIVE * abs(b)]


def compare_weights(ours, theirs):
    """Differences of two safetensors files: names, order of shapes, and max |a - b| <= 1e-6 * max |b| for each tensor."""
    a, b = load_file(ours), load_file(theirs)
    if a.keys() != b.keys():
        return [f"names differ: {sorted(a.keys() ^ b.keys())}"]
    problems = []
    for name, want in b.items():
        got = a[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            problems.append(f"{name}: {got.dtype} {list(got.shape)} against {want.dtype} {list(want.shape)}")
            continue
        error = ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()
        if not error <= RELATIVE:
            problems.append(f"{name}: relative difference {error:.2e}")
    return problems


def read_metrics(path):
    with open(path) as f:
        return [json.loads(line)["loss"] for line in f]


def self_test():
    """Each kind of difference must be seen, and equality must pass."""
    generator = torch.Generator().manual_seed(0)
    weights = {"a": torch.randn(7, 5, generator=generator), "b": torch.randn(3, generator=generator)}

    def perturbed(change):
        copy = {name: t.clone() for name, t in weights.items()}
        change(copy)
        with tempfile.TemporaryDirectory() as folder:
            save_file(weights, f"{folder}/a")
            save_file(copy, f"{folder}/b")
            return compare_weights(f"{folder}/b", f"{folder}/a")

    largest = weights["a"].abs().max().item()
    assert perturbed(lambda w: None) == []
    assert perturbed(lambda w: w["a"][3, 2].add_(0.5e-6 * largest)) == []
    assert perturbed(lambda w: w["a"][3, 2].add_(3e-6 * largest)) != []
    assert perturbed(lambda w: w["a"][0, 0].fill_(float("nan"))) != []
    assert perturbed(lambda w: w.pop("b")) != []
    assert perturbed(lambda w: w.update(b=w["b"].reshape(3, 1))) != []
    assert perturbed(lambda w: w.update(b=w["b"].double())) != []
    assert compare_losses([5.0, 4.0], [5.0, 4.0 + 1e-6]) == []
    assert compare_losses([5.0, 4.0], [5.0, 4.0 + 1e-5]) != []
    assert compare_losses([5.0, float("nan")], [5.0, 4.0]) != []
    assert compare_losses([5.0], [5.0, 4.0]) != []


if __name__ == "__main__":
    assert sys.argv[1:] == ["--self-test"]
    self_test()
