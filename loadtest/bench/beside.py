"""Compare the processor time of a partition's operations in this tree with that in another one, by turns.

    git worktree add ../before COMMIT && python -m loadtest.bench.beside ../before [--rounds 10] [CASE …]

Each turn runs `python -m loadtest.bench.partition` once in each tree, with this interpreter, and the order of the two
changes from turn to turn. So both see the machine in the same states. A turn's figure is the minimum of its short
rounds, because other programs only ever add time. A line is the median over the turns: of the figures of each tree, and
of the ratios within a turn. `most` is the limit of the ratio, 1.02 by default; the exit code is 1 if a line exceeds it.
Lines of less than a microsecond are not judged.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from kvstore.cli.output import as_table
from kvstore.loadtest.generator.options import path_word

MOST = 1.02
JUDGED_US_MIN = 1.0
_LINE = re.compile(r"(.+?)\s+(\d+\.\d+)\s.*µs.*")
YARDSTICK = "yardstick"
Figures = dict[str, float]


def parsed(text: str) -> Figures:
    """Return the first figure of each line of loadtest.bench.partition, in µs."""
    found = map(_LINE.fullmatch, text.splitlines())
    return {each[1].strip(): float(each[2]) for each in found if each is not None}


def run_in(tree: Path, cases: Iterable[str]) -> Figures:
    """Run the benchmark in a tree. Raises CalledProcessError."""
    command = [sys.executable, "-P", "-m", "loadtest.bench.partition", *cases]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    return parsed(done.stdout)


def compared(turns: Iterable[tuple[Figures, Figures]], most: float) -> list[dict[str, Any]]:
    """Return the rows of the table for turns of (other tree, this tree)."""
    pairs: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for other, this in turns:
        for name in this.keys() & other.keys():
            pairs[name].append((other[name], this[name]))
    rows = []
    for name, found in sorted(pairs.items()):
        before = median(other for other, _ in found)
        ratio = median(this / other for other, this in found if other)
        is_judged = name != YARDSTICK and before >= JUDGED_US_MIN
        rows.append(
            {
                "line": name,
                "other_us": round(before, 2),
                "this_us": round(median(this for _, this in found), 2),
                "ratio": round(ratio, 4),
                "met": "-" if not is_judged else "yes" if ratio <= most else "NO",
            }
        )
    return rows


def is_met(rows: Iterable[Mapping[str, Any]]) -> bool:
    return all(row["met"] != "NO" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=path_word, help="the other tree")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="lines of loadtest.bench.partition; default: all")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each tree")
    parser.add_argument("--most", type=float, default=MOST, help="limit of the ratio")
    options = parser.parse_intermixed_args()
    trees, turns = (options.other.resolve(), Path.cwd()), []
    for number in range(options.rounds):
        order = trees if number % 2 else trees[::-1]
        found = {tree: run_in(tree, options.cases) for tree in order}
        turns.append((found[trees[0]], found[trees[1]]))
        rows = compared(turns, options.most)
        print(f"after turn {number + 1} of {options.rounds}\n{as_table(rows)}", flush=True)
    if not is_met(rows):
        sys.exit(f"a line takes more than {options.most} times the time in {options.other}")


if __name__ == "__main__":
    main()
