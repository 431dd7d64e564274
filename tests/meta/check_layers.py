#!/usr/bin/env python3
"""Checks the include lines of a tree against the table of layers in docs/architecture.md.

Usage: check_layers.py ROOT [TABLE]. Prints `file:line: problem` for each problem and exits 1 if there is any.
"""
import pathlib
import re
import sys

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
LIBTORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
TEXT_LIBRARIES = re.compile(r"^(fmt|spdlog)/")
SUFFIXES = {".h", ".hpp", ".cpp", ".cu", ".cuh"}


def read_table(path):
    """Returns {layer: (allowed layers, may include LibTorch)}."""
    text = path.read_text()
    try:
        body = text.split("<!-- layers:begin -->")[1].split("<!-- layers:end -->")[0]
    except IndexError:
        sys.exit(f"{path}: no table between <!-- layers:begin --> and <!-- layers:end -->")
    table = {}
    for line in body.strip().splitlines()[2:]:
        layer, allowed, torch = (cell.strip() for cell in line.strip("|").split("|")[:3])
        table[layer] = ({name.strip() for name in allowed.split(",") if name.strip()}, torch == "yes")
    if not table:
        sys.exit(f"{path}: the table of layers is empty")
    return table


def layer_of(path):
    """The layer that a file, relative to the root, belongs to."""
    parts = path.parts
    if parts[0] == "kernels":
        return "kernels"
    return parts[2] if parts[0] == "include" else parts[1]


def resolve(root, file, name):
    """The file of this tree that an include names, relative to the root, or None."""
    for folder in (file.parent, root / "include", root / "src", root):
        target = (folder / name).resolve()
        if target.is_file() and target.is_relative_to(root):
            return target.relative_to(root)
    return None


def check_file(root, file, table):
    here = file.relative_to(root)
    layer = layer_of(here)
    if layer not in table:
        yield here, 1, f"layer {layer} is not in the table of layers"
        return
    allowed, torch = table[layer]
    for number, line in enumerate(file.read_text().splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        name = match[1]
        if LIBTORCH.match(name) and not torch:
            yield here, number, f"{layer} must not include LibTorch ({name})"
        if TEXT_LIBRARIES.match(name) and here.parts[0] == "include":
            yield here, number, f"a public header must not include {name}"
        target = resolve(root, file, name)
        if target is None:
            if name.startswith("fsdpp/"):
                yield here, number, f"{name} does not exist"
            continue
        other = layer_of(target)
        if other != layer and other not in allowed:
            yield here, number, f"{layer} must not include {other} ({name})"


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    table = read_table(pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else root / "docs/architecture.md")
    files = [f for top in ("include/fsdpp", "src", "kernels") for f in sorted((root / top).rglob("*")) if f.suffix in SUFFIXES]
    if not files:
        sys.exit(f"{root}: no source files")
    problems = [p for file in files for p in check_file(root, file, table)]
    for path, number, text in problems:
        print(f"{path}:{number}: {text}")
    print(f"{len(files)} files, {len(problems)} problems")
    return 1 if problems else 0


sys.exit(main())
