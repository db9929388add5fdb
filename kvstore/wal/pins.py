"""Pins hold a partition's ledgers against trimming, from one ledger on (docs/protocol.md G14).

A pinner creates its pin, then reads the list, and fails if its ledger is not there. The trimmer changes the list, then
reads the pins, then deletes what no pin holds. So one of the two always sees the other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from kvstore.errors import Corrupted, NodeExists, NoSuchLedger, NoSuchNode, VersionConflict
from kvstore.meta import codec, paths
from kvstore.meta.store import Check, Create, Delete, MetadataStore, SetData, ensure_path
from kvstore.meta.update import until_known, update
from kvstore.types import LedgerId, PartitionId
from kvstore.wal.lists import LedgerLists

log = logging.getLogger(__name__)

FEED_PIN = "feed-"
"""How the names of pins begin that hold logs for readers of feeds."""
EVERYTHING = LedgerId(0)
"""From here on a pin holds all that there is, and all that comes."""


@dataclass(frozen=True, slots=True)
class Pin:
    """The content of a pin's node."""

    ledger: LedgerId
    """This ledger and all after it are held."""
    deadline_ms: int = 0
    """Wall clock after which the pin counts no more; 0: it is ephemeral and counts while it is there."""


class Pins:
    """Calls raise MetadataUnavailable or MetadataUnknown besides what they name."""

    def __init__(self, store: MetadataStore, lists: LedgerLists) -> None:
        self._store = store
        self._lists = lists

    async def hold(self, partition: PartitionId, name: str, ledger: LedgerId, *, deadline_ms: int = 0) -> None:
        """Hold `ledger` and what follows, until the deadline or, without one, the end of this session. Raises
        NoSuchLedger if the list does not name it any more, NodeExists if the pin is there."""
        path = paths.partition_pin(partition, name)
        await ensure_path(self._store, paths.parent(path))
        pin = Pin(ledger, deadline_ms)
        if deadline_ms:
            await self._make(path, pin)
        else:
            await self._store.create(path, codec.encode(pin), ephemeral=True)
        listed, _ = await self._lists.read(partition, latest=True)
        if not listed.names(ledger):
            await self.release(partition, name)
            raise NoSuchLedger(f"partition {partition}: ledger {ledger} was trimmed")

    async def hold_until(self, partition: PartitionId, name: str, ledger: LedgerId, deadline_ms: int) -> None:
        """Hold `ledger` and what follows until the deadline. A pin of that name goes on, and holds what it held. Raises
        NoSuchLedger."""
        if not await self.extend(partition, name, deadline_ms):
            try:
                await self.hold(partition, name, ledger, deadline_ms=deadline_ms)
            except NodeExists:  # after a broken connection: our own, or that of another attempt
                await self.extend(partition, name, deadline_ms)

    async def hold_on(self, partition: PartitionId, name: str, deadline_ms: int, ledger: LedgerId = EVERYTHING) -> None:
        """Hold what another pin holds, or all that there is of a log, also before it begins. No error if the pin is
        there."""
        path = paths.partition_pin(partition, name)
        await ensure_path(self._store, paths.parent(path))
        with suppress(NodeExists):
            await self._make(path, Pin(ledger, deadline_ms))

    # docs/protocol.md K3
    async def _make(self, path: str, pin: Pin) -> None:
        """Make a pin that the trimmer may remove. It changes the directory's version: its own is that of a former one
        of the same name. Raises NodeExists."""
        await self._store.multi([Create(path, codec.encode(pin)), SetData(paths.parent(path), b"", -1)])

    async def hold_as_others(
        self, joined: Iterable[PartitionId], others: Iterable[PartitionId], prefix: str, now_ms: int
    ) -> None:
        """Hold the whole logs of partitions that have only just joined, under each name with that prefix that holds the
        log of another, and as long."""
        found: dict[str, int] = {}
        for other in others:
            found |= {name: pin.deadline_ms for name, pin in await self.all(other, prefix)}
        for partition in joined:
            for name, deadline_ms in sorted(found.items()):
                if deadline_ms > now_ms:
                    await self.hold_on(partition, name, deadline_ms)

    async def extend(self, partition: PartitionId, name: str, deadline_ms: int) -> bool:
        """Move a pin's deadline. False if there is no such pin, or it has none."""
        path = paths.partition_pin(partition, name)

        async def read() -> tuple[Pin, int]:
            data, stat = await self._store.get(path)
            return codec.decode(Pin, data, what=path), stat.version

        async def write(pin: Pin, version: int) -> int:
            return await self._store.set(path, codec.encode(pin), version)

        def later(pin: Pin) -> Pin:
            return replace(pin, deadline_ms=deadline_ms) if pin.deadline_ms else pin

        try:
            pin, _ = await update(read, write, later)
        except NoSuchNode:
            return False
        return pin.deadline_ms > 0

    async def all(self, partition: PartitionId, prefix: str = "") -> list[tuple[str, Pin]]:
        """Every pin that is there whose name begins so, by name, those past their deadline too. One that cannot be read
        is shown as it counts: it holds everything."""
        directory = paths.partition_pins(partition)
        found = []
        with suppress(NoSuchNode):
            for name in await self._store.children(directory):
                if not name.startswith(prefix):
                    continue
                with suppress(NoSuchNode):
                    path = paths.join(directory, name)
                    data, _ = await self._store.get(path)
                    found.append((name, _pin_of(data, path)))
        return found

    async def deadline(self, partition: PartitionId, name: str) -> int:
        """Of a pin, as far as this server has heard; 0 if it is gone, or has none."""
        path = paths.partition_pin(partition, name)
        try:
            data, _ = await self._store.get(path)
        except NoSuchNode:
            return 0
        return _pin_of(data, path).deadline_ms

    async def names(self, partition: PartitionId) -> set[str]:
        """Of the pins that are there, none missing that was there before the call."""
        directory = paths.partition_pins(partition)
        await self._store.sync(directory)
        try:
            return set(await self._store.children(directory))
        except NoSuchNode:
            return set()

    async def release(self, partition: PartitionId, name: str) -> None:
        """Hold nothing any more; no error if the pin is gone."""
        await until_known(lambda: self._release(paths.partition_pin(partition, name)))

    async def _release(self, path: str) -> None:
        try:
            await self._store.delete(path, -1)
        except NoSuchNode:
            return

    async def oldest(self, partition: PartitionId, now_ms: int) -> LedgerId | None:
        """The first ledger that any pin holds. Pins past their deadline are removed. One that cannot be read, of a
        later version perhaps, holds every ledger."""
        directory = paths.partition_pins(partition)
        await self._store.sync(directory)
        try:
            names = await self._store.children(directory)
        except NoSuchNode:
            return None
        held = []
        for name in names:
            path = paths.join(directory, name)
            try:
                data, _ = await self._store.get(path)
            except NoSuchNode:
                continue
            pin = _pin_of(data, path)
            is_old = 0 < pin.deadline_ms < now_ms
            if not (is_old and await self._is_removed(path, now_ms)):
                held.append(pin.ledger)
        return min(held, default=None)

    # docs/protocol.md K3
    async def _is_removed(self, path: str, now_ms: int) -> bool:
        """Remove a pin that is still past its deadline, if none is made meanwhile. False: perhaps it holds on."""
        directory = paths.parent(path)
        try:
            _, made = await self._store.get(directory)
            data, stat = await self._store.get(path)
            if not 0 < _pin_of(data, path).deadline_ms < now_ms:
                return False
            await self._store.multi([Check(directory, made.version), Delete(path, stat.version)])
        except VersionConflict:
            return False
        except NoSuchNode:
            return True
        return True


def _pin_of(data: bytes, path: str) -> Pin:
    """One that cannot be read, of a later version perhaps, counts as one that holds every ledger."""
    try:
        return codec.decode(Pin, data, what=path)
    except Corrupted as error:
        log.error("%s: nothing of that log is trimmed while it is there", error)
        return Pin(EVERYTHING)
