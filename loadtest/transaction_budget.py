"""Measure the cost of a transaction over 2, 4 and 16 partitions, beside a batch in one partition: calls of Python and
C, log entries, syncs and processor time.

    python -m loadtest.transaction_budget [--only TEXT] [--out FILE]

A cluster of three nodes and 16 partitions runs in a scratch folder. Each figure is the sum over all nodes, because the
leaders of a transaction are on all of them; the nodes' work in the same time without a load is subtracted. With one
transaction in flight nothing shares an entry: a transaction over k partitions takes k - 1 entries for intents, one for
the decision, k - 1 for their resolution and one for the end. With many in flight they share entries and syncs. The exit
code is 1 if a load takes more entries than that.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
import uvloop

from kvstore.cli.output import as_table
from kvstore.errors import ConfigError
from kvstore.loadtest.generator.options import path_word
from kvstore.loadtest.loads import closed_loop
from loadtest.bench import peers
from loadtest.bench.transacting import Lost, Ours, pauses
from loadtest.budget import ATTEMPTS_MAX, SETTLE_S, Counted, status
from loadtest.figures import keep

PARTITIONS, WIDTHS, MANY = 16, (2, 4, 16), 32
KEYS = 1_000_000
VALUE = b"x" * 100
OWN_ENTRIES = 0.5
"""Allowance for entries that partitions write by themselves, per transaction."""
QUIET_S, QUIET_MAX_S = 1.0, 30.0
"""Resolutions follow the answers. A load has ended when no entry was written for QUIET_S."""


@dataclass(frozen=True)
class TransactionLoad:
    """`operations` transactions, `in_flight` at a time, of `width` keys, which are in as many partitions or in one."""

    width: int
    is_spread: bool
    in_flight: int
    operations: int

    @property
    def name(self) -> str:
        name = f"transaction over {self.width}" if self.is_spread else f"batch of {self.width}"
        return f"{name}, {self.in_flight} in flight"

    @property
    def entries_max(self) -> int:
        """The maximum number of entries of a transaction."""
        return 2 * self.width if self.is_spread else 1


LOADS = tuple(
    TransactionLoad(width, is_spread, in_flight, 100 if in_flight == 1 else 1_000)
    for width in WIDTHS
    for is_spread in (False, True)
    for in_flight in (1, MANY)
)


@dataclass(frozen=True)
class Spent:
    """Sums over all nodes since their start."""

    entries: int
    syncs: int
    cpu_s: float

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.entries - other.entries, self.syncs - other.syncs, self.cpu_s - other.cpu_s)


@dataclass(frozen=True)
class TransactionCost:
    """The cost of one load at all nodes."""

    load: TransactionLoad
    spent: Spent
    calls: int

    @property
    def entries(self) -> float:
        """Entries per transaction."""
        return self.spent.entries / self.load.operations

    @property
    def is_within(self) -> bool:
        return self.entries <= self.load.entries_max + OWN_ENTRIES

    def row(self) -> dict[str, Any]:
        operations = self.load.operations
        return {
            "load": self.load.name,
            "calls/op": round(self.calls / operations),
            "entries/op": round(self.entries, 2),
            "at most": self.load.entries_max,
            "syncs/op": round(self.spent.syncs / operations, 2),
            "CPU us/op": round(self.spent.cpu_s / operations * 1e6),
        }


class TransactionBudget:
    """Measures one load after the other on one cluster."""

    def __init__(self, cluster: Counted) -> None:
        self._cluster = cluster
        self._nodes = cluster.load().nodes
        self._random = Random(1)

    def measure(self, load: TransactionLoad) -> TransactionCost:
        """Return the cost of a load, once it has been run to warm up. Measures again if a leader changes meanwhile.
        Raises StoreError, and RuntimeError if leaders change each time."""
        self._run(load)
        for _ in range(ATTEMPTS_MAX):
            leads = self._leads()
            began, before = time.monotonic(), self._spent()
            self._run(load)
            took_s, spent = time.monotonic() - began, self._spent() - before
            spent -= self._idle(took_s)
            began = time.monotonic()
            calls = self._counted(lambda: self._run(load))
            calls -= self._counted(partial(time.sleep, time.monotonic() - began))
            if self._leads() == leads:
                return TransactionCost(load, spent, calls.total())
        raise RuntimeError("leaders of partitions change all the time")

    def _idle(self, seconds: float) -> Spent:
        """Return what idle nodes spend in this time."""
        before = self._spent()
        time.sleep(seconds)
        return self._spent() - before

    def _leads(self) -> dict[str, tuple[str, int]]:
        """Return the leader and the epoch of each partition."""
        return {
            partition: (node.id, replica["leading"]["epoch"])
            for node in self._nodes
            for partition, replica in status(node)["partitions"].items()
            if replica.get("leading")
        }

    def _run(self, load: TransactionLoad) -> None:
        """Run a load, and wait until its resolutions are done."""
        uvloop.run(self._transact(load))
        entries, quiet_since, until = -1, time.monotonic(), time.monotonic() + QUIET_MAX_S
        while time.monotonic() < min(until, quiet_since + QUIET_S):
            if (now := self._spent().entries) != entries:
                entries, quiet_since = now, time.monotonic()
            time.sleep(0.1)

    async def _transact(self, load: TransactionLoad) -> None:
        store = await Ours.open([node.grpc for node in self._nodes])
        try:
            keys = list(self._keys(store, load))

            async def one(number: int) -> None:
                rests = pauses(self._random)
                while True:
                    try:
                        return await store.put(keys[number], VALUE)
                    except Lost:
                        await asyncio.sleep(next(rests))

            await closed_loop(iter(range(load.operations)), load.in_flight, one)
        finally:
            await store.close()

    def _keys(self, store: Ours, load: TransactionLoad) -> Iterator[Sequence[bytes]]:
        for _ in range(load.operations):
            groups = self._random.sample(range(store.groups), load.width)
            numbers = self._random.sample(range(KEYS), load.width)
            if load.is_spread:
                yield [store.key(group, number) for group, number in zip(groups, numbers, strict=True)]
            else:
                yield [store.key(groups[0], number) for number in numbers]

    def _spent(self) -> Spent:
        entries = syncs = 0
        cpu_s = 0.0
        for node in self._nodes:
            times, found = psutil.Process(node.pid).cpu_times(), status(node)
            leading = (replica.get("leading") for replica in found["partitions"].values())
            entries += sum(each["entries"] for each in leading if each)
            syncs += found["bookie"]["syncs"]
            cpu_s += times.user + times.system
        return Spent(entries, syncs, cpu_s)

    def _counted(self, work: Any) -> Counter[str]:
        self._cluster.begin()
        work()
        total: Counter[str] = Counter()
        for node in self._nodes:
            total += self._cluster.end(node)
        return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=path_word, default=Path("reports/transaction_budget.json"))
    options = parser.parse_args()
    loads = [load for load in LOADS if options.only in load.name]
    if not loads:
        sys.exit(f"transaction budget: no load has {options.only!r} in its name")
    try:
        with peers.kvstore(Counted, partitions=PARTITIONS) as (cluster, _):
            time.sleep(SETTLE_S)  # leads go to the nodes that the ring prefers
            budget = TransactionBudget(cluster)
            costs = []
            for load in loads:
                costs.append(budget.measure(load))
                print(costs[-1].row(), file=sys.stderr, flush=True)
    except ConfigError as error:
        sys.exit(f"transaction budget: {error}")
    rows = [cost.row() for cost in costs]
    print(as_table(rows))
    keep(options.out, rows)
    if over := [cost.load.name for cost in costs if not cost.is_within]:
        sys.exit(f"more entries than a transaction needs: {', '.join(over)}")


if __name__ == "__main__":
    main()
