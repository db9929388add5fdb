"""Measure how long a partition accepts no writes after its leader was killed, and which stage takes the time.

    python -m loadtest.failover [--kills 20] [--metadata zookeeper|etcd] [--out reports/failover.json]

A cluster of three nodes runs under load, in which every operation is recorded and judged. Leaders are killed with
SIGKILL in turn. Before every second kill, the node's death watch is killed too, so that the successor has no proof of
the death and waits for the lease (docs/protocol.md, G28). So the two kinds of kills alternate under the same load. The
exit code is 1 if an acknowledged write is lost or a read was stale.

The stages follow each other from the kill on. `detect` ends when a replica becomes a candidate, and `elect` when it has
claimed the leader's znode. `recover` ends when the last ledgers are fenced and recovered, `create` when a new ledger
exists, `wait` when no lease is left, and `list` when the new ledger is listed. `start` ends when the leader serves, and
`answer` when a client has its first acknowledgement. The gap begins with the last acknowledgement before the kill.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil

from kvstore.cli.output import as_table
from kvstore.loadtest.generator.options import path_word
from kvstore.meta.address import MetadataKind
from loadtest.bench import peers
from loadtest.drill import keep_logs
from loadtest.drills import spans
from loadtest.drills.load import Load
from loadtest.drills.stage import Counts, Report, Stage
from loadtest.figures import keep
from tests.cluster.harness import running_cluster

AFTER_KILL_S = 4.0
LEAD_BACK = "partition.lead_back_s=2"
STAGES = ("detect", "elect", "recover", "create", "wait", "list", "start", "answer")
_OPENED = re.compile(r"opened ledger=.* recover_ms=(\d+) create_ms=(\d+) wait_ms=(\d+) list_ms=(\d+)")


@dataclass(frozen=True)
class Failover:
    """One change of leader after a kill. All times are in milliseconds."""

    partition: str
    is_proven: bool
    """The death watch of the killed node was alive."""
    gap: int
    stages: dict[str, int]
    load: float
    """The machine's load average at the kill."""


def failover(
    events: list[spans.Event], partition: str, killed_at: float, answered_at: float, *, gap: float, is_proven: bool
) -> Failover | None:
    """Return the change of leader that the logs show after a kill, or None if they show none. Times are in seconds
    since 1970."""
    before = killed_at
    stages: dict[str, int] = {}
    wanted = iter(
        (("detect", "-> CANDIDATE"), ("elect", "CLAIMING -> OPENING"), ("", "opened ledger"), ("start", "-> SERVING"))
    )
    name, text = next(wanted)
    for event in events:
        if event.partition != partition or event.at < killed_at or text not in event.what:
            continue
        if name:
            stages[name] = round((event.at - before) * 1000)
        elif (found := _OPENED.search(event.what)) is not None:
            stages |= dict(zip(STAGES[2:6], map(int, found.groups()), strict=True))
        before = event.at
        name, text = next(wanted, ("", ""))
        if not text:
            stages["answer"] = max(0, round((answered_at - before) * 1000))
            return Failover(partition, is_proven, round(gap * 1000), stages, round(os.getloadavg()[0], 1))
    return None


async def kill_leaders(stage: Stage, load: Load, kills: int) -> list[Failover]:
    """Kill the leaders in turn, and return what each kill cost."""
    found, logs = [], stage.cluster.directory / "data" / "logs"
    for number in range(kills):
        await stage.wait_calm(load)
        node = stage.cluster.ids[number % len(stage.cluster.ids)]
        led = [each for each, leader in (await stage.led_by(load)).items() if leader == node]
        is_proven = number % 2 == 0
        if not is_proven:
            for watcher in psutil.Process(stage.cluster.pid(node)).children():
                watcher.kill()
        killed_at, dated_at = time.perf_counter(), time.time()
        os.kill(stage.cluster.pid(node), signal.SIGKILL)
        await asyncio.sleep(AFTER_KILL_S)
        events = spans.read_logs(logs)
        for partition in led:
            gap, began = load.longest_gap(partition, killed_at - 0.2, time.perf_counter())
            answered_at = dated_at + began + gap - killed_at
            one = failover(events, partition, dated_at, answered_at, gap=gap, is_proven=is_proven)
            stage.log(f"kill {number + 1} of {node}: {one}")
            if one is not None:
                found.append(one)
        await stage.start_again(node)
    return found


def rows(found: list[Failover]) -> Iterator[dict[str, object]]:
    """Return for each kind of kill the median and the range of the gap and of each stage, and the share of each stage
    in the sum of all stages."""
    for is_proven in (True, False):
        those = [each for each in found if each.is_proven is is_proven]
        total = sum(sum(each.stages.values()) for each in those)
        for name in ("gap", *STAGES):
            times = sorted(each.gap if name == "gap" else each.stages.get(name, 0) for each in those)
            if times:
                share = "" if name == "gap" else f"{sum(times) / total:.0%}"
                row = {"death": "proven" if is_proven else "not proven", "stage": name, "count": len(times)}
                yield row | {
                    "median_ms": round(median(times)),
                    "least_ms": times[0],
                    "most_ms": times[-1],
                    "share": share,
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="half of them with the death watch alive")
    parser.add_argument("--metadata", type=MetadataKind, default=MetadataKind.ZOOKEEPER, help="zookeeper or etcd")
    parser.add_argument("--out", type=path_word, default=Path("reports/failover.json"))
    arguments = parser.parse_args()
    if arguments.kills < 1:
        parser.error(f"--kills: expected 1 or more, got {arguments.kills}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # processes would stay
    report, found = Report(), list[Failover]()
    with peers.scratch() as folder:
        try:
            with running_cluster(folder, metadata=arguments.metadata, settings=(LEAD_BACK,)) as cluster:
                stage = Stage(cluster, Counts(), report)

                async def work(load: Load) -> None:
                    found.extend(await kill_leaders(stage, load, arguments.kills))

                asyncio.run(stage.under_load("kill -9", work))
        finally:
            keep_logs(folder, arguments.out.parent / "failover-logs")
    table = list(rows(found))
    keep(arguments.out, {"failovers": [asdict(each) for each in found], "summary": table})
    print(as_table(table))
    print(f"safety: {'kept' if report.is_safe else 'BROKEN'}")
    sys.exit(0 if report.is_safe else 1)


if __name__ == "__main__":
    main()
