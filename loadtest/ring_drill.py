"""Add and remove partitions of a real cluster under load and check every answer; then repeat it while leaders are
killed.

    python -m loadtest.ring_drill [--quick] [--rounds 50] [--only grow|kills] [--keys 20000] [--out FILE]

A cluster of three nodes and three ZooKeeper servers goes from 1 to 3, 8 and 5 partitions by `kvstore ring add` and
`remove`. For each change the drill reports wrong answers (none is allowed), the waiting time of operations on moved
ranges, and the throughput that other ranges kept. Each round with kills changes the ring again, while SIGKILL hits the
leaders of a move's source and target and ZooKeeper's leader, in an order and at times drawn from the seed. The figures
go to the key "ring" of the file. The exit code is 1 if a safety promise is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from kvstore.client import AsyncClient
from kvstore.env.real import run
from kvstore.loadtest.generator.options import path_word
from kvstore.ring import TOKENS
from loadtest.bench import peers
from loadtest.drill import keep_logs
from loadtest.drills.ring_load import PAUSE_S, RingLoad, Span, rate
from loadtest.drills.ring_spans import Longest, hand_over_rows, longest_waits, quantile
from loadtest.drills.ring_stage import PROBLEMS, RingStage, operations_of
from loadtest.drills.ring_verdict import KEPT_LEAST, READ_WAIT_MAX_S, WRITE_WAIT_MAX_S, Load, Verdict
from loadtest.drills.stage import Report
from tests.cluster.harness import running_cluster
from tests.waiting import wait_until

BASE_S = 8.0
"""Seconds of load before a change, with which the throughput is compared."""
WARM_S = 2.0
WHOLE = (0, TOKENS - 1)
FAST_BYTES_PER_S = 32 << 20
VICTIMS = ("source", "target", "ZooKeeper")
ENOUGH_S = 120.0
KILLED_AT = 3
"""Number of partitions up to which a round adds one; above it, a round removes one."""


@dataclass(frozen=True)
class Course:
    """The numbers of partitions, one after the other, and then the number of rounds with kills."""

    sizes: Sequence[int] = (1, 3, 8, 5)
    rounds: int = 50
    keys: int = 20_000
    value_bytes: int = 200
    base_s: float = BASE_S
    pause_s: float = PAUSE_S
    """Average pause of each caller between two operations, in seconds."""
    round_s: float = 25.0
    """Approximate duration of the moves in a round with kills, in seconds. Some moves must be open when the kills
    come."""
    operations_least: int = 0
    """Minimum number of operations of each load. The load continues until it is reached, however slow the machine
    is."""


QUICK = Course(sizes=(1, 3, 5, 2), rounds=3, keys=3_000, base_s=3.0)


async def grow(stage: RingStage, course: Course) -> None:
    """Change the ring from one size to the next, without kills."""
    for before, after in zip(course.sizes, course.sizes[1:], strict=False):
        await _resize(stage, before, after, course)


async def _resize(stage: RingStage, before: int, after: int, course: Course) -> None:
    base_s = course.base_s
    name = f"{before} to {after} partitions"
    there = await stage.partitions()
    words = ["add", "--count", str(after - before)] if after > before else ["remove", *there[: before - after]]
    planned = await stage.plan(*words)
    async with AsyncClient(stage.cluster.url) as client:
        load = RingLoad(client, stage.statics, stage.random.getrandbits(32), pause_s=course.pause_s)
        load.aim(planned)
        await load.start()
        try:
            await asyncio.sleep(min(WARM_S, base_s))
            gc.collect()
            gc.freeze()  # else collections of what is recorded would be waits of the store
            await asyncio.sleep(base_s)
            began = time.time()
            psutil.cpu_percent()
            done = await stage.change(*words)
            await stage.moved(load)
            ended, busy = time.time(), psutil.cpu_percent() / 100
            await stage.retired()
            await _made(load, course.operations_least)
        finally:
            await load.stop()
        spans = {each.id: (each.first, each.last) for each in done.moves}
        stage.report.add(f"{name}: seconds for {len(spans)} moves", ended - began, unit="s")
        _report_waits(stage, name, load, spans)
        kept = rate(load.steady, began, ended) / max(1e-9, rate(load.steady, began - base_s, began))
        per_s = rate(load.steady, began, ended) + rate(load.waits, began, ended)
        stage.verdict.changes.append(Load(kept, per_s, busy))
        stage.report.add(f"{name}: throughput of untouched ranges meanwhile, of that before", kept, least=KEPT_LEAST)
        problems = await stage.judge(load)
        for what in PROBLEMS:
            stage.report.add_safety(f"{name}: {what}", problems[what])


async def _made(load: RingLoad, count: int) -> None:
    """Wait until the load has made `count` operations. Raises TimeoutError."""

    async def is_enough() -> bool:
        return operations_of(load) >= count

    await wait_until(is_enough, timeout_s=ENOUGH_S, what=f"{count} operations")


def _report_waits(stage: RingStage, name: str, load: RingLoad, spans: dict[int, Span]) -> None:
    found = stage.hand_overs(spans)
    for row in hand_over_rows(found.values()):
        stage.log(str(row))
    of_moves = longest_waits(spans, found, load.waits)
    of_others = longest_waits(dict.fromkeys(spans, WHOLE), found, load.steady)
    stage.verdict.moving += of_moves.values()
    stage.verdict.untouched += of_others.values()
    stage.verdict.freezes += [each.freezes for each in found.values()]
    for what, most in (("write", WRITE_WAIT_MAX_S), ("read", READ_WAIT_MAX_S)):
        _report_quantiles(stage, f"{name}: longest {what} wait in a move", what, of_moves, most)
        _report_quantiles(stage, f"{name}: longest {what} wait of untouched keys in the same times", what, of_others)
        for which, waits in (("moving", load.waits), ("untouched", load.steady)):
            every = [wait.seconds for wait in waits if wait.is_write is (what == "write")]
            stage.report.add(
                f"{name}: {what}s of {which} keys, p99.9 of {len(every)}", quantile(every, 0.999), unit="s"
            )


def _report_quantiles(
    stage: RingStage, name: str, what: str, longest: dict[int, Longest], most: float | None = None
) -> None:
    met = [wait for each in longest.values() if (wait := getattr(each, what)) is not None]
    stage.report.add(f"{name}, median of {len(met)}", quantile(met, 0.5), unit="s")
    stage.report.add(f"{name}, p99.9", quantile(met, 0.999), most=most, unit="s")


async def kills(stage: RingStage, course: Course) -> None:
    """Add and remove a partition in turn, with kills meanwhile."""
    problems: Counter[str] = Counter()
    for number in range(1, course.rounds + 1):
        there = await stage.partitions()
        words = ["add", "--count", "1"] if len(there) <= KILLED_AT else ["remove", stage.random.choice(there)]
        stage.log(f"round {number} of {course.rounds}: {' '.join(words)}")
        problems += await _round(stage, course, words)
    for what in PROBLEMS:
        stage.report.add_safety(f"kills, {course.rounds} rounds: {what}", problems[what])
    for what in VICTIMS:
        stage.report.add(
            f"kills of a leader of {what} while a move was open", stage.kills[what], least=course.rounds / 2
        )


async def _round(stage: RingStage, course: Course, words: Sequence[str]) -> Counter[str]:
    """Run one round and return its violations."""
    planned = await stage.plan(*words)
    targets = 1 if words[0] == "add" else KILLED_AT
    await stage.throttle(course.keys * course.value_bytes / KILLED_AT / targets / course.round_s)
    async with AsyncClient(stage.cluster.url) as client:
        load = RingLoad(client, stage.statics, stage.random.getrandbits(32), pause_s=course.pause_s)
        load.aim(planned)
        await load.start()
        try:
            await stage.change(*words)
            following = asyncio.create_task(stage.moved(load))
            await asyncio.gather(_strike_nodes(stage), _strike_zookeeper(stage))
            await stage.throttle(FAST_BYTES_PER_S)
            await following
            await asyncio.to_thread(stage.cluster.wait_ready)
            await stage.retired()
            await _made(load, course.operations_least)
        finally:
            await load.stop()
        return await stage.judge(load)


async def _strike_nodes(stage: RingStage) -> None:
    for role in stage.random.sample(("source", "target"), 2):
        await asyncio.sleep(stage.random.uniform(0.05, 2.0))
        stage.kills[role] += await stage.kill_leader_of(role)


async def _strike_zookeeper(stage: RingStage) -> None:
    await asyncio.sleep(stage.random.uniform(0.05, 6.0))
    stage.kills["ZooKeeper"] += await stage.kill_zookeeper()


SCENARIOS = {"grow": grow, "kills": kills}


def run_drill(*, course: Course, only: str, out: Path, seed: int) -> bool:
    """Run the drill, print it, and write it. Return False if a safety promise is broken."""
    report, verdict = Report(), Verdict()
    with peers.scratch() as folder:
        try:
            with running_cluster(folder, partitions=course.sizes[0], zookeepers=3) as cluster:
                stage = RingStage(cluster, report, keys=course.keys, value_bytes=course.value_bytes, seed=seed)
                stage.verdict = verdict
                run(_play(stage, course, only))
        finally:
            keep_logs(folder, out.parent / "ring-logs")
            report.write(out, "ring", seed=seed, without_kills=verdict.rows())
    print(report.table())
    if verdict.moving:
        print(f"\nwithout kills:\n{verdict.text()}\n")
    print(report.verdict)
    return report.is_safe


async def _play(stage: RingStage, course: Course, only: str) -> None:
    await stage.fill()
    for name, scenario in SCENARIOS.items():
        if only in ("", name):
            print(f"\n{name}", file=sys.stderr, flush=True)
            await scenario(stage, course)
    stage.log(f"{stage.operations} operations in all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 to 3, 5 and 2 partitions, and 3 rounds")
    parser.add_argument("--rounds", type=int, help="changes with kills")
    parser.add_argument("--keys", type=int, help="that are there all the time")
    parser.add_argument("--rest-ms", type=float, help="of each caller between two operations, in the mean")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", choices=["", *SCENARIOS], help="one scenario: grow or kills")
    parser.add_argument("--out", type=path_word, default=Path("reports/results.json"))
    arguments = parser.parse_args()
    course = QUICK if arguments.quick else Course()
    pause_s = None if arguments.rest_ms is None else arguments.rest_ms / 1_000
    given = {"rounds": arguments.rounds, "keys": arguments.keys, "pause_s": pause_s}
    course = replace(course, **{name: value for name, value in given.items() if value is not None})
    sys.exit(0 if run_drill(course=course, only=arguments.only, out=arguments.out, seed=arguments.seed) else 1)


if __name__ == "__main__":
    main()
