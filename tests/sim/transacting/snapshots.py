"""Snapshots of the whole store during transactions: each shows all of a transaction or nothing, and so do the changes
since the snapshot before (docs/protocol.md Tx13)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

from kvstore.partition.state.changes import DELETED, EXPIRED, feed_entry_of
from kvstore.partition.state.rows import key_of_data
from kvstore.proto import data_pb2, pinned_page
from kvstore.server.grpc.data import Data
from kvstore.types import EntryId, LedgerId, PartitionId, Position
from kvstore.wal.ports import LogEntry
from tests.sim.cluster import Cluster
from tests.sim.judges.log_states import Wrong
from tests.sim.judges.probes import declare, probe
from tests.sim.judges.transactions import KINDS, PREFIX, check_values
from tests.sim.test_pins import Reader

declare(
    "transact.snapshot", "transact.snapshot_not_read", "transact.snapshot_by_changes", "transact.snapshot_with_intents"
)

TRIES = 3
Rows = dict[bytes, tuple[int, bytes | None]]
"""Key → version and value, which is None if the key is deleted."""


class Snapshot(NamedTuple):
    """A snapshot that was read."""

    positions: dict[PartitionId, Position]
    rows: Rows


class Photographer:
    """Pins the store from time to time and reads the whole snapshot, each partition from any node that keeps it."""

    def __init__(self, cluster: Cluster, random: Random, pause_s: float) -> None:
        self._cluster, self._random, self._pause_s = cluster, random, pause_s
        self._reader = Reader(cluster, random)
        self._stopping = False
        self._last: Snapshot | None = None
        self.taken = 0

    async def work(self) -> None:
        """Take snapshots until `stop` is called."""
        number = 0
        while not self._stopping:
            await asyncio.sleep(self._random.expovariate(1 / self._pause_s))
            number += 1
            await self.take(f"photo{number}")

    async def take(self, pin: str) -> None:
        """Take a snapshot and judge it."""
        pinned = await self._reader.pin(pin)
        if pinned is not None:
            await asyncio.sleep(self._random.choice((0.0, 0.05, 0.5)))
            await self._check(pinned)
            await self._reader.unpin(pinned.id)

    def calm_down(self) -> None:
        """Take snapshots more rarely from now on."""
        self._pause_s = max(self._pause_s, 1.0)

    def stop(self) -> None:
        self._stopping = True

    async def _check(self, pinned: data_pb2.PinResponse) -> None:
        rows, intents = await self._rows(pinned), await self._rows(pinned, intents_only=True)
        if rows is None or intents is None:
            probe("transact.snapshot_not_read")
            return
        self.taken += 1
        probe("transact.snapshot")
        values = {key: rows.get(key, (0, None))[1] for kind in KINDS for key in kind}
        positions = {
            PartitionId(each.partition): Position(LedgerId(each.ledger), EntryId(each.entry))
            for each in pinned.partitions
        }
        try:
            check_values(values, f"snapshot {pinned.id}")
            self._check_changes(pinned.id, Snapshot(positions, rows), intents)
        except Wrong as error:
            self._cluster.broken(f"Tx13 {error}")
        self._last = Snapshot(positions, rows)

    def _check_changes(self, pin: str, here: Snapshot, intents: Rows) -> None:
        """Check that the changes in the logs since the last snapshot, with those of intents, lead to this one.
        Partitions that have not logged anything may be missing. Raises Wrong."""
        logs = {each for each, entries in self._cluster.logbook.entries.items() if entries}
        if self._last is None or not logs <= here.positions.keys() & self._last.positions.keys():
            return
        if any(here.positions[each] < self._last.positions[each] for each in logs):
            return  # read after the snapshot that was pinned behind it
        folded = dict(self._last.rows)
        for key, row in (*self._changes(self._last, here), *intents.items()):
            folded[key] = max(folded.get(key, (-1, None)), row, key=lambda row: row[0])
        living = {key: row for key, row in folded.items() if row[1] is not None}
        if living != here.rows:
            strange = sorted(key for key in {*living, *here.rows} if living.get(key) != here.rows.get(key))
            raise Wrong(f"snapshot {pin} differs from the changes since the last one in {strange}")
        probe("transact.snapshot_by_changes")
        if intents:
            probe("transact.snapshot_with_intents")

    def _changes(self, last: Snapshot, here: Snapshot) -> Iterator[tuple[bytes, tuple[int, bytes | None]]]:
        """Yield the changes in the logs between two snapshots."""
        for partition, entries in sorted(self._cluster.logbook.entries.items()):
            for position, noted in sorted(entries.items()):
                if last.positions[partition] < position <= here.positions[partition]:
                    feed = feed_entry_of(LogEntry(position, noted.payload))
                    for key, value, seq, kind in zip(feed.keys, feed.values, feed.sequences, feed.kinds, strict=True):
                        if key.startswith(PREFIX):
                            yield key, (seq, None if kind in (DELETED, EXPIRED) else value)

    async def _rows(self, pinned: data_pb2.PinResponse, *, intents_only: bool = False) -> Rows | None:
        """Return the rows of transactors' keys in all partitions, or None if no node returns those of a partition."""
        found: Rows = {}
        for each in pinned.partitions:
            rows = await self._rows_of(pinned, each, intents_only=intents_only)
            if rows is None:
                return None
            found |= rows
        return found

    async def _rows_of(
        self, pinned: data_pb2.PinResponse, partition: data_pb2.PinnedPartition, *, intents_only: bool
    ) -> Rows | None:
        def read(served: Any) -> Any:
            data = Data(served.env, served)
            return self._reader._read(data, pinned.id, partition, intents_only=intents_only)

        for _ in range(TRIES):
            for node in self._random.sample(self._cluster.servers, len(self._cluster.servers)):
                pages: Any = await self._reader._at(node, read)
                if isinstance(pages, list):
                    rows = [pinned_page.row_of(key_of_data(row_key), row) for row_key, row in pages]
                    return {
                        row.key: (row.version, None if row.is_deleted else row.value)
                        for row in rows
                        if row.key.startswith(PREFIX)
                    }
            await asyncio.sleep(0.2)
        return None
