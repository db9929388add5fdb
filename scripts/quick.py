"""Run the fast tests that are nearest to what changed since HEAD. `make quick` runs it after the static checks.

A test file is near a change if few imports lie between them: the changed test file itself, then the test files that
import a changed module, then those that import an importer. The nearest FILES_MAX files run for at most WITHIN_S
seconds; `make check` runs all.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import PurePath

from tests.source import ROOT, import_graph, sources

TOPS = ("kvstore", "loadtest", "examples", "scripts", "tests")
HOUSE_RULES = ("tests/test_tidy.py", "tests/test_docs.py", "tests/scripts/test_reference.py")
"""They read all files, and import few of them."""
NOT_FAST = ("tests/sim/", "tests/cluster/", "tests/interop/", "tests/upgrade/")
"""Folders whose tests are all, or nearly all, left to `make test`."""
FILES_MAX = 60
WITHIN_S = 40


def main(words: list[str]) -> int:
    """Run the tests; `words` are options of pytest. Return its exit code."""
    files = sources(*TOPS)
    paths = {each.module: each.path for each in files}
    graph = {
        paths[module]: {paths[each] for each in imported}
        for module, imported in import_graph(files, also_for_types=True).items()
    }
    found = [path for path in nearest(graph, changed()) if not path.startswith(NOT_FAST)]
    chosen = found[:FILES_MAX]
    print(
        f"{len(chosen)} of {len(found)} test files that what changed can reach, the nearest first; make check runs all"
    )
    sys.stdout.flush()
    command = [sys.executable, "-m", "pytest", "-n", "2", f"--within={WITHIN_S}", *words, *HOUSE_RULES, *chosen]
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


def nearest(graph: Mapping[str, set[str]], sources: Iterable[str]) -> list[str]:
    """Return the test files that reach `sources` by imports, the nearest first."""
    importers: dict[str, set[str]] = {}
    for path, imported in graph.items():
        for each in imported:
            importers.setdefault(each, set()).add(path)
    seen = list(dict.fromkeys(path for path in sorted(sources) if path in graph))
    for path in seen:  # it grows meanwhile
        seen += sorted(importers.get(path, set()).difference(seen))
    return [path for path in seen if path.startswith("tests/") and PurePath(path).name.startswith("test_")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
