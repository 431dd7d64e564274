"""The Python side of safetensors_python_test: `write FILE` writes known tensors with the safetensors package, `check FILE`
reads a file of the same tensors with it and compares. Exits with 1 and a message if anything differs."""
import sys

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file


def known_tensors():
    floats = torch.arange(6).reshape(2, 3) - 2.5
    tensors = {f"float.{name}": floats.to(dtype) for name, dtype in {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}.items()}
    whole = torch.tensor([[[1], [2], [100]]])
    tensors |= {f"int.{name}": whole.to(dtype) for name, dtype in {
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}.items()}
    tensors["bool"] = torch.tensor([True, False, True])
    tensors["scalar"] = torch.tensor(3.25)
    tensors["empty"] = torch.zeros(0, 4)
    return tensors


def check(path):
    expected, actual = known_tensors(), load_file(path)
    with safe_open(path, "pt") as file:
        if file.metadata() != {"format": "pt"}:
            sys.exit(f"metadata is {file.metadata()}")
    if expected.keys() != actual.keys():
        sys.exit(f"names differ: {sorted(expected.keys() ^ actual.keys())}")
    for name, want in expected.items():
        got = actual[name]
        same = got.dtype == want.dtype and got.shape == want.shape and torch.equal(got.double(), want.double())
        if not same:
            sys.exit(f"{name}: expected {want}, got {got}")


if __name__ == "__main__":
    mode, path = sys.argv[1:]
    if mode == "write":
        save_file(known_tensors(), path, metadata={"format": "pt"})
    else:
        check(path)
