"""Counted runs with faults against a real cluster, each checked: nothing acknowledged lost, no stale read, short gaps.

    python -m loadtest.drill [--quick] [--only TEXT] [--out reports/results.json]

It starts a three-node cluster of its own in a scratch folder. Exit code 1 if anything is not as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from kvstore.cli.output import as_table
from kvstore.client import AsyncClient
from loadtest import peers
from loadtest.drill_load import Load
from loadtest.stale import StaleReaders
from tests.cluster.harness import Cluster, running_cluster
from tests.sim.linearizable import check_search
from tests.sim.versions import Violation, check_versions

WARM_S = 3.0
AFTER_KILL_S = 5.0
CALM_S, CALM_MAX_S = 12.0, 60.0
GAP_LED_MAX_S = 1.5
GAP_OTHERS_MAX_S = 0.3
SERVING_MAX_S = 20.0
SESSION_S = 6.0
ZOOKEEPER_AWAY_S = 30.0


@dataclass(frozen=True)
class Counts:
    """How often each fault happens."""

    kills: int = 10
    stops: int = 3
    outages: int = 1
    """Of ZooKeeper, by kill and by stop each."""
    crashes: int = 5


QUICK = Counts(kills=2, stops=1, outages=1, crashes=1)


@dataclass
class Report:
    """Figures with what they must be."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self, what: str, value: float, *, most: float | None = None, least: float | None = None, unit: str = ""
    ) -> None:
        is_met = (most is None or value <= most) and (least is None or value >= least)
        wanted = f"<= {most:g}" if most is not None else f">= {least:g}" if least is not None else "-"
        self.rows.append({"what": what, "value": round(value, 3), "unit": unit, "wanted": wanted, "met": is_met})
        print(f"{'ok ' if is_met else 'NOT'} {what}: {value:.3f} {unit} (wanted {wanted})", file=sys.stderr, flush=True)

    @property
    def is_met(self) -> bool:
        return all(row["met"] for row in self.rows)


class Drill:
    """One scenario's surroundings: the cluster, load on it, and the report."""

    def __init__(self, cluster: Cluster, counts: Counts, report: Report) -> None:
        self.cluster, self.counts, self.report = cluster, counts, report

    async def under_load(self, name: str, work: Callable[[Load], Awaitable[None]]) -> None:
        """Run `work` under load; then check what was recorded."""
        async with AsyncClient(self.cluster.url) as client:
            load = Load(client)
            load.start()
            await asyncio.sleep(WARM_S)
            try:
                await work(load)
                await asyncio.sleep(1)
            finally:
                await load.stop()
            missing = await load.verify()
        self.report.add(f"{name}: acknowledged writes lost, of {load.unique}", len(missing), most=0)
        violations = await asyncio.to_thread(_violations, load)
        self.report.add(f"{name}: violations in {len(load.history)} recorded operations", violations, most=0)
        print(f"    errors told to callers: {dict(load.errors)}", file=sys.stderr)

    async def led_by(self, load: Load) -> dict[str, str]:
        """Partition → the node that leads it, as the client knows."""
        nodes = {node.grpc: node.id for node in self.cluster.file.nodes}
        return {each: nodes.get(load.client.leader_of(each), "") for each in load.partitions}

    async def wait_calm(self, load: Load) -> None:
        """Return when no leader has changed for a while: leads go back to preferred nodes some time after a restart."""
        deadline = time.perf_counter() + CALM_MAX_S
        leaders, since = await self.led_by(load), time.perf_counter()
        while time.perf_counter() < min(since + CALM_S, deadline):
            await asyncio.sleep(0.5)
            now = await self.led_by(load)
            if now != leaders:
                leaders, since = now, time.perf_counter()

    async def start_again(self, node: str) -> None:
        await asyncio.to_thread(self.cluster.start_node, node)
        await asyncio.to_thread(self.cluster.wait_ready, node)


def _violations(load: Load) -> int:
    found = 0
    for check in (check_versions, check_search):
        try:
            check(load.history)
        except (Violation, AssertionError) as error:
            print(f"VIOLATION by {check.__name__}: {error}", file=sys.stderr)
            found += 1
    return found


async def kills(drill: Drill) -> None:
    """kill -9 of a node that leads something, again and again."""
    led: list[float] = []
    others: list[float] = []

    async def work(load: Load) -> None:
        for number in range(drill.counts.kills):
            await drill.wait_calm(load)
            leaders = await drill.led_by(load)
            node = sorted({each for each in leaders.values() if each})[number % len(set(leaders.values()) - {""})]
            clock, killed_at = time.strftime("%H:%M:%S"), time.perf_counter()
            await asyncio.to_thread(drill.cluster.kill, node)
            await asyncio.sleep(AFTER_KILL_S)
            until = time.perf_counter()
            for partition, leader in leaders.items():
                gap, began = load.longest_gap(partition, killed_at - 0.1, until)
                (led if leader == node else others).append(gap)
                what = f"{partition} led by {leader or 'nobody known'}: gap {gap:.3f} s from {began - killed_at:+.3f} s"
                print(f"    kill {number + 1} of {node} at {clock}: {what}", file=sys.stderr)
            await drill.start_again(node)

    await drill.under_load("kill -9", work)
    if led:
        drill.report.add("kill -9: gap on partitions it led, median", median(led), most=GAP_LED_MAX_S, unit="s")
        drill.report.add("kill -9: gap on partitions it led, longest", max(led), unit="s")
    if others:
        drill.report.add("kill -9: gap on the others, median", median(others), most=GAP_OTHERS_MAX_S, unit="s")
        drill.report.add("kill -9: gap on the others, longest", max(others), unit="s")


async def stops(drill: Drill) -> None:
    """SIGSTOP of a leader for longer than its session, then SIGCONT, with readers that ask it directly."""

    async def work(load: Load) -> None:
        for _ in range(drill.counts.stops):
            leaders = await drill.led_by(load)
            node = next(each for each in sorted(leaders.values()) if each)
            readers = StaleReaders(load.history, drill.cluster.file.node(node).grpc, load.register_keys())
            await readers.start()
            began = time.perf_counter()
            drill.cluster.pause(node)
            await asyncio.sleep(SESSION_S + 3)
            drill.cluster.resume(node)
            await asyncio.sleep(4)
            await readers.stop()
            until = time.perf_counter()
            for partition, leader in leaders.items():
                if leader == node:
                    gap, _ = load.longest_gap(partition, began, until)
                    drill.report.add(f"SIGSTOP of {node}: gap on {partition}", gap, unit="s")
            drill.report.add(f"SIGSTOP of {node}: answers that it gave to direct reads", readers.answers, least=1)
            await asyncio.to_thread(drill.cluster.wait_ready, node)

    await drill.under_load("SIGSTOP", work)


async def zookeeper(drill: Drill) -> None:
    """ZooKeeper gone for 30 s, by kill -9 and by SIGSTOP: reads and writes go on, no leader changes without need."""
    ways = (
        ("kill -9", drill.cluster.kill_zookeeper, drill.cluster.start_zookeeper),
        ("SIGSTOP", drill.cluster.pause_zookeeper, drill.cluster.resume_zookeeper),
    )

    for way, leave, come_back in ways:

        async def work(load: Load, way: str = way, leave: Any = leave, come_back: Any = come_back) -> None:
            for _ in range(drill.counts.outages):
                before = await asyncio.to_thread(drill.cluster.wait_led)
                began = time.perf_counter()
                await asyncio.to_thread(leave)
                await asyncio.sleep(ZOOKEEPER_AWAY_S)
                until = time.perf_counter()
                for partition in load.partitions:
                    gap, _ = load.longest_gap(partition, began, until)
                    drill.report.add(f"ZooKeeper away by {way}: gap on {partition}", gap, most=2.0, unit="s")
                await asyncio.to_thread(come_back)
                await asyncio.sleep(12)
                after = await asyncio.to_thread(drill.cluster.wait_led)
                changed = sum(before[each] != after[each] for each in before)
                drill.report.add(f"ZooKeeper away by {way}: leaders that changed", changed, most=0)

        await drill.under_load(f"ZooKeeper away by {way}", work)


async def crashes(drill: Drill) -> None:
    """Every process killed at once, and started again."""
    times: list[float] = []

    async def work(load: Load) -> None:
        for _ in range(drill.counts.crashes):
            await asyncio.to_thread(drill.cluster.kill_everything)
            began = time.perf_counter()
            await asyncio.to_thread(drill.cluster.start)
            while not all(load.count(each, began, time.perf_counter()) for each in load.partitions):
                if time.perf_counter() - began > 3 * SERVING_MAX_S:
                    break
                await asyncio.sleep(0.05)
            times.append(time.perf_counter() - began)
            print(f"    everything killed: serving after {times[-1]:.2f} s", file=sys.stderr)
            await asyncio.sleep(3)

    await drill.under_load("everything killed", work)
    drill.report.add("everything killed: serving again after, longest", max(times), most=SERVING_MAX_S, unit="s")


async def real_input(drill: Drill) -> None:
    """Python's own standard library loaded and verified while each node in turn is killed and started again."""
    folder = sysconfig.get_path("stdlib")

    async def command(verb: str) -> dict[str, Any]:
        arguments = ["--data-dir", str(drill.cluster.local.data_dir), "--json", "--timeout", "120"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvstore", verb, folder, *arguments, stdout=subprocess.PIPE
        )
        out, _ = await process.communicate()
        found: dict[str, Any] = json.loads(out)
        return found | {"exit": process.returncode}

    for verb in ("load-tree", "verify-tree"):
        running = asyncio.create_task(command(verb))
        killed = 0
        while not running.done():
            node = drill.cluster.ids[killed % len(drill.cluster.ids)]
            await asyncio.wait({running}, timeout=2)
            if running.done():
                break
            await asyncio.to_thread(drill.cluster.kill, node)
            killed += 1
            await asyncio.wait({running}, timeout=3)
            await drill.start_again(node)
        found = await running
        drill.report.add(f"{verb}: nodes killed meanwhile", killed)
        drill.report.add(f"{verb}: files", found["files"], least=1)
        drill.report.add(f"{verb}: problems", len(found["problems"]), most=0)
        for problem in found["problems"][:10]:
            print(f"    {problem}", file=sys.stderr)


async def check_files(drill: Drill) -> None:
    """fsck after all of it."""
    arguments = ["fsck", "--data-dir", str(drill.cluster.local.data_dir), "--json"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "kvstore", *arguments, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    drill.report.add("fsck: exit code", process.returncode or 0, most=0)
    if process.returncode:
        print(out.decode()[-3_000:], file=sys.stderr)


SCENARIOS: dict[str, Callable[[Drill], Awaitable[None]]] = {
    "kill -9 of nodes": kills,
    "SIGSTOP of leaders": stops,
    "ZooKeeper away": zookeeper,
    "everything killed": crashes,
    "real input": real_input,
    "fsck": check_files,
}


def run_drill(*, counts: Counts, only: str, out: Path) -> bool:
    """Run it, print it, write it. False if anything is not as it must be."""
    report = Report()
    began = time.time()
    with peers.scratch() as folder:
        try:
            with running_cluster(folder) as cluster:
                for name, scenario in SCENARIOS.items():
                    if only in name:
                        print(f"\n{name}", file=sys.stderr, flush=True)
                        asyncio.run(_one(scenario, Drill(cluster, counts, report)))
        finally:
            _keep_logs(folder, out.parent / "logs")
    print(as_table(report.rows))
    document = {"met": report.is_met, "took_s": round(time.time() - began), "figures": report.rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=2))
    return report.is_met


def _keep_logs(folder: Path, kept: Path) -> None:
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(folder / "data" / "logs", kept)
    print(f"the nodes' logs are in {kept}", file=sys.stderr)


async def _one(scenario: Callable[[Drill], Awaitable[None]], drill: Drill) -> None:
    await scenario(drill)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each fault once or twice")
    parser.add_argument("--only", default="", help="only scenarios whose name holds this")
    parser.add_argument("--out", type=Path, default=Path("reports/results.json"))
    arguments = parser.parse_args()
    counts = QUICK if arguments.quick else Counts()
    sys.exit(0 if run_drill(counts=counts, only=arguments.only, out=arguments.out) else 1)


if __name__ == "__main__":
    main()
