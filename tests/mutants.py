"""Breakages of every layer of the store, each of which a test must detect: `make mutants`, or
`python -m tests.mutants [PART OF A NAME]…`.

A breakage is a patch for one run; nothing in kvstore/ refers to it. The exit code is 1 if a breakage was missed, and 2
if a name matches none.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from kvstore.env.parent import be_killed_with_parent
from tests.bookie import mutants as bookies
from tests.sim.breakages import (
    catalogue,
    caught_wal,
    mutants_answers,
    mutants_repair,
    mutants_transactions,
    mutants_wal,
)
from tests.sim.breakages import mutants as clusters

SEEDS = range(60)
BY_PYTEST = (
    "tests/partition/leading/test_mutants.py",
    "tests/partition/transactions/test_mutants.py",
    "tests/partition/state/test_state_applied_together.py",
    "tests/partition/state/test_rocks_memory_mutants.py",
    "tests/models",
    "tests/sim/recovering/test_mutants.py",
    "tests/sim/upgrading/test_mixed.py",
    "tests/namespaces/test_mutants.py",
    "tests/server/balance/test_mutants.py",
    "tests/server/access/test_mutants.py",
    "tests/server/access/test_rule_mutants.py",
    "tests/server/routing/test_read_transaction.py",
    "tests/server/access/test_logins_unfounded.py",
    "tests/sim/coordination",
)
"""Suites whose tests break something themselves: the code of a leader, an auditor, a guard, a lock, a budget, the
balancer or a login, or a model by one of its rules."""
BREAKS = re.compile(r"test_(?:a_broken_|broken_|without_|\w+_without_|\w+_is_noticed)")
"""Names of the tests in these suites that break something."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The breakages of one part of the store."""

    title: str
    names: Callable[[], list[str]]
    find: Callable[[str], str | None]
    """Return how a breakage is detected; None if it is not."""


def _names_of_clusters() -> list[str]:
    assert mutants_answers.BUSY  # importing these has filled the catalogue
    assert mutants_transactions.BUSY
    first = clusters.ELEVEN
    return [*first, *sorted(catalogue.MUTANTS.keys() - set(first))]


def _by_cluster(name: str) -> str | None:
    found = catalogue.noticed(name, SEEDS)
    return str(found) if found else None


def _by_ledgers(name: str) -> str | None:
    return caught_wal.caught_by(name, SEEDS)


def _pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _names_by_pytest() -> list[str]:
    collected = _pytest("--collect-only", *BY_PYTEST).stdout.splitlines()
    return [line for line in collected if BREAKS.match(line.partition("::")[2])]


def _by_pytest(name: str) -> str | None:
    done = _pytest(name)
    if done.returncode > 1:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout.splitlines()[-1] if done.returncode == 0 else None


LAYERS = (
    Layer("whole clusters", _names_of_clusters, _by_cluster),
    Layer("ledgers and logs", lambda: sorted(mutants_wal.MUTANTS), _by_ledgers),
    Layer("repair of ledgers", lambda: sorted(mutants_repair.MUTANTS), mutants_repair.caught_by),
    Layer("bookies", lambda: sorted(bookies.MUTANTS), bookies.caught_by),
    Layer("leaders and models", _names_by_pytest, _by_pytest),
)


def chosen(wanted: list[str]) -> list[tuple[Layer, list[str]]]:
    """Return the breakages whose names contain one of `wanted`; all if `wanted` is empty. Raises LookupError for a word
    that is in no name."""
    every = [(layer, layer.names()) for layer in LAYERS]
    unknown = [word for word in wanted if not any(word in name for _, names in every for name in names)]
    if unknown:
        raise LookupError(f"no breakage has {' or '.join(map(repr, unknown))} in its name")
    words = wanted or [""]
    return [(layer, [name for name in names if any(word in name for word in words)]) for layer, names in every]


def find(title: str, name: str) -> str | None:
    """Return how the breakage is detected. The check may run in a new process."""
    logging.getLogger("kvstore").setLevel(logging.CRITICAL + 1)
    try:
        return next(layer for layer in LAYERS if layer.title == title).find(name)
    except AssertionError as error:  # the breakage does not fit the code: a miss, and the others still have their turn
        print(error, file=sys.stderr, flush=True)
        return None


def main(wanted: list[str]) -> int:
    """Try each breakage until a test detects it, and print a table for each layer."""
    try:
        tables = chosen(wanted)
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    missed: list[str] = []
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=get_context("spawn"), initializer=be_killed_with_parent
    ) as pool:
        for layer, names in tables:
            width = max(map(len, names), default=0)
            noticed = 0
            for name, how in zip(names, pool.map(find, [layer.title] * len(names), names), strict=True):
                print(f"{name:{width}}  {how[:140] if how else 'MISSED'}", flush=True)
                noticed += how is not None
                missed += [] if how else [name]
            if names:
                print(f"{layer.title}: {noticed} of {len(names)} breakages were noticed\n", flush=True)
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
