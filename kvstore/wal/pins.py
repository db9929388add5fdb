"""Pins, which protect a partition's ledgers from trimming, starting at one ledger (docs/protocol.md G14).

A client creates its pin, then reads the ledger list, and fails if its ledger is not in the list. The trimmer changes
the list, then reads the pins, then deletes the ledgers that no pin holds. Because of this order at least one of the two
always sees the change of the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
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
"""Name prefix of pins that hold logs for readers of feeds."""
EVERYTHING = LedgerId(0)
"""A pin with this ledger holds all existing and all future ledgers of the log."""


@dataclass(frozen=True, slots=True)
class Pin:
    """The content of a pin's znode: which ledgers it holds, and until when."""

    ledger: LedgerId
    """The first ledger that the pin holds. All later ledgers are held too."""
    deadline_ms: int = 0
    """Wall-clock time in milliseconds at which the pin expires. 0 means that the pin is an ephemeral znode, which holds
    ledgers as long as it exists."""


@dataclass(frozen=True, slots=True)
class PinNumber:
    """The content of the znode with the number of the last pin."""

    number: int


class Pins:
    """Creates, extends, lists and releases the pins of all partitions. Calls raise MetadataUnavailable or
    MetadataUnknown in addition to the errors that they name."""

    def __init__(self, store: MetadataStore, lists: LedgerLists) -> None:
        self._store = store
        self._lists = lists

    async def hold(self, partition: PartitionId, name: str, ledger: LedgerId, *, deadline_ms: int = 0) -> None:
        """Create a pin that holds `ledger` and all later ledgers. Without `deadline_ms` (wall-clock milliseconds) the
        pin lasts until the end of this metadata session. Raises NoSuchLedger if the list no longer names the ledger,
        and NodeExists if a pin with this name exists."""
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
        """Hold `ledger` and all later ledgers until `deadline_ms` (wall-clock milliseconds). If a pin with this name
        exists, only its deadline changes, and it keeps its first ledger until `advance`. Raises NoSuchLedger if the
        list no longer names the ledger."""
        if not await self.extend(partition, name, deadline_ms):
            try:
                await self.hold(partition, name, ledger, deadline_ms=deadline_ms)
            except NodeExists:  # after a broken connection: our own pin, or that of another attempt
                await self.extend(partition, name, deadline_ms)

    # docs/protocol.md K3
    async def advance(self, partition: PartitionId, name: str, ledger: LedgerId) -> None:
        """Hold nothing before `ledger` any more. Does nothing if the pin does not exist."""
        await self._change(partition, name, lambda pin: replace(pin, ledger=max(pin.ledger, ledger)))

    async def hold_on(self, partition: PartitionId, name: str, deadline_ms: int, ledger: LedgerId = EVERYTHING) -> None:
        """Create a pin without checking the ledger list: the ledgers that another pin already holds, or by default the
        whole log, even one that has no ledger yet. Does nothing if a pin with this name exists."""
        path = paths.partition_pin(partition, name)
        await ensure_path(self._store, paths.parent(path))
        with suppress(NodeExists):
            await self._make(path, Pin(ledger, deadline_ms))

    # docs/protocol.md K3
    async def _make(self, path: str, pin: Pin) -> None:
        """Create a pin with a deadline, which the trimmer may remove once it expires. The same transaction changes the
        directory's version, because the new node's version may equal that of an earlier pin with the same name. Raises
        NodeExists."""
        await self._store.multi([Create(path, codec.encode(pin)), SetData(paths.parent(path), b"", -1)])

    # docs/protocol.md Tx13
    async def next_number(self, date_ms: int) -> int:
        """Return a number for a pin of the whole store that is higher than all numbers that were returned before.
        Numbers are at least `date_ms`, the wall clock in ms, so that they also rise if an older copy replaces the
        metadata store."""
        path = paths.PIN_NUMBER

        async def read() -> tuple[PinNumber, int]:
            try:
                data, stat = await self._store.get(path)
            except NoSuchNode:
                with suppress(NodeExists):
                    await self._store.create(path, codec.encode(PinNumber(0)))
                data, stat = await self._store.get(path)
            return codec.decode(PinNumber, data, what=path), stat.version

        async def write(number: PinNumber, version: int) -> int:
            return await self._store.set(path, codec.encode(number), version)

        def higher(last: PinNumber) -> PinNumber:
            return PinNumber(max(last.number + 1, date_ms))

        found, _ = await update(read, write, higher)
        return found.number

    async def hold_as_others(
        self, joined: Iterable[PartitionId], others: Iterable[PartitionId], prefix: str, now_ms: int
    ) -> None:
        """Hold the whole logs of partitions that have just joined. For each unexpired pin on another partition whose
        name begins with `prefix`, create a pin with the same name and deadline."""
        found: dict[str, int] = {}
        for other in others:
            found |= {name: pin.deadline_ms for name, pin in await self.all(other, prefix)}
        for partition in joined:
            for name, deadline_ms in sorted(found.items()):
                if deadline_ms > now_ms:
                    await self.hold_on(partition, name, deadline_ms)

    async def extend(self, partition: PartitionId, name: str, deadline_ms: int) -> bool:
        """Set a pin's deadline to `deadline_ms` (wall-clock milliseconds). Returns False if the pin does not exist or
        is ephemeral."""

        def later(pin: Pin) -> Pin:
            return replace(pin, deadline_ms=deadline_ms) if pin.deadline_ms else pin

        pin = await self._change(partition, name, later)
        return pin is not None and pin.deadline_ms > 0

    async def _change(self, partition: PartitionId, name: str, change: Callable[[Pin], Pin]) -> Pin | None:
        """Change a pin and return it, or None if it does not exist."""
        path = paths.partition_pin(partition, name)

        async def read() -> tuple[Pin, int]:
            data, stat = await self._store.get(path)
            return codec.decode(Pin, data, what=path), stat.version

        async def write(pin: Pin, version: int) -> int:
            return await self._store.set(path, codec.encode(pin), version)

        try:
            return (await update(read, write, change))[0]
        except NoSuchNode:
            return None

    async def all(self, partition: PartitionId, prefix: str = "") -> list[tuple[str, Pin]]:
        """Return every existing pin whose name begins with `prefix`, with its name, including expired pins. An
        unreadable pin is returned as a pin that holds everything, which is how the trimmer treats it."""
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
        """Return a pin's deadline in wall-clock milliseconds; 0 if the pin does not exist or is ephemeral. The
        connected metadata server may return an older value."""
        path = paths.partition_pin(partition, name)
        try:
            data, _ = await self._store.get(path)
        except NoSuchNode:
            return 0
        return _pin_of(data, path).deadline_ms

    async def names(self, partition: PartitionId) -> set[str]:
        """Return the names of existing pins, including every pin that existed before the call."""
        directory = paths.partition_pins(partition)
        await self._store.sync(directory)
        try:
            return set(await self._store.children(directory))
        except NoSuchNode:
            return set()

    async def release(self, partition: PartitionId, name: str) -> None:
        """Delete the pin. Does nothing if the pin does not exist."""
        await until_known(lambda: self._release(paths.partition_pin(partition, name)))

    async def _release(self, path: str) -> None:
        try:
            await self._store.delete(path, -1)
        except NoSuchNode:
            return

    async def oldest(self, partition: PartitionId, now_ms: int) -> LedgerId | None:
        """Return the first ledger that any pin holds, or None if no pin holds one. Expired pins are removed. An
        unreadable pin, possibly written by a later version, holds every ledger."""
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
        """Remove a pin if it is still expired and no other pin is created at the same time. Return False if the pin may
        still hold ledgers."""
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
    """Decode a pin. An unreadable pin, possibly written by a later version, is returned as one that holds every
    ledger."""
    try:
        return codec.decode(Pin, data, what=path)
    except Corrupted as error:
        log.error("unreadable pin, its log is not trimmed while it exists error=%s", error)
        return Pin(EVERYTHING)
