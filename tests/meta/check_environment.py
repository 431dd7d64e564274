#!/usr/bin/env python3
"""Checks that only src/base/env.cpp reads environment variables.

Usage: check_environment.py ROOT. Prints `file:line: problem` for each problem and exits 1 if there is any.
"""
import pathlib
import re
import sys

READER = re.compile(r"\b(secure_)?getenv\b")
SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
ALLOWED = pathlib.PurePath("src/base/env.cpp")

root = pathlib.Path(sys.argv[1]).resolve()
files = [f for top in ("include", "src", "kernels") for f in sorted((root / top).rglob("*")) if f.suffix in SUFFIXES]
if not files:
    sys.exit(f"{root}: no source files")
problems = 0
for file in files:
    here = file.relative_to(root)
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if here != ALLOWED and READER.search(line.split("//")[0]):
            problems += 1
            print(f"{here}:{number}: environment variables are read through base/env.h alone")
print(f"{len(files)} files, {problems} problems")
sys.exit(1 if problems else 0)
