"""The scenarios of a drill, in their order."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

from loadtest.drills.load import Load, longest_gap
from loadtest.drills.stage import Stage
from loadtest.drills.stale import StaleReaders
from tests.cluster.harness import Cluster

AFTER_KILL_S = 5.0
GAP_LED_MAX_S = 1.5
GAP_OTHERS_MAX_S = 0.3
GAP_HANDED_BACK_MAX_S = 0.2
GAP_OUTAGE_MAX_S = 2.0
SERVING_MAX_S = 20.0
SESSION_S = 6.0
METADATA_AWAY_S = 30.0
REPAIRED_MAX_S = 120.0


async def kills(stage: Stage) -> None:
    """Kill each node in turn with SIGKILL while it leads something, and restart it. Afterwards it must lead again."""
    gaps: dict[str, list[float]] = {"partitions it led": [], "the others": [], "partitions handed back": []}

    async def work(load: Load) -> None:
        for number in range(stage.counts.kills):
            await stage.wait_calm(load)
            node = stage.cluster.ids[number % len(stage.cluster.ids)]
            led = [each for each, leader in (await stage.led_by(load)).items() if leader == node]
            clock, killed_at = time.strftime("%H:%M:%S"), time.perf_counter()
            await asyncio.to_thread(stage.cluster.kill, node)
            await asyncio.sleep(AFTER_KILL_S)
            until = time.perf_counter()
            for partition in load.partitions:
                gap, began = load.longest_gap(partition, killed_at - 0.1, until)
                gaps["partitions it led" if partition in led else "the others"].append(gap)
                what = f"{partition}{' (led by it)' if partition in led else ''}: gap {gap:.3f} s"
                stage.log(f"kill {number + 1} of {node} at {clock}: {what} from {began - killed_at:+.3f} s")
            await stage.start_again(node)
            since = time.perf_counter()
            for partition, at in (await stage.wait_calm(load)).items():
                if partition in led:
                    gap, _ = load.longest_gap(partition, at - 1.0, at + 1.0)
                    gaps["partitions handed back"].append(gap)
                    stage.log(f"handed back: {partition}: gap {gap:.3f} s, {at - since:.1f} s after the restart")

    await stage.under_load("kill -9", work)
    for which, most in (
        ("partitions it led", GAP_LED_MAX_S),
        ("the others", GAP_OTHERS_MAX_S),
        ("partitions handed back", GAP_HANDED_BACK_MAX_S),
    ):
        if gaps[which]:
            stage.report.add(f"kill -9: gap on {which}, median", median(gaps[which]), most=most, unit="s")
            stage.report.add(f"kill -9: gap on {which}, longest", max(gaps[which]), unit="s")


async def stops(stage: Stage) -> None:
    """Stop a leader with SIGSTOP for longer than its session, then continue it, while readers ask it directly."""

    async def work(load: Load) -> None:
        for number in range(stage.counts.stops):
            await stage.wait_calm(load)
            leaders = await stage.led_by(load)
            node = stage.cluster.ids[number % len(stage.cluster.ids)]
            readers = StaleReaders(load.history, stage.cluster.file.node(node).grpc, load.register_keys())
            await readers.start()
            began = time.perf_counter()
            stage.cluster.pause(node)
            await asyncio.sleep(SESSION_S + 3)
            stage.cluster.resume(node)
            await asyncio.sleep(4)
            await readers.stop()
            until = time.perf_counter()
            for partition, leader in leaders.items():
                if leader == node:
                    gap, _ = load.longest_gap(partition, began, until)
                    stage.report.add(f"SIGSTOP of {node}: gap on {partition}", gap, unit="s")
            stage.report.add(f"SIGSTOP of {node}: answers that it gave to direct reads", readers.answers, least=1)
            await asyncio.to_thread(stage.cluster.wait_ready, node)

    await stage.under_load("SIGSTOP", work)


async def metadata_killed(stage: Stage) -> None:
    """Kill the metadata store with SIGKILL for 30 s."""
    await _metadata_away(stage, "kill -9", stage.cluster.kill_zookeeper, stage.cluster.start_zookeeper)


async def metadata_stopped(stage: Stage) -> None:
    """Stop the metadata store with SIGSTOP for 30 s."""
    await _metadata_away(stage, "SIGSTOP", stage.cluster.pause_zookeeper, stage.cluster.resume_zookeeper)


async def _metadata_away(stage: Stage, way: str, leave: Callable[[], None], come_back: Callable[[], None]) -> None:
    """Check that linearizable reads and writes continue and no leader changes without need, also after the store is
    back."""
    name = stage.cluster.file.store.kind.shown

    async def work(load: Load) -> None:
        for _ in range(stage.counts.outages):
            await stage.wait_calm(load)
            before = await asyncio.to_thread(_epochs, stage.cluster)
            began = time.perf_counter()
            await asyncio.to_thread(leave)
            await asyncio.sleep(METADATA_AWAY_S)
            until = time.perf_counter()
            for partition in load.partitions:
                gap, _ = load.longest_gap(partition, began, until)
                stage.report.add(f"{name} away by {way}: gap on {partition}", gap, most=GAP_OUTAGE_MAX_S, unit="s")
                gap, _ = longest_gap(load.read[partition], began, until)
                what = f"{name} away by {way}: gap of linearizable reads on {partition}"
                stage.report.add(what, gap, most=GAP_OUTAGE_MAX_S, unit="s")
            await asyncio.to_thread(come_back)
            await asyncio.sleep(2 * SESSION_S + 3)
            after = await asyncio.to_thread(_epochs, stage.cluster)
            changed = [
                f"{each}: {before[each]} to {after.get(each)}" for each in before if before[each] != after.get(each)
            ]
            stage.report.add(f"{name} away by {way}: leaders that changed", len(changed), most=0)
            for each in changed:
                stage.log(each)

    await stage.under_load(f"{name} away by {way}", work)


def _epochs(cluster: Cluster) -> dict[str, tuple[str, int | None]]:
    """Return the leader and the epoch of each partition. A leader that left and came back has another epoch, and one
    that has just left has none."""
    return {
        partition: (node, (cluster.status(node)["partitions"][partition].get("leading") or {}).get("epoch"))
        for partition, node in cluster.wait_led().items()
    }


async def crashes(stage: Stage) -> None:
    """Kill all processes at once, and restart all at once, as supervisors do."""
    times: list[float] = []

    async def work(load: Load) -> None:
        for _ in range(stage.counts.crashes):
            await asyncio.to_thread(stage.cluster.kill_everything)
            began = time.perf_counter()
            starting = asyncio.create_task(asyncio.to_thread(stage.cluster.start))
            while not all(load.count(each, began, time.perf_counter()) for each in load.partitions):
                if time.perf_counter() - began > 3 * SERVING_MAX_S:
                    break
                await asyncio.sleep(0.05)
            times.append(time.perf_counter() - began)
            stage.log(f"everything killed: serving after {times[-1]:.2f} s")
            await starting
            await asyncio.to_thread(stage.cluster.wait_ready)
            await asyncio.sleep(3)

    await stage.under_load("everything killed", work)
    if times:
        stage.report.add("everything killed: serving again after, median", median(times), unit="s")
        stage.report.add("everything killed: serving again after, longest", max(times), most=SERVING_MAX_S, unit="s")


async def real_input(stage: Stage) -> None:
    """Load and verify Python's standard library while each node in turn is killed and restarted."""
    folder = sysconfig.get_path("stdlib")
    for verb in ("load-tree", "verify-tree"):
        running = asyncio.create_task(_command(stage, verb, folder, "--timeout", "120"))
        killed = 0
        while not running.done():
            node = stage.cluster.ids[killed % len(stage.cluster.ids)]
            await asyncio.wait({running}, timeout=2)
            if running.done():
                break
            await asyncio.to_thread(stage.cluster.kill, node)
            killed += 1
            await asyncio.wait({running}, timeout=3)
            await stage.start_again(node)
        code, found = await running
        stage.report.add(f"{verb}: nodes killed meanwhile", killed)
        stage.report.add(f"{verb}: files", found.get("files", 0), least=1)
        problems = found.get("problems") or ([f"exit code {code}"] if code else [])
        stage.report.add_safety(f"{verb}: problems", len(problems))
        for problem in problems[:10]:
            stage.log(str(problem))


async def check_files(stage: Stage) -> None:
    """Run fsck after all faults. It must find no error, and no warning once lost copies are recreated."""
    deadline = time.perf_counter() + REPAIRED_MAX_S
    while True:
        code, found = await _command(stage, "fsck", "--strict")
        if code == 0 or time.perf_counter() > deadline:
            break
        await asyncio.sleep(5)
    stage.report.add_safety("fsck: errors", found.get("errors", 1))
    stage.report.add("fsck: warnings once repair is done", found.get("warnings", 0), most=0)
    if code:
        stage.log(json.dumps(found)[-3_000:])


async def _command(stage: Stage, verb: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run a `kvstore` command. Return its exit code and JSON document."""
    place = ["--data-dir", str(stage.cluster.local.data_dir), "--json"]
    command = [sys.executable, "-m", "kvstore", verb, *arguments, *place]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    found: dict[str, Any] = json.loads(out or b"{}")
    return process.returncode or 0, found


SCENARIOS: dict[str, Callable[[Stage], Awaitable[None]]] = {
    "kill -9 of nodes": kills,
    "SIGSTOP of leaders": stops,
    "metadata store away by kill -9": metadata_killed,
    "metadata store away by SIGSTOP": metadata_stopped,
    "everything killed": crashes,
    "real input": real_input,
    "fsck": check_files,
}
