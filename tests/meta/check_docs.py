#!/usr/bin/env python3
"""Checks that what the documentation names in backticks exists in the tree: code with :: or ending in (), and file paths.

Usage: check_docs.py ROOT [DOCUMENT...]; without documents, README.md and docs/**/*.md. Prints `file:line: problem` for each
problem and exits 1 if there is any. Names of other projects (torch::, at::, c10::, std::, torch.) are left alone.
"""
import pathlib
import re
import sys

TOPS = ("include", "src", "kernels", "examples", "tests", "benchmarks", "cmake", "scripts")
SOURCES = {".h", ".cpp", ".cu", ".cuh", ".cmake", ".txt", ".py", ".sh", ".in"}
FOREIGN = re.compile(r"^(::)?(torch|at|c10|c10d|std|nccl|cuda)(::|\.)")
CODE = re.compile(r"^[A-Za-z_][\w:.]*(->\w+)?(\(\))?$")
PATH = re.compile(r"^[\w.-]+(/[\w.-]+)*/?$")
WORD = re.compile(r"[A-Za-z_]\w*")


def words_of_tree(root):
    words = set()
    for top in TOPS:
        for file in (root / top).rglob("*"):
            if file.suffix in SOURCES and "meta" not in file.relative_to(root).parts:
                words.update(WORD.findall(file.read_text(errors="replace")))
    return words


def is_path(token):
    return bool(PATH.match(token)) and "/" in token and token.split("/")[0] in TOPS + ("docs",)


def is_code(token):
    return bool(CODE.match(token)) and ("::" in token or token.endswith("()")) and not FOREIGN.match(token)


def problems_of(document, root, words):
    in_block = False
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_block = not in_block
        if in_block:
            continue
        for token in re.findall(r"`([^`]+)`", line):
            if is_path(token) and not (root / token).exists():
                yield number, f"`{token}` does not exist"
            elif is_code(token):
                missing = [w for w in WORD.findall(token.replace("()", "")) if w not in words]
                if missing:
                    yield number, f"`{token}`: nothing in the tree is called {', '.join(missing)}"


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    documents = [pathlib.Path(a) for a in sys.argv[2:]]
    if not documents:
        documents = [f for f in (root / "README.md", *sorted((root / "docs").rglob("*.md"))) if f.exists()]
    words = words_of_tree(root)
    if not documents or not words:
        sys.exit(f"{root}: no documents or no sources")
    count = 0
    for document in documents:
        for number, text in problems_of(document, root, words):
            count += 1
            print(f"{document}:{number}: {text}")
    print(f"{len(documents)} documents, {count} problems")
    return 1 if count else 0


sys.exit(main())
