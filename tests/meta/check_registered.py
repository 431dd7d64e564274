#!/usr/bin/env python3
"""Checks that every *_test.cpp, *_test.cu and *_test.py below a folder is in the list of registered test sources.

Usage: check_registered.py FOLDER LIST. Prints each forgotten file and exits 1 if there is any.
"""
import pathlib
import sys

folder, listing = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
registered = {pathlib.Path(line).resolve() for line in listing.read_text().splitlines() if line}
on_disk = sorted(f for suffix in ("cpp", "cu", "py") for f in folder.rglob(f"*_test.{suffix}") if "fixtures" not in f.relative_to(folder).parts)
if not on_disk:
    sys.exit(f"{folder}: no tests")
forgotten = [f for f in on_disk if f not in registered]
for file in forgotten:
    print(f"{file.relative_to(folder)}: no build runs this test; give it to fsdpp_test or fsdpp_test_unavailable in its folder's CMakeLists.txt")
print(f"{len(on_disk)} test sources, {len(forgotten)} forgotten")
sys.exit(1 if forgotten else 0)
