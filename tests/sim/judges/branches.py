"""Which branches of the state machines runs have taken. A machine is a file that only decides: its module docstring
says so.

coverage.py measures the branches while seeds are played. A branch has a name that survives changes elsewhere in the
code: the file, the function, the line that decides and the line that comes next. unreached.toml lists the branches that
no run takes, with a reason for each. A branch that is neither taken nor listed is a failure. So is a branch that is
both listed and taken.
"""

from __future__ import annotations

import ast
import json
import re
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from coverage import Coverage

ROOT = Path(__file__).parents[3]
LISTED = Path(__file__).with_name("unreached.toml")
PACKAGES = ("kvstore/partition", "kvstore/wal", "kvstore/bookie", "kvstore/server/routing")
DECIDES = re.compile(r"\bDecides\b")
DRIVERS = (
    "kvstore/partition/leading/leader.py",
    "kvstore/partition/leading/leader_reads.py",
    "kvstore/partition/state/state.py",
)
"""Files that decide and also perform I/O."""
Arc = tuple[int, int]
Arcs = dict[str, set[Arc]]
"""By file: the pairs of lines that ran one after the other."""


@cache
def machines() -> list[str]:
    """Return the files of all machines, relative to the repository."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            said = ast.get_docstring(ast.parse(path.read_text())) or ""
            file = str(path.relative_to(ROOT))
            if DECIDES.search(said) or file in DRIVERS:
                found.append(file)
    return found


@dataclass(slots=True)
class Measured:
    """The arcs that a block of code took."""

    arcs: Arcs = field(default_factory=dict)


@contextmanager
def measuring() -> Iterator[Measured]:
    """Record the arcs of machines that are taken in the block."""
    measured = Measured()
    coverage = _coverage()
    coverage.start()
    try:
        yield measured
    finally:
        coverage.stop()
        data = coverage.get_data()
        for file in data.measured_files():
            measured.arcs[str(Path(file).relative_to(ROOT))] = set(data.arcs(file) or ())


def merge(into: Arcs, other: Arcs) -> None:
    for file, arcs in other.items():
        into.setdefault(file, set()).update(arcs)


def names_of(arcs: Arcs) -> tuple[set[str], set[str]]:
    """Return the branches that were taken and the branches that were not."""
    coverage = _coverage()
    files = machines()
    data = coverage.get_data()
    data.add_arcs({str(ROOT / file): arcs.get(file, {(-1, 1)}) for file in files})
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        coverage.json_report(morfs=[str(ROOT / file) for file in files], outfile=report.name)
        found = json.loads(Path(report.name).read_text())["files"]
    taken: set[str] = set()
    missed: set[str] = set()
    for file, said in found.items():
        names = _Names(str((ROOT / file).relative_to(ROOT)))
        taken.update(names.of(map(tuple, said["executed_branches"])))
        missed.update(names.of(map(tuple, said["missing_branches"])))
    return taken, missed - taken


def judged(arcs: Arcs) -> tuple[list[str], list[str], int]:
    """Return the branches that are neither taken nor listed, the listed branches that were taken or no longer exist,
    and the number of taken branches."""
    taken, missed = names_of(arcs)
    expected = set(listed())
    return sorted(missed - expected), sorted(expected - missed), len(taken)


def listed() -> dict[str, str]:
    """Return the branches that no run takes, with the reason for each."""
    groups = tomllib.loads(LISTED.read_text())["unreached"] if LISTED.exists() else []
    return {f"{group['file']}: {branch}": group["why"] for group in groups for branch in group["branches"]}


def relisted(arcs: Arcs) -> str:
    """Return the list of branches that the measured arcs justify. A new branch gets the reason of its function or of
    its file if all their branches have one reason. Otherwise it gets no reason, and the developer who lists it has
    to write one."""
    _, missed = names_of(arcs)
    before = listed()
    whys: dict[str, set[str]] = defaultdict(set)
    for name, why in before.items():
        file, _, rest = name.partition(": ")
        whys[file].add(why)
        whys[f"{file}: {rest.partition(' | ')[0]}"].add(why)
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted(missed):
        file, _, branch = name.partition(": ")
        known = [whys[f"{file}: {branch.partition(' | ')[0]}"], whys[file]]
        why = before.get(name) or next((min(each) for each in known if len(each) == 1), "")
        groups[file, why].append(branch)
    return (
        "".join(
            f"[[unreached]]\nfile = {json.dumps(file)}\nwhy = {json.dumps(why)}\nbranches = [\n"
            + "".join(f"  {json.dumps(each, ensure_ascii=False)},\n" for each in sorted(set(some)))
            + "]\n\n"
            for (file, why), some in groups.items()
        ).rstrip("\n")
        + "\n"
    )


def _coverage() -> Coverage:
    include = [str(ROOT / file) for file in machines()]
    return Coverage(data_file=None, branch=True, include=include, config_file=False, messages=False)


class _Names:
    """The names of the branches of one file."""

    def __init__(self, file: str) -> None:
        text = (ROOT / file).read_text()
        self._file, self._lines = file, text.splitlines()
        self._functions: list[tuple[int, int, str]] = []
        self._visit(ast.parse(text), "")
        self._functions.sort(key=lambda each: each[1] - each[0])

    def _visit(self, node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}".lstrip(".")
                self._functions.append((child.lineno, child.end_lineno or child.lineno, name))
            self._visit(child, name)

    def of(self, arcs: Iterable[tuple[int, ...]]) -> Iterator[str]:
        for source, target in arcs:
            function = next((name for first, last, name in self._functions if first <= source <= last), "")
            after = self._lines[target - 1].strip() if target > 0 else "(end)"
            yield f"{self._file}: {function} | {self._lines[source - 1].strip()} → {after}"
