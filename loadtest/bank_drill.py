"""A bank whose transfers are transactions over several partitions, on its own cluster: no transfer is ever seen by
half, lost or doubled.

    python -m loadtest.bank_drill [--minutes 10] [--seed 1] [--front client|redis|http] [--one-partition] [--out FILE]

There are 100 accounts over six partitions of three nodes, and 20 clients that transfer. Meanwhile leaders of homes and
participants are killed and stopped, the metadata store is away, partitions join and leave, and full and incremental
Spark snapshots are taken. Read transactions, session reads, pinned reads and the snapshots are judged at once, all
ledgers at the end. Further clients append to lists, and a checker looks for cycles in what they saw. The exit code is 1
if a safety promise is broken. The figures go to the key "bank-FRONT" of the file.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from kvstore.client import AsyncClient
from kvstore.env.real import run
from kvstore.loadtest.generator.options import path_word
from kvstore.versions import LATEST
from loadtest.bench import peers
from loadtest.drill import MINUTES_MAX, keep_logs
from loadtest.drills.bank import READ_PROBLEMS, Bank
from loadtest.drills.bank_books import PROBLEMS
from loadtest.drills.bank_fronts import ClientFront, Front, HttpFront, RedisFront
from loadtest.drills.bank_stage import FULL, INCREMENTAL, JOINED, LEFT, PINNED, STRIKES, BankStage
from loadtest.drills.ring_stage import FSCK, RingStage
from loadtest.drills.stage import Report
from tests.cluster.harness import Cluster, running_cluster

PARTITIONS = 6
SETTINGS = {"client": (), "http": (), "redis": ("redis.transactions_across_slots=true",)}
"""Settings of the nodes, by front."""
ALONE_S = 5.0
"""Seconds of load before the first strike and after the last one."""


def front_of(name: str, cluster: Cluster) -> Callable[[Random], Front]:
    """Return the function that makes a client of this kind."""
    nodes = cluster.file.nodes
    match name:
        case "client":
            return lambda random: ClientFront([node.grpc for node in nodes])
        case "redis":
            return lambda random: RedisFront([node.resp for node in nodes], random)
        case "http":
            return lambda random: HttpFront([node.http for node in nodes], random)
    raise ValueError(f"expected one of {', '.join(SETTINGS)}, got {name!r}")


async def play(
    cluster: Cluster, report: Report, *, front: str, seed: int, minutes: float, prefix: bytes, folder: Path
) -> None:
    """Run the drill, and add its figures to the report."""
    task = asyncio.current_task()
    assert task is not None
    # Processes would stay. An exception of a signal's handler may end in the callback of a transport.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    ring = RingStage(cluster, report, keys=0, value_bytes=0, seed=seed)
    async with AsyncClient(cluster.url) as client:
        await asyncio.to_thread(cluster.wait_until, lambda: log_versions(cluster) == {LATEST}, "the version rises")
        bank = Bank(client, front_of(front, cluster), seed=seed, prefix=prefix, seconds=minutes * 60)
        await bank.open()
        stage = BankStage(cluster, ring, bank, seed=seed, folder=folder)
        began = time.perf_counter()
        bank.start()
        try:
            await stage.alone(ALONE_S)
            await stage.run(minutes * 60)
            healed = time.perf_counter()
            await stage.alone(ALONE_S)
        finally:
            await bank.stop()
        ended = time.perf_counter()
        left_over = await stage.left_over()
        await bank.verify()
        code, found = await ring.command("fsck")
    for each in bank.findings.first:
        ring.log(f"PROBLEM {each}")
    for what in (*PROBLEMS, *READ_PROBLEMS):
        report.add_safety(f"{front}: {what}", bank.findings.counts[what])
    report.add_safety(f"{front}: {FSCK}", found["errors"] if found else 1 + code)
    report.add_safety(f"{front}: intents and decisions that stay", left_over)
    report.add(f"{front}: transfers acknowledged", len(bank.acknowledged), least=1)
    report.add(f"{front}: transfers a second", len(bank.acknowledged) / (ended - began))
    report.add(
        f"{front}: transfers acknowledged after the last strike", sum(each > healed for each in bank.commits), least=1
    )
    report.add(f"{front}: longest time without a transfer", longest_pause(bank.commits), unit="s")
    report.add(f"{front}: transfers refused", len(bank.refused))
    report.add(f"{front}: transfers of unknown outcome", len(bank.unknown))
    report.add(f"{front}: transactions on lists", bank.appends, least=1)
    for what, count in sorted(bank.reads.items()):
        report.add(f"{front}: {what}", count, least=1)
    for what in (*STRIKES, JOINED, LEFT, PINNED, FULL, INCREMENTAL):
        report.add(f"{front}: {what}", stage.counts[what], least=1)
    report.add(f"{front}: rows of incremental snapshots by intents", stage.rows_of_intents)
    ring.log(f"errors told to clients: {dict(bank.errors)}; strikes made impossible: {dict(stage.failed)}")


def log_versions(cluster: Cluster) -> set[Any]:
    """Return the cluster versions that the replicas' logs are written in."""
    return {each["log_version"] for node in cluster.ids for each in cluster.status(node)["partitions"].values()}


def longest_pause(times: list[float]) -> float:
    """Return the longest time between two of these times, in seconds."""
    return max((later - earlier for earlier, later in pairwise(times)), default=float("inf"))


def run_drill(*, front: str, seed: int, minutes: float, prefix: bytes, out: Path) -> bool:
    """Run the drill, print it, and write it. Return False if a safety promise is broken."""
    report = Report()
    with peers.scratch() as folder:
        try:
            with running_cluster(folder, partitions=PARTITIONS, settings=SETTINGS[front]) as cluster:
                run(play(cluster, report, front=front, seed=seed, minutes=minutes, prefix=prefix, folder=folder))
        finally:
            keep_logs(folder, out.parent / f"bank-{front}-logs")
            report.write(out, f"bank-{front}", seed=seed)
    print(report.table())
    print(f"seed {seed}, {report.verdict}")
    return report.is_safe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long strikes go on")
    parser.add_argument("--seed", type=int, default=1, help="of the strikes and of the clients")
    parser.add_argument("--front", choices=sorted(SETTINGS), default="client", help="how clients use transactions")
    parser.add_argument("--one-partition", action="store_true", help="give all keys one {tag}, for comparison")
    parser.add_argument("--out", type=path_word, default=Path("reports/results.json"))
    arguments = parser.parse_args()
    if not 0 < arguments.minutes <= MINUTES_MAX:
        parser.error(f"--minutes: expected more than 0, at most {MINUTES_MAX:,} (a week), got {arguments.minutes:g}")
    options = {"front": arguments.front, "seed": arguments.seed, "minutes": arguments.minutes}
    prefix = b"{bank}-" if arguments.one_partition else b"bank-"
    sys.exit(0 if run_drill(**options, prefix=prefix, out=arguments.out) else 1)


if __name__ == "__main__":
    main()
