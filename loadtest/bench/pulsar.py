"""Compare Apache Pulsar's rate on three of our bookies with its rate on three of Apache's.

    python -m loadtest.bench.pulsar [--rounds 3] [--seconds 6] [--size 1024] [--plain 1 100 1000] [--batched 1000]

Each kind of bookies has its own ZooKeeper and its own broker with the settings of docs/how-to/run-apache-pulsar.md.
Our bookies have their default settings. Apache's have those of Pulsar's conf/bookkeeper.conf that matter here: RocksDB
as the index, and 1 ms of waiting for other entries before a sync. All sync before they answer.

A producer keeps a number of messages in flight on a new topic: `--plain` stores each message as a separate entry,
`--batched` lets the client put as many as it has into one entry (at most 1,000, after at most 1 ms). Kinds take turns
within a round. Each line is the median of the rounds: messages acknowledged per second, the time from the call of a
send to its acknowledgement, and the processor time per message of the producer, the broker and the three bookies
together. A run in which a send fails is reported and left out.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

from loadtest.bench.log_client import RunEnded, one_run
from tests.interop import java
from tests.interop.processes import Processes
from tests.interop.pulsar.broker import Broker

WARM_S = 8.0
"""Duration of the warm-up of each run, in which Java compiles."""
PULSARS_BOOKIE = {
    "ledgerStorageClass": "org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage",
    "journalMaxGroupWaitMSec": "1",
}
"""The settings of Pulsar's conf/bookkeeper.conf that differ from a bookie's defaults and affect the rate."""
HEAD = (
    "| runs | load | bookies | messages/s | messages per entry | p50 ms | p99 ms "
    "| us of the producer | us of the broker | us of the bookies |\n" + 10 * "|---" + "|"
)
LINE = (
    "| {count} | {load} | {bookies} | {per_s:,.0f} | {per_entry:.1f} | {p50_ms:.2f} | {p99_ms:.2f} "
    "| {client_us:.1f} | {broker_us:.1f} | {bookies_us:.1f} |"
)


class Kind(NamedTuple):
    """A broker and its three bookies."""

    broker: Broker
    bookies: list[int]

    async def run(self, topic: str, load: Load, size: int, seconds: float, warm_s: float) -> dict[str, float]:
        """Run a producer on a new topic, and return its figures. Raises RunEnded."""
        numbers = [str(load.is_batched).lower(), str(load.in_flight), str(size), str(seconds), str(warm_s)]
        command = java.pulsar_command("Rate", self.broker.url, topic, *numbers, flags=("-XX:TieredStopAtLevel=4",))
        return await one_run({"bookies": self.bookies, "broker": [self.broker.process.pid]}, command, size)


class Load(NamedTuple):
    """How a producer sends."""

    is_batched: bool
    in_flight: int

    def __str__(self) -> str:
        return f"{'batched' if self.is_batched else 'plain'}, {self.in_flight} in flight"


WARM = Load(is_batched=False, in_flight=100)


async def started(directory: Path, stack: AsyncExitStack, *, ours: bool) -> Kind:
    """Start ZooKeeper, three bookies of one kind and a broker."""
    cluster = await stack.enter_async_context(Processes(directory, 3 if ours else 0))
    for _ in range(0 if ours else 3):
        await cluster.add_their_bookie(quick=False, **PULSARS_BOOKIE)
    broker = Broker(cluster, {})
    await asyncio.to_thread(broker.set_up)
    await broker.start()
    pids = [each.process.pid for each in cluster.bookies] or [each.pid for each in cluster.theirs.values()]
    return Kind(broker, pids)


async def compare(
    directory: Path, loads: Sequence[Load], *, size: int, seconds: float, rounds: int, warm_s: float = WARM_S
) -> None:
    async with AsyncExitStack() as stack:
        kinds = {
            "ours": await started(directory / "ours", stack, ours=True),
            "Apache's": await started(directory / "theirs", stack, ours=False),
        }
        for kind in kinds.values():  # a broker's first run is slower, because Java compiles
            await kind.run("persistent://public/default/warm", WARM, size, seconds, warm_s)
        print(HEAD, flush=True)
        for number, load in enumerate(loads):
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
            for round_ in range(rounds):
                for name in sorted(kinds, reverse=bool(round_ % 2)):
                    topic = f"persistent://public/default/load-{number}-{round_}"
                    try:
                        runs[name].append(await kinds[name].run(topic, load, size, seconds, warm_s))
                    except RunEnded as error:
                        print(f"{name}, {load}: {error}", file=sys.stderr, flush=True)
            for name, found in runs.items():
                if found:
                    middle = {key: median(each[key] for each in found) for key in found[0]}
                    print(LINE.format(count=len(found), load=load, bookies=name, **middle), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", type=int, nargs="*", default=[1, 100, 1_000], help="messages in flight")
    parser.add_argument("--batched", type=int, nargs="*", default=[1_000], help="messages in flight")
    parser.add_argument("--size", type=int, default=1_024, help="bytes of a message")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if not java.has_pulsar() or not java.is_installed():
        sys.exit("expected the jars of BookKeeper and Pulsar, got none; run python -m tests.interop.java")
    java.compile_pulsar()
    loads = [Load(is_batched=False, in_flight=each) for each in given.plain]
    loads += [Load(is_batched=True, in_flight=each) for each in given.batched]
    with tempfile.TemporaryDirectory(prefix="bench-pulsar-") as directory:
        work = compare(Path(directory), loads, size=given.size, seconds=given.seconds, rounds=given.rounds)
        asyncio.run(work)


if __name__ == "__main__":
    main()
