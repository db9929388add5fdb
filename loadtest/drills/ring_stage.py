"""The cluster of a ring drill: changes by the operators' commands, kills, and the verdict."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from kvstore.cli.cluster import ClusterOptions, with_tools
from kvstore.cli.ring import read_ring
from kvstore.cli.ring_changes import change_ring, ring_status
from kvstore.client import AsyncClient
from kvstore.errors import StoreError
from kvstore.proto.admin_pb2 import ChangeRingRequest, ChangeRingResponse
from kvstore.ring import PartitionState, Ring
from loadtest.drills.ring_load import RingLoad, Span
from loadtest.drills.ring_spans import HandOver, hand_overs
from loadtest.drills.ring_verdict import Verdict
from loadtest.drills.spans import read_logs
from loadtest.drills.stage import Report
from tests.cluster.harness import Cluster

POLL_S = 0.25
MOVED_MAX_S = 300.0
RETIRED_MAX_S = 60.0
COMMAND_TRIES = 10
LEAVING = (PartitionState.LEAVING, PartitionState.RETIRED)
FSCK = "errors by fsck"
PROBLEMS = ("not found", "wrong value", "stale", "lost", "doubled", "resurrected", "not linearizable", FSCK)
"""Violations that a drill counts."""


class RingStage:
    """One cluster, its permanent keys, and the report."""

    def __init__(self, cluster: Cluster, report: Report, *, keys: int, value_bytes: int, seed: int) -> None:
        self.cluster, self.report, self.verdict = cluster, report, Verdict()
        self.statics = {b"static%d" % each: (b"%d " % each * value_bytes)[:value_bytes] for each in range(keys)}
        self.random = Random(seed)
        self.operations = 0
        self.kills: Counter[str] = Counter()
        """Number of kills, while a move was open, of the leaders of its source and target and of ZooKeeper's leader."""

    async def fill(self) -> None:
        """Write the permanent keys."""
        async with AsyncClient(self.cluster.url) as client:
            names = list(self.statics)
            for start in range(0, len(names), 1_000):
                some = {name: self.statics[name] for name in names[start : start + 1_000]}
                await client.put_many(some, timeout_s=60)

    def log(self, what: str) -> None:
        print(f"    {what}", file=sys.stderr, flush=True)

    # ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def command(self, *words: str) -> tuple[int, Any]:
        """Run a `kvstore` command. Return its exit code and JSON document."""
        place = ["--data-dir", str(self.cluster.local.data_dir), "--json"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvstore", *words, *place, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            out, errors = await process.communicate()
        except BaseException:
            process.kill()
            raise
        if process.returncode:
            self.log(f"{' '.join(words)}: {errors.decode()[-500:]}")
        return process.returncode or 0, json.loads(out or b"null")

    async def change(self, *words: str) -> ChangeRingResponse:
        """Change the ring. This and the following calls are sent directly, because starting a command takes a core for
        half a second, which users of a cluster do not have."""
        return await self._ask(_request(*words))

    async def plan(self, *words: str) -> list[Span]:
        """Return the ranges that such a change would move."""
        request = _request(*words)
        request.dry_run = True
        return [(each.first, each.last) for each in (await self._ask(request)).moves]

    async def throttle(self, bytes_per_s: float) -> None:
        """Set the copy rate of each target in bytes per second."""
        await self._ask(ChangeRingRequest(action=ChangeRingRequest.THROTTLE, bytes_per_s=round(bytes_per_s)))

    async def _ask(self, request: ChangeRingRequest) -> ChangeRingResponse:
        """Send the request, and retry while no server can serve it."""
        for _ in range(COMMAND_TRIES):
            try:
                return await asyncio.to_thread(change_ring, request, ClusterOptions(self.cluster.local.data_dir))
            except StoreError as error:
                self.log(f"asked in vain: {error!r}")
                await asyncio.sleep(1)
        raise AssertionError(f"nobody answers: {request}")

    async def _ring(self) -> Ring:
        return await asyncio.to_thread(with_tools, ClusterOptions(self.cluster.local.data_dir), read_ring)

    async def partitions(self) -> list[str]:
        """Return the partitions that own or will own keys, sorted by the number in their names."""
        members = (await self._ring()).partitions.values()
        return sorted((str(each.id) for each in members if each.state not in LEAVING), key=lambda name: int(name[1:]))

    async def open_moves(self) -> list[Any]:
        """Return the open moves that the servers know. Raises StoreError."""
        found = await asyncio.to_thread(ring_status, ClusterOptions(self.cluster.local.data_dir))
        return list(found.moves)

    async def moved(self, load: RingLoad, within_s: float = MOVED_MAX_S) -> None:
        """Wait until no move is open, and direct the load to the moving ranges meanwhile. Raises AssertionError."""
        deadline = time.monotonic() + within_s
        while True:
            assert time.monotonic() < deadline, f"moves are open after {within_s} s\n{self.cluster.last_words()}"
            try:
                moves = await self.open_moves()
            except StoreError as error:
                self.log(f"no status: {error!r}")
                await asyncio.sleep(POLL_S)
                continue
            if not moves:
                break
            load.focus((each.first, each.last) for each in moves if each.state == "copying")
            await asyncio.sleep(POLL_S)
        load.focus(())

    async def retired(self) -> None:
        """Wait until nothing is left of removed partitions. Raises AssertionError."""
        deadline = time.monotonic() + RETIRED_MAX_S
        while True:
            states = {each.id: each.state for each in (await self._ring()).partitions.values()}
            if all(state is PartitionState.SERVING for state in states.values()):
                return
            assert time.monotonic() < deadline, f"not all serve: {states}"
            await asyncio.sleep(0.5)

    # ── kills ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def kill_leader_of(self, role: str) -> bool:
        """Kill the node that leads the source or target (`role`) of an open move with SIGKILL; it restarts a moment
        later. Return False if no move was open."""
        try:
            moves = [each for each in await self.open_moves() if each.state in ("copying", "planned")]
        except StoreError:
            moves = []
        leaders = await asyncio.to_thread(self.cluster.leaders)
        nodes = [leaders[name] for each in moves if (name := getattr(each, role)) in leaders]
        node = self.random.choice(nodes or self.cluster.ids)
        self.log(f"kill -9 of {node}, {role} of a move: {bool(nodes)}")
        await asyncio.to_thread(self.cluster.kill, node)
        await asyncio.sleep(self.random.uniform(0.1, 2.0))
        await asyncio.to_thread(self.cluster.start_node, node)
        await asyncio.to_thread(self.cluster.wait_ready, node, timeout_s=60)
        return bool(nodes)

    async def kill_zookeeper(self) -> bool:
        """Kill the ensemble's leader with SIGKILL; it restarts a moment later. Return False if no move was open."""
        try:
            is_open = bool(await self.open_moves())
        except StoreError:
            is_open = False
        place = await asyncio.to_thread(self.cluster.kill_zookeeper_leader)
        self.log(f"kill -9 of member {place + 1} of ZooKeeper, which led it; moves open: {is_open}")
        await asyncio.sleep(self.random.uniform(0.1, 3.0))
        await asyncio.to_thread(self.cluster.restart_zookeeper, place)
        return is_open

    # ── judging ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def judge(self, load: RingLoad) -> Counter[str]:
        """Count each of PROBLEMS in the answers and on the disks."""
        await load.verify()
        count = operations_of(load)
        self.operations += count
        code, found = await self.command("fsck")
        problems = load.problems + Counter({FSCK: found["errors"] if found else 1 + code})
        for each in load.first_problems:
            self.log(f"PROBLEM {each}")
        said = f"{count} operations, {len(load.history)} of them for the checkers, {load.scans} scans"
        self.log(f"{said}; wrong: {dict(problems)}; errors told to callers: {dict(load.errors)}")
        return problems

    def hand_overs(self, spans: dict[int, Span]) -> dict[int, HandOver]:
        """Return the hand-overs of these moves, according to the nodes' logs."""
        found = hand_overs(read_logs(Path(self.cluster.local.data_dir) / "logs"))
        return {move: times for move, times in found.items() if move in spans}


def _request(*words: str) -> ChangeRingRequest:
    """Return the request for `add --count N` or `remove ID...`."""
    if words[0] == "add":
        return ChangeRingRequest(action=ChangeRingRequest.ADD, count=int(words[-1]))
    return ChangeRingRequest(action=ChangeRingRequest.REMOVE, partitions=words[1:])


def operations_of(load: RingLoad) -> int:
    """Return the number of operations of a load."""
    return len(load.waits) + len(load.steady)
