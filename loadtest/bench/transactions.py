"""Measure transactions over several partitions beside batches in one partition and beside etcd's transactions.

    python -m loadtest.bench.transactions [--rounds 5] [--seconds 4] [--only TEXT] [--out FILE]

Our cluster has three nodes and 16 partitions, and etcd, if it is installed, three members. Both run all the time, and
each line is measured in turn for each store, so that all lines see the machine in the same states. A figure is the
median of all rounds. APPENDS is the median latency in units of the median latency of a put in the same round: a put
waits for one append of the log, and so does a batch, while a transaction over several partitions waits for two and for
one round trip between servers.

- *put*: one key.
- *batch of k*: k keys of one partition. *transaction over k*: one key in each of k partitions.
- *h hot keys*: a caller reads two keys and writes them if neither has changed since, again with a random pause until
  that succeeds. Both are drawn from h hot keys; with one hot key the other is drawn from 100,000, and is written second
  or first. *Adding to h hot keys* adds 1 to two such keys instead; etcd's clients have to read them first. `attempts`
  counts them for each success. Latencies are from the first attempt to the success. LEAST is the number of successes
  of the caller that had the fewest, as a share of the mean.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any, NamedTuple

import uvloop

from kvstore.cli.output import as_table
from kvstore.devcluster.local import LocalCluster
from kvstore.loadtest.generator.options import path_word
from loadtest.bench import peers
from loadtest.bench.transacting import Etcd, Lost, Ours, Transacting, pauses, rewrite
from loadtest.figures import keep

PARTITIONS, WIDTHS, HOT = 16, (2, 4, 16), (1, 2, 10, 100)
COLD = 100_000
MANY, HOT_MANY = 32, 20
VALUE = b"v" * 100
WARM_S = 0.5
OURS, ETCD = "kvstore", "etcd"
PUT = "put"


class Work(NamedTuple):
    """One line of the table: what each caller does again and again."""

    name: str
    in_flight: int
    one: Callable[[Transacting, Random], Awaitable[int]]
    """Carries out one transaction, and returns its attempts."""
    is_ours_only: bool = False


@dataclass
class Round:
    """The figures of one line of one store in one round."""

    took_s: float = 0.0
    attempts: int = 0
    latencies_ms: list[float] = field(default_factory=list)
    by_caller: list[int] = field(default_factory=list)
    """Number of successes of each caller."""

    @property
    def per_s(self) -> float:
        return len(self.latencies_ms) / self.took_s

    @property
    def least(self) -> float:
        """Successes of the caller that had the fewest, as a share of the mean."""
        return min(self.by_caller) / mean(self.by_caller) if any(self.by_caller) else 1.0

    def quantile_ms(self, share: float) -> float:
        """Return a quantile of the latencies. Raises ValueError if nothing was done."""
        if not self.latencies_ms:
            raise ValueError("nothing was done")
        return sorted(self.latencies_ms)[min(len(self.latencies_ms) - 1, int(share * len(self.latencies_ms)))]


def works(only: str = "") -> list[Work]:
    """Return the lines of the table: a put, and those with `only` in their names."""
    found = [Work(PUT, 1, _put_in_one(1)), Work(f"{PUT}, {MANY} in flight", MANY, _put_in_one(1))]
    for width in WIDTHS:
        for in_flight in (1, MANY):
            more = f", {in_flight} in flight" if in_flight > 1 else ""
            found.append(Work(f"batch of {width}{more}", in_flight, _put_in_one(width), is_ours_only=True))
            found.append(Work(f"transaction over {width}{more}", in_flight, _put_over(width)))
    found += [Work(f"{hot} hot keys, {HOT_MANY} in flight", HOT_MANY, _rewrite(hot)) for hot in HOT]
    found += [Work(f"adding to {hot} hot keys, {HOT_MANY} in flight", HOT_MANY, _add(hot)) for hot in HOT]
    found.append(Work(f"1 hot key second, {HOT_MANY} in flight", HOT_MANY, _rewrite(1, is_second=True)))
    return [work for work in found if only in work.name or work.name == PUT]


def _put_in_one(width: int) -> Callable[[Transacting, Random], Awaitable[int]]:
    async def one(store: Transacting, random: Random) -> int:
        group = random.randrange(store.groups)
        keys = [store.key(group, each) for each in random.sample(range(COLD), width)]
        return await _until_done(partial(store.put, keys, VALUE), random)

    return one


def _put_over(width: int) -> Callable[[Transacting, Random], Awaitable[int]]:
    async def one(store: Transacting, random: Random) -> int:
        groups = random.sample(range(store.groups), width)
        keys = [store.key(group, random.randrange(COLD)) for group in groups]
        return await _until_done(partial(store.put, keys, VALUE), random)

    return one


def _add(hot: int) -> Callable[[Transacting, Random], Awaitable[int]]:
    async def one(store: Transacting, random: Random) -> int:
        # numbers of their own, because values of other lines are no numbers
        keys = [b"+" + key for key in _hot_pair(store, hot, random)]
        return await _until_done(partial(store.add, keys), random)

    return one


async def _until_done(transact: Callable[[], Awaitable[None]], random: Random) -> int:
    rests = pauses(random)
    attempts = 1
    while True:
        try:
            await transact()
        except Lost:
            attempts += 1
            await asyncio.sleep(next(rests))
        else:
            return attempts


def _rewrite(hot: int, *, is_second: bool = False) -> Callable[[Transacting, Random], Awaitable[int]]:
    async def one(store: Transacting, random: Random) -> int:
        keys = _hot_pair(store, hot, random)
        return await rewrite(store, keys[::-1] if is_second else keys, VALUE, pauses(random), asyncio.sleep)

    return one


def _hot_pair(store: Transacting, hot: int, random: Random) -> list[bytes]:
    """Return two of so many hot keys, or the only one and a key that hardly anybody else uses."""
    numbers = random.sample(range(hot), 2) if hot > 1 else (0, COLD + random.randrange(COLD))
    return [store.key(number % store.groups, number) for number in numbers]


async def run_round(store: Transacting, work: Work, seconds: float, random: Random) -> Round:
    """Run one line for so many seconds, and at least until one transaction is done."""
    found = Round()
    began = time.perf_counter() + min(WARM_S, seconds / 4)
    until = began + seconds

    async def caller() -> None:
        own, done = Random(random.getrandbits(64)), 0
        while (now := time.perf_counter()) < until or not found.latencies_ms:
            attempts = await work.one(store, own)
            if now >= began:
                done += 1
                found.attempts += attempts
                found.latencies_ms.append(1000 * (time.perf_counter() - now))
        found.by_caller.append(done)

    await asyncio.gather(*(caller() for _ in range(work.in_flight)))
    found.took_s = time.perf_counter() - began
    return found


Rounds = dict[tuple[str, str], list[Round]]
"""Line and store → rounds."""


async def measure(stores: dict[str, Transacting], rounds: int, seconds: float, only: str = "") -> Rounds:
    """Run every line of every store in turn, so many times."""
    found: Rounds = defaultdict(list)
    random = Random(1)
    for number in range(rounds):
        for work in works(only):
            for name, store in stores.items():
                if name == OURS or not work.is_ours_only:
                    found[work.name, name].append(await run_round(store, work, seconds, random))
        print(f"round {number + 1} of {rounds}", flush=True)
    return found


def rows_of(found: Rounds) -> list[dict[str, Any]]:
    """Return the rows of the table: medians over the rounds."""
    rows = []
    for (line, store), rounds in found.items():
        puts = found[PUT, store]
        appends = [each.quantile_ms(0.5) / put.quantile_ms(0.5) for each, put in zip(rounds, puts, strict=True)]
        rows.append(
            {
                "line": line,
                "store": store,
                "per_s": round(median(each.per_s for each in rounds), 1),
                "p50_ms": round(median(each.quantile_ms(0.5) for each in rounds), 2),
                "p99_ms": round(median(each.quantile_ms(0.99) for each in rounds), 1),
                "max_ms": round(max(each.quantile_ms(1.0) for each in rounds), 1),
                "appends": None if "in flight" in line else round(median(appends), 2),
                "attempts": round(
                    sum(each.attempts for each in rounds) / sum(len(each.latencies_ms) for each in rounds), 2
                ),
                "least": round(median(each.least for each in rounds), 2),
            }
        )
    return rows


async def _measure(endpoints: list[str], etcd: list[str], options: argparse.Namespace) -> Rounds:
    stores: dict[str, Transacting] = {OURS: await Ours.open(endpoints)}
    if etcd:
        stores[ETCD] = Etcd(etcd, PARTITIONS)
    try:
        return await measure(stores, options.rounds, options.seconds, options.only)
    finally:
        for store in stores.values():
            await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each line in each round")
    parser.add_argument("--only", default="", metavar="TEXT", help="only put, and lines with this in their names")
    parser.add_argument("--out", type=path_word, default=Path("reports/transactions.json"))
    options = parser.parse_args()
    with ExitStack() as stack:
        _, file = stack.enter_context(peers.kvstore(LocalCluster, partitions=PARTITIONS))
        etcd: list[str] = []
        if peers.is_installed("etcd"):
            etcd = stack.enter_context(peers.etcd(stack.enter_context(peers.scratch()))).addresses
        else:
            print("etcd is not installed; its lines are left out")
        endpoints = [node.grpc for node in file.nodes]
        rows = rows_of(uvloop.run(_measure(endpoints, etcd, options)))
    print(as_table(rows))
    keep(options.out, rows)


if __name__ == "__main__":
    main()
