"""The parts that every drill scenario needs: the cluster, load that is judged at the end, and the report."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.cli.output import as_table
from kvstore.client import AsyncClient
from kvstore.ring.builder import new_ring
from kvstore.ring.hashing import hash_named
from kvstore.types import PartitionId, ServerId
from loadtest.drills.load import Load
from loadtest.figures import keep
from tests.cluster.harness import Cluster
from tests.sim.judges.linearizable import check_search
from tests.sim.versions import Violation, check_versions

WARM_S = 3.0
CALM_S, CALM_MAX_S = 3.0, 60.0


@dataclass(frozen=True)
class Counts:
    """Number of times that each fault happens."""

    kills: int = 10
    stops: int = 3
    outages: int = 1
    """Number of ZooKeeper outages, each by SIGKILL and by SIGSTOP."""
    crashes: int = 5
    disks: int = 3
    """Number of times that bookies are destroyed."""
    filled_mib: int = 20
    """MiB written before bookies are destroyed."""
    ledgers: int = 100_000
    """Number of ledgers in the metadata store in the drill with many ledgers."""
    rests: float = 1.0
    """Factor for the callers' pauses: if no gaps are measured, the load need not fill a machine."""


QUICK = Counts(kills=2, stops=1, outages=1, crashes=1, disks=1, filled_mib=4, ledgers=5_000)


@dataclass
class Report:
    """Figures and their required values. The safety figures hold on any machine."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.time)

    def add(
        self, what: str, value: float, *, most: float | None = None, least: float | None = None, unit: str = ""
    ) -> None:
        """Add a figure and its required value."""
        self._add(what, value, most, least, unit, is_safety=False)

    def add_safety(self, what: str, count: int) -> None:
        """Add the count of an event that must never happen."""
        self._add(what, count, 0, None, "", is_safety=True)

    def _add(
        self, what: str, value: float, most: float | None, least: float | None, unit: str, *, is_safety: bool
    ) -> None:
        is_met = (most is None or value <= most) and (least is None or value >= least)
        wanted = f"<= {most:g}" if most is not None else f">= {least:g}" if least is not None else "-"
        row = {"what": what, "value": round(value, 3), "unit": unit, "wanted": wanted, "met": is_met}
        self.rows.append(row | {"safety": is_safety})
        print(f"{'ok ' if is_met else 'NOT'} {what}: {value:.3f} {unit} (wanted {wanted})", file=sys.stderr, flush=True)

    def table(self) -> str:
        return as_table([{**row, "met": "yes" if row["met"] else "NO"} for row in self.rows])

    def write(self, out: Path, section: str = "", **more: Any) -> None:
        """Write the figures, also those of an aborted run. With a section, the other sections of the file stay."""
        document: dict[str, Any] = {
            "safe": self.is_safe,
            "met": self.is_met,
            "took_s": round(time.time() - self.began),
            "machine": {"cores": os.cpu_count(), "load": [round(each, 1) for each in os.getloadavg()]},
            "figures": self.rows,
            **more,
        }
        if section:
            document = (json.loads(out.read_text()) if out.exists() else {}) | {section: document}
        keep(out, document)

    @property
    def verdict(self) -> str:
        return f"safety: {'kept' if self.is_safe else 'BROKEN'}; figures: {'all met' if self.is_met else 'NOT all met'}"

    @property
    def is_met(self) -> bool:
        return all(row["met"] for row in self.rows)

    @property
    def is_safe(self) -> bool:
        return all(row["met"] for row in self.rows if row["safety"])


class Stage:
    """The cluster, load and report of one scenario."""

    def __init__(self, cluster: Cluster, counts: Counts, report: Report) -> None:
        self.cluster, self.counts, self.report = cluster, counts, report

    async def under_load(self, name: str, work: Callable[[Load], Awaitable[None]]) -> None:
        """Run `work` under load, then check the recorded history."""
        async with AsyncClient(self.cluster.url) as client:
            load = Load(client, rests=self.counts.rests)
            load.start()
            await asyncio.sleep(WARM_S)
            try:
                await work(load)
                await asyncio.sleep(1)
            finally:
                await load.stop()
            missing = await load.verify()
        self.report.add_safety(f"{name}: acknowledged writes lost, of {load.unique}", len(missing))
        violations = await asyncio.to_thread(_violations, load)
        self.report.add_safety(f"{name}: violations in {len(load.history)} recorded operations", violations)
        self.log(f"errors told to callers: {dict(load.errors)}")

    def log(self, what: str) -> None:
        print(f"    {what}", file=sys.stderr, flush=True)

    async def led_by(self, load: Load) -> dict[str, str]:
        """Return the leader of each partition, as the client knows it."""
        nodes = {node.grpc: node.id for node in self.cluster.file.nodes}
        return {each: nodes.get(load.client.cluster.leader_of(each), "") for each in load.partitions}

    def preferred(self) -> dict[str, str]:
        """Return the preferred leader of each partition."""
        file = self.cluster.file
        names = [PartitionId(f"p{number + 1}") for number in range(file.partitions)]
        servers = {ServerId(node): "" for node in self.cluster.ids}
        ring = new_ring(names, servers, file.replicas, hash_named(file.key_hash))
        return {str(each): str(ring.partitions[each].replicas[0]) for each in names}

    async def wait_calm(self, load: Load) -> dict[str, float]:
        """Wait until each partition has been led for a while by its preferred leader, because leads return some time
        after a restart. Return, for each partition, when that was first seen."""
        wanted, deadline = self.preferred(), time.perf_counter() + CALM_MAX_S
        since: dict[str, float] = {}
        while (now := time.perf_counter()) < deadline:
            leaders = await self.led_by(load)
            since = {each: since.get(each, now) for each in wanted if leaders.get(each) == wanted[each]}
            if len(since) == len(wanted) and now - max(since.values()) >= CALM_S:
                return since
            await asyncio.sleep(0.1)
        self.log(f"not calm after {CALM_MAX_S:.0f} s: {await self.led_by(load)}, wanted {wanted}")
        return since

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
