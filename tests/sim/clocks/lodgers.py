"""Users with keys that have a time to live, who pin logs for a while and rely on retention. They are judged by the
true time, which no machine of the cluster knows (docs/protocol.md, P28 to P31)."""

from __future__ import annotations

import asyncio

from kvstore.errors import LedgerError, MetadataError, RequestExpired
from kvstore.meta.store import MetadataStore
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Flag, Level
from kvstore.types import EntryId, LedgerId, PartitionId
from kvstore.wal.ledger_list import Listed
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pins
from tests.sim.clients import Worker
from tests.sim.cluster import Cluster
from tests.sim.judges.operations import Operation, Status
from tests.sim.judges.probes import declare, probe
from tests.sim.world.env import EPOCH_MS

declare("lodger.there", "lodger.gone", "lodger.pinned")

BOUND_S = 3.0
"""Seconds: the maximum difference between the dates of servers that lead
(kvstore.server.clock.clock_judge.APART_MS), with a margin."""
PIN_S = 8.0


class Lodgers:
    """Each user has one key after the other. `ttl_s`: the minimum and maximum TTL."""

    def __init__(self, cluster: Cluster, ttl_s: tuple[float, float]) -> None:
        self._cluster, self._ttl_s = cluster, ttl_s
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self._stopping.set()

    async def live(self, worker: Worker) -> None:
        while not worker.identity.seen_ms and not self._stopping.is_set():
            self._expect_current(await worker.do(commands.Get(worker.random.randbytes(4))))
        number = 0
        while not self._stopping.is_set():
            number += 1
            await self._one_key(worker, b"ttl-%s-%d" % (worker.name.encode(), number))

    async def _one_key(self, worker: Worker, key: bytes) -> None:
        ttl_s = worker.random.uniform(*self._ttl_s)
        value = b"%s@%f" % (key, worker.random.random())
        put = commands.Put(key, value, round(ttl_s * 1000), Flag.RELATIVE_TTL)
        written = self._expect_current(await worker.do(put, with_id=worker.random.random() < 0.7))
        if written.status is not Status.OK:
            await self._pause(0.2)
            return
        last_s = written.ended + ttl_s + BOUND_S
        is_over = False
        while not is_over and not self._stopping.is_set():
            is_over = asyncio.get_running_loop().time() > last_s
            level = worker.random.choice((Level.LINEARIZABLE, Level.STRICT))
            read = self._expect_current(await worker.do(commands.Get(key, level)))
            if read.status is Status.OK:
                self._judge(written, read, ttl_s)
            await self._pause(worker.random.uniform(0.1, ttl_s / 4))

    def _judge(self, written: Operation, read: Operation, ttl_s: float) -> None:
        probe("lodger.gone" if read.result is None else "lodger.there")
        if self._cluster.knobs.may_lose_dates:
            return
        if read.result is None and read.ended < written.began + ttl_s - BOUND_S:
            self._cluster.broken(f"P28 a key of {ttl_s:.3f} s expired too early: {written} {read}")
        if read.result is not None and read.began > written.ended + ttl_s + BOUND_S:
            self._cluster.broken(f"P30 a key of {ttl_s:.3f} s outlives its TTL: {written} {read}")

    def _expect_current(self, operation: Operation) -> Operation:
        """Check that no request is refused as too old before the retry window has ended by the true time."""
        if isinstance(operation.result, RequestExpired) and operation.request and operation.request.seen_ms:
            age_s = operation.ended - (operation.request.seen_ms - EPOCH_MS) / 1000
            if age_s < self._cluster.knobs.partition.retry_window_ms / 1000 - BOUND_S:
                self._cluster.broken(f"P28 a request is refused as too old: {operation}")
        return operation

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    async def pin(self, store: MetadataStore, partition: PartitionId) -> None:
        """Hold the log for a while, repeatedly, and check that the pin exists until its deadline."""
        lists = LedgerLists(store)
        pins, number = Pins(store, lists), 0
        while not self._stopping.is_set():
            number += 1
            began = asyncio.get_running_loop().time()
            try:
                listed, _ = await lists.read(partition, latest=True)
                until_ms = EPOCH_MS + round((began + PIN_S) * 1000)
                await pins.hold(partition, f"lodger{number}", listed.ledgers[-1].id, deadline_ms=until_ms)
                await self._pause(PIN_S - BOUND_S - 1)
                is_there = f"lodger{number}" in await pins.names(partition)
                if not is_there and asyncio.get_running_loop().time() < began + PIN_S - BOUND_S:
                    self._cluster.broken(f"P31 pin {number} of {partition} is gone")
                probe("lodger.pinned")
            except (MetadataError, LedgerError, IndexError):
                await self._pause(0.5)


class KeptFor:
    """Checks that no ledger leaves a list before it has been closed for the retention time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._closed_at = cluster, dict[LedgerId, float]()
        rules = cluster.rules
        self._close, self._trim = rules._closed, rules.on_trim
        rules._closed, rules.on_trim = self._closed, self._trimmed

    def _closed(self, ledger: LedgerId, last: EntryId) -> None:
        self._closed_at.setdefault(ledger, self._cluster.world.loop.time())
        self._close(ledger, last)

    def _trimmed(self, partition: PartitionId, dropped: list[Listed]) -> None:
        self._trim(partition, dropped)
        kept_s = self._cluster.knobs.partition.retention_ms / 1000
        for each in dropped:
            age_s = self._cluster.world.loop.time() - self._closed_at.get(each.id, 0.0)
            if age_s < kept_s - BOUND_S:
                self._cluster.broken(f"P31 {partition} ledger {each.id} is trimmed {age_s:.3f} s after its end")
