"""Run the fast tests that are nearest to what changed since HEAD. `make quick` runs it after the static checks.

A test file is near a change if few imports lie between them: the changed test file itself, then the test files that
import a changed module, then those that import an importer. The nearest FILES_MAX files run for at most WITHIN_S
seconds; `make check` runs all.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOPS = ("kvstore", "kvstore_loadtest", "loadtest", "examples", "scripts", "tests")
HOUSE_RULES = ("tests/test_tidy.py", "tests/test_docs.py", "tests/test_reference.py")
"""They read all files, and import few of them."""
FILES_MAX = 60
WITHIN_S = 40
IMPORT = re.compile(r"^[ \t]*(?:from (\S+) import (\([^)]*\)|[^\n#]*)|import ([\w., ]+))", re.MULTILINE)


def main(words: list[str]) -> int:
    """Run the tests; `words` are options of pytest. Return its exit code."""
    files = [path for top in TOPS for path in sorted((ROOT / top).rglob("*.py")) if "_pb2" not in path.name]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    found = nearest(import_graph(texts), changed())
    chosen = found[:FILES_MAX]
    print(
        f"{len(chosen)} of {len(found)} test files that what changed can reach, the nearest first; make check runs all"
    )
    command = [sys.executable, "-m", "pytest", "-n", "2", f"--within={WITHIN_S}", *words, *chosen, *HOUSE_RULES]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def changed() -> set[str]:
    """Return the files that differ from HEAD, new ones included."""
    commands = (("diff", "--name-only", "HEAD"), ("ls-files", "--others", "--exclude-standard"))
    return {
        path
        for words in commands
        for path in subprocess.run(
            ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.splitlines()
    }


def import_graph(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the files of ours that each file imports. tests/source.py parses them instead, in ten seconds."""
    paths = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in texts}
    graph: dict[str, set[str]] = {}
    for path, text in texts.items():
        names = set()
        for module, imported, plain in IMPORT.findall(text):
            names |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", imported))}
            names |= set(re.findall(r"[\w.]+", plain))
        graph[path] = {paths[name] for name in names if name in paths}
    return graph


def nearest(graph: Mapping[str, set[str]], sources: Iterable[str]) -> list[str]:
    """Return the test files that reach `sources` by imports, the nearest first."""
    importers: dict[str, set[str]] = {}
    for path, imported in graph.items():
        for each in imported:
            importers.setdefault(each, set()).add(path)
    seen = list(dict.fromkeys(path for path in sorted(sources) if path in graph))
    for path in seen:  # it grows meanwhile
        seen += sorted(importers.get(path, set()).difference(seen))
    return [path for path in seen if path.startswith("tests/") and Path(path).name.startswith("test_")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
