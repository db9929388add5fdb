"""The parts that repair drills share: nodes in zones, disks that are destroyed, counters across restarts of processes,
and a verdict on the placement of every ledger's copies."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvstore.client import AsyncClient
from kvstore.config import Setting
from kvstore.devcluster.settings import with_settings
from kvstore.errors import NoSuchLedger, StoreError
from kvstore.meta.connect import connect
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.registration import RegisteredBookies, RegistrationClient
from kvstore.meta.store import MetadataStore
from kvstore.meta.underreplication import Underreplication
from kvstore.types import BookieId, LedgerMetadata, LedgerState
from kvstore.wal.placement import machine_of_bookie
from loadtest.drills.stage import Stage
from tests.cluster.harness import Cluster

T = TypeVar("T")
COMPLETE_MAX_S = 240.0
POLL_S = 0.5
ANSWER_S = 3.0
"""Timeout of a request to a node that may be paused, because other nodes are checked too."""
FILL_AT_ONCE = 20
SUPERVISOR_S = 1.0
"""Delay until a supervisor restarts a process that has ended."""


class Made(NamedTuple):
    """Numbers of copies made."""

    copies: int
    bytes: int
    paced: int
    """Bytes including the leaders' copies and the reads that check copies."""

    def __sub__(self, other: tuple[int, ...]) -> Made:
        return Made(*(mine - its for mine, its in zip(self, other, strict=True)))


class Copied:
    """The nodes' counters of copies across restarts. A counter begins at 0 with each process."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._statistics: dict[int, dict[str, float]] = {}
        """The last counters, by process."""

    def look(self, *nodes: str) -> dict[str, dict[str, float]]:
        """Return the worker counters of the nodes that answer (default: all nodes)."""
        found = {}
        for node in nodes or self._cluster.ids:
            with suppress(OSError, KeyError):
                said = self._cluster.status(node, timeout_s=ANSWER_S)
                found[node] = self._statistics[self._cluster.pid(node)] = said["autorecovery"]
        return found

    def total(self) -> Made:
        self.look()
        said = self._statistics.values()
        return Made(*(int(sum(each[name] for each in said)) for name in ("copies_made", "copied_bytes", "paced_bytes")))


class RepairStage(Stage):
    """A repair scenario on its own cluster."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.copied = Copied(self.cluster)
        self.lost: list[BookieId] = []
        """Bookies whose disks were destroyed. Their registrations may last for a session timeout."""

    async def stand_in_zones(self, zones: Mapping[str, str]) -> None:
        """Set the zone of each node, and restart it."""
        for node, zone in zones.items():
            path = Path(self.cluster.file.node(node).config)
            path.write_text(with_settings(path.read_text(), [Setting("zone", zone)], what=str(path)))
            await asyncio.to_thread(self.cluster.terminate, node)
            await self.start_again(node)

    async def fill(self, total_bytes: int, *, value_bytes: int = 20_000) -> None:
        """Write values that are never read, so that there is something to copy."""
        mark = time.time_ns()
        async with AsyncClient(self.cluster.url) as client:
            keys = [b"fill-%d-%d" % (mark, number) for number in range(total_bytes // value_bytes)]
            for start in range(0, len(keys), FILL_AT_ONCE):
                await client.put_many(
                    {key: key * (value_bytes // len(key)) for key in keys[start : start + FILL_AT_ONCE]}, timeout_s=60
                )

    async def destroy(self, *nodes: str) -> None:
        """Kill the nodes with SIGKILL and delete everything that they have stored except their settings."""
        self.lost.extend([await self.bookie_of(node) for node in nodes])
        await asyncio.to_thread(self._destroy, nodes)

    def _destroy(self, chosen: Sequence[str]) -> None:
        for node in chosen:
            self.copied.look(node)
            self.cluster.kill(node)
        for node in chosen:
            place = self.cluster.file.node(node)
            for path in Path(place.data_dir).iterdir():
                if str(path) != place.config:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    async def with_store(self, work: Callable[[MetadataStore], Awaitable[T]]) -> T:
        """Return the result of `work` on its own metadata session."""
        store = await connect(self.cluster.file.zookeeper)
        try:
            return await work(store)
        finally:
            await store.close()

    async def bookies(self) -> RegisteredBookies:
        """Return the registered bookies."""
        return await self.with_store(lambda store: RegistrationClient(store).bookies())

    async def bookie_of(self, node: str) -> BookieId:
        """Return the id under which the node's bookie is registered."""
        found = (await self.bookies()).all
        return next(each for each in found if machine_of_bookie(each) == node and each not in self.lost)

    async def faults(self, *, write: int, zones: int) -> list[str]:
        """Return the faults: marked ledgers, and ledgers whose copies are not at `write` registered bookies in as many
        of `zones` as possible."""
        return await self.with_store(lambda store: _faults(store, write, zones, self.lost))

    async def wait_complete(self, *, write: int, zones: int = 1, most_s: float = COMPLETE_MAX_S) -> float:
        """Wait until nothing is under-replicated. Return the time in seconds, at most `most_s`."""
        since, found = time.perf_counter(), ["not looked at yet"]
        while found and time.perf_counter() - since < most_s:
            await asyncio.sleep(POLL_S)
            await asyncio.to_thread(self.copied.look)
            try:
                found = await self.faults(write=write, zones=zones)
            except StoreError as error:
                found = [repr(error)]
        for each in found[:10]:
            self.log(f"still: {each}")
        return time.perf_counter() - since

    async def check_files(self, name: str) -> None:
        """Check that fsck finds no error, and soon no warning."""
        deadline = time.perf_counter() + COMPLETE_MAX_S
        while True:
            found = await asyncio.to_thread(self.command, "fsck", "--strict")
            is_clean = not found.get("errors", 1) and not found.get("warnings", 1)
            if is_clean or time.perf_counter() > deadline:
                break
            await asyncio.sleep(2)
        self.report.add_safety(f"{name}: fsck: errors", found.get("errors", 1))
        self.report.add(f"{name}: fsck: warnings", found.get("warnings", 1), most=0)
        self.log(f"fsck: {found.get('ledgers')} ledgers, {found.get('entries')} entries, {found.get('copies')} copies")
        if not is_clean:
            self.log(json.dumps(found)[-2_000:])

    def command(self, *arguments: str) -> Any:
        """Run a `kvstore` command and return its JSON document."""
        place = ["--data-dir", str(self.cluster.local.data_dir), "--json"]
        command = [sys.executable, "-m", "kvstore", *arguments, *place]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        return json.loads(answer.stdout or "{}")


async def _faults(store: MetadataStore, write: int, zones: int, lost: Collection[BookieId]) -> list[str]:
    there = await RegistrationClient(store).bookies()
    registered = there._replace(
        writable={each: address for each, address in there.writable.items() if each not in lost},
        readonly={each: address for each, address in there.readonly.items() if each not in lost},
    )
    found = [f"ledger {ledger} is marked" async for ledger in Underreplication(store).marked_ledgers()]
    ledgers = LedgerStore(store)
    for ledger in await ledgers.list_ids():
        with suppress(NoSuchLedger):
            found += faults_of((await ledgers.read_latest(ledger))[0], registered, write=write, zones=zones)
    return found


def faults_of(metadata: LedgerMetadata, registered: RegisteredBookies, *, write: int, zones: int) -> list[str]:
    """Return the placement faults of one ledger. Decides only. The writer of an open ledger may change its last
    fragment, but the bookies of the fragment are up."""
    who = f"ledger {metadata.ledger} ({metadata.state.name})"
    found = []
    if metadata.quorum.write != write:
        found.append(f"{who} has a write quorum of {metadata.quorum.write}, expected {write}")
    for fragment in metadata.fragments:
        if absent := set(fragment.ensemble).difference(registered.all):
            found.append(f"{who} names {sorted(absent)}, which are not there")
        is_settled = metadata.state is LedgerState.CLOSED
        for place in range(metadata.quorum.ensemble if is_settled else 0):
            found += _clash(who, [*fragment.ensemble, *fragment.ensemble][place : place + write], registered, zones)
    return found


def _clash(who: str, copies: Sequence[BookieId], registered: RegisteredBookies, zones: int) -> list[str]:
    if len({machine_of_bookie(each) for each in copies}) < len(copies):
        return [f"{who} has two copies on one machine: {copies}"]
    stand = {registered.zones.get(each, "") for each in copies}
    return [f"{who} has copies in {sorted(stand)}"] if len(stand) < min(zones, len(copies)) else []
