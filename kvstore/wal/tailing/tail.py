"""Reads a partition's log in order, across ledgers and without fencing. It reads closed ledgers to their end, and the
open ledger up to its LAC. The end of a ledger is known only once the ledger is CLOSED; a listed next ledger proves
nothing. Watches are hints to read again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvstore.env.ports import Nursery
from kvstore.errors import (
    BookieError,
    Corrupted,
    LedgerDeleted,
    MetadataError,
    MetadataLost,
    NoSuchEntry,
    NoSuchLedger,
    UndecodableNode,
)
from kvstore.meta import paths
from kvstore.meta.history.high_water import agreed_by_a_majority
from kvstore.meta.lost import given_up
from kvstore.meta.store import MetadataStore, Watch
from kvstore.proto.digest import Packet
from kvstore.types import NO_ENTRY, BookieId, EntryId, LedgerId, LedgerMetadata, LedgerState, PartitionId, Position
from kvstore.wal.entry_reader import BATCH_BYTES, HEDGE_S, EntryReader
from kvstore.wal.handle import LedgerPorts
from kvstore.wal.ledger_list import BEGINNING, LedgerList
from kvstore.wal.lists import LedgerLists
from kvstore.wal.ports import LogEntry, Taker
from kvstore.wal.tailing.ledger_end import LedgerEnd
from kvstore.wal.tailing.wakeup import TIMER_MIN_S, ReaderWakeup

log = logging.getLogger(__name__)

BATCH_ENTRIES_MAX = 64
BATCH_BYTES_MAX = 4 << 20
PARALLEL_MAX = 8
"""Maximum number of concurrent reads from other nodes."""
GIVEN_MAX = 16
"""Maximum number of entries passed to a taker in one turn of the event loop, which takes a few milliseconds."""
GATHER_S = 0.01
"""Batching delay: seconds after a taker received entries until it receives more. The delay ends early if GIVEN_MAX
entries or many bytes are waiting, or if a caller requests them. The fixed cost of an entry is then paid once for all of
them."""
CHECK_S = 10.0


class TailReader:
    """Reads a partition's log, in order and without fencing: closed ledgers to their end, and the open ledger up to its
    LAC."""

    def __init__(
        self,
        partition: PartitionId,
        after: Position | None,
        *,
        store: MetadataStore,
        lists: LedgerLists,
        ports: LedgerPorts,
        nursery: Nursery,
        on_close: Callable[[TailReader], object] = lambda _: None,
        batch_bytes: int = BATCH_BYTES_MAX,
    ) -> None:
        self._batch_bytes = batch_bytes
        self._on_close = on_close
        self._partition = partition
        self._after = after or BEGINNING
        """Position of the last entry returned, or the position at which to begin."""
        self._store = store
        self._lists = lists
        self._ports = ports
        self._nursery = nursery
        self._reader: EntryReader | None = None
        """The reader of the current ledger; None before the first."""
        self._end: LedgerEnd
        """The end of the current ledger."""
        self._next = EntryId(0)
        self._known: list[LedgerId] = []
        """Ledgers that the list named when it was last read. A ledger that was trimmed since then can still be read
        while a pin holds it."""
        self._is_stale = False
        """True if the metadata of the current ledger may have changed."""
        self._checked_at = 0.0
        self._news = ReaderWakeup()
        self._loop = asyncio.get_running_loop()
        self._taker: Taker | None = None
        """Set while its `read` call waits."""
        self._is_giving = False
        """True if the taker will receive entries soon or after the batching delay."""
        self._gathering: asyncio.TimerHandle | None = None
        """Timer for the end of the batching delay."""
        self._given_at = 0.0
        self._is_closed = False
        self._watches: list[Watch] = [store.watch(paths.partition_log(partition), self._news.notify)]

    async def read(self, wait_ms: int, taker: Taker | None = None) -> Sequence[LogEntry]:
        """Return the next entries in order, bounded in bytes. If there are none yet, wait up to `wait_ms` milliseconds
        (a long poll); the result is empty at the timeout. While the call waits, the next entries may go to `taker`
        instead, in batches if they follow each other quickly; an error that `taker` raises is raised here. Raises
        NoSuchLedger if the position was trimmed, NoSuchEntry if the next entry is marked as lost, and BookieError if
        too few bookies answer now."""
        deadline = self._ports.clock.now() + wait_ms / 1000
        while True:
            self._news.forget()
            entries = self._at_hand() or await self._available()
            left_s = deadline - self._ports.clock.now()
            if entries or left_s < TIMER_MIN_S:
                return entries
            if self._reader is not None:
                self._end.poll(self._next)
            self._taker = taker
            try:
                await self._news.wait(min(left_s, CHECK_S))
            finally:
                self._taker = None
            if self._ports.clock.now() - self._checked_at >= CHECK_S:
                self._is_stale = True

    def confirm(self, position: Position) -> None:
        """Record that the leader has acknowledged the entry at `position`, so that no bookie must be asked whether it
        is confirmed."""
        reader = self._reader
        if reader is not None and reader.metadata.ledger == position.ledger and self._end.confirm(position.entry):
            self._notify()

    def give_now(self) -> None:
        """Pass entries that are held back for batching to the taker at once."""
        if self._gathering is not None:
            self._give()

    # docs/protocol.md T13
    def _notify(self) -> None:
        """Handle a notification that the current ledger may have new entries."""
        if self._taker is None:
            self._news.notify()
        elif self._gathering is not None:
            if self._end.lac - self._next >= GIVEN_MAX - 1 or self._end.fresh.are_many:
                self._end_gathering()
                self._loop.call_soon(self._give)
        elif not self._is_giving:
            self._is_giving = True
            wait_s = self._given_at + GATHER_S - self._loop.time()
            if wait_s > 0:
                self._gathering = self._loop.call_later(wait_s, self._give)
            else:
                self._loop.call_soon(self._give)

    def _end_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None

    def _give(self) -> None:
        """Pass the available entries to the taker. If that needs further requests, wake the waiting read."""
        self._end_gathering()
        self._is_giving = False
        self._given_at = self._loop.time()
        taker = self._taker
        entries = self._fresh() if taker is not None and not self._is_stale and taker.may_take() else []
        if taker is not None and entries:
            try:
                taker.take(entries)
            except Exception as error:  # noqa: BLE001  # the read's caller knows what to do
                self._news.fail(error)
        if not entries or self._next <= self._end.limit:
            self._news.notify()

    # docs/protocol.md L10, T11
    def _fresh(self) -> list[LogEntry]:
        """Return the next confirmed entries that the node's own bookie has reported, at most GIVEN_MAX."""
        reader, end = self._reader, self._end
        assert reader is not None
        ledger, first = reader.metadata.ledger, self._next
        taken = end.fresh.take_run(first, min(end.limit, first + GIVEN_MAX - 1))
        entries = [LogEntry(Position(ledger, entry), payload) for entry, payload in taken]
        if entries:
            self._after = entries[-1].position
            self._next = EntryId(self._after.entry + 1)
        return entries

    async def close(self) -> None:
        """Stop reading and watching."""
        self._is_closed = True
        self._end_gathering()
        self._on_close(self)
        if self._reader is not None:
            self._end.stop()
        for watch in self._watches:
            watch.close()
        self._news.close()
        await self._nursery.close()

    def nudge(self) -> None:
        """Read the list and the metadata again soon, because they have probably changed."""
        self._is_stale = True
        self._news.notify()

    def _at_hand(self) -> list[LogEntry]:
        """Return the next entry if the last long poll carried it, which is usual for a tail at the end of the log."""
        reader, entry = self._reader, self._next
        packet = self._end.take_last(entry) if reader is not None and self._end.piggyback is not None else None
        if reader is None or packet is None:
            return []
        self._next = EntryId(entry + 1)
        self._after = Position(reader.metadata.ledger, entry)
        return [LogEntry(self._after, packet.payload)]

    # docs/protocol.md L10
    async def _available(self) -> list[LogEntry]:
        """Read the entries that are already confirmed, without waiting for the writer."""
        if self._reader is None and not await self._seek():
            return []
        while True:
            reader = self._reader
            assert reader is not None
            if self._is_stale and not await self._refresh(reader):
                continue
            if self._next <= self._end.limit:
                return await self._batch(reader)
            if reader.metadata.state is not LedgerState.CLOSED or not await self._move_on(reader):
                return []

    # Which ledger.

    async def _seek(self) -> bool:
        """Find the ledger at which to begin. Return False if the list is still empty. Raises NoSuchLedger if the ledger
        was trimmed."""
        listed, _ = await self._lists.read(self._partition)
        if not listed.names(self._after.ledger):
            listed = await self._checked(listed, self._after)
        self._known = [each.id for each in listed.ledgers]
        if (later := listed.closed_before(self._after)) is not None:
            await self._open(later, EntryId(0))
            return True
        if listed.names(self._after.ledger):
            await self._open(self._after.ledger, EntryId(self._after.entry + 1))
            return True
        if not listed.ledgers:
            return False
        await self._open(listed.ledgers[0].id, EntryId(0))
        return True

    # docs/protocol.md G26
    async def _checked(self, listed: LedgerList, place: Position) -> LedgerList:
        """Return a list, possibly newer than `listed`, after checking that nothing after `_after` was trimmed. Raises
        NoSuchLedger if something after it was trimmed. Raises MetadataLost if the list does not explain `place`,
        because the list then comes from an older copy of the metadata."""
        is_known = bool(listed.ledgers) and (listed.trimmed_end is not None or not listed.trimmed_seq)
        if is_known and not listed.explains(place):
            await agreed_by_a_majority(self._store)
            listed, _ = await self._lists.read(self._partition)
            if not listed.explains(place):
                raise MetadataLost(
                    f"partition {self._partition}: entries were read up to ledger {place.ledger}, entry "
                    f"{place.entry}, but the log does not have that ledger: the metadata store is an older copy of "
                    "itself (docs/how-to/back-up-and-restore-metadata.md)"
                )
        end = listed.trimmed_end
        missed = self._after != BEGINNING if end is None else self._after < Position(end.ledger, end.entry)
        if missed and not listed.names(self._after.ledger):
            raise NoSuchLedger(f"partition {self._partition}: the log after {self._after} was trimmed")
        return listed

    # docs/protocol.md G6
    async def _metadata(self, ledger: LedgerId) -> LedgerMetadata:
        """Return the metadata as it is stored. Raises NoSuchLedger if the ledger was trimmed, LedgerDeleted if the list
        still names it, UndecodableNode."""
        try:
            return (await self._ports.ledgers.read(ledger))[0]
        except NoSuchLedger as error:
            listed, _ = await self._lists.read(self._partition, latest=True)
            if self._after != BEGINNING and listed.names(ledger):
                raise LedgerDeleted(
                    f"partition {self._partition}: ledger {ledger} does not exist, but the log's list has it: somebody "
                    "has deleted it"
                ) from error
            if not listed.names(ledger):
                await self._checked(listed, self._after)
            raise

    async def _open(self, ledger: LedgerId, first: EntryId) -> None:
        metadata = await self._metadata(ledger)
        self._check_end(metadata)
        if self._reader is not None:
            self._end.stop()
        self._reader = EntryReader(metadata, self._ports.bookies, self._nursery, self._ports.choice.own)
        self._end = LedgerEnd(self._reader, first, ports=self._ports, nursery=self._nursery, notify=self._notify)
        self._next = first
        if self._is_closed:  # closed meanwhile
            self._end.stop()
        self._checked_at = self._ports.clock.now()
        self._is_stale = False
        for watch in self._watches[1:]:
            watch.close()
        del self._watches[1:]
        if metadata.state is not LedgerState.CLOSED:
            self._watches.append(self._ports.ledgers.watch(ledger, self.nudge))
            self._is_stale = True  # it may have changed before the watch was set

    # docs/protocol.md G26
    def _check_end(self, metadata: LedgerMetadata) -> None:
        """Raise MetadataLost if the ledger ends before an entry that was already returned."""
        is_here = metadata.state is LedgerState.CLOSED and metadata.ledger == self._after.ledger
        if is_here and metadata.last_entry < self._after.entry:
            raise MetadataLost(
                f"partition {self._partition}: entry {self._after.entry} of ledger {metadata.ledger} was read, "
                f"but the ledger ends at entry {metadata.last_entry}: the metadata store is an older copy of itself "
                "(docs/how-to/back-up-and-restore-metadata.md)"
            )

    # docs/protocol.md T2
    async def _move_on(self, reader: EntryReader) -> bool:
        """Continue from the end of a closed ledger with the next one. Return False if none is listed yet. Raises
        NoSuchLedger if entries between the last known ledger and the first listed one were trimmed."""
        ledger, handed_out = reader.metadata.ledger, self._after
        self._check_end(reader.metadata)
        self._after = max(self._after, Position(ledger, reader.metadata.last_entry))
        listed, _ = await self._lists.read(self._partition)
        known = [each for each in self._known if each >= ledger]
        is_last = known[-1:] in ([], [ledger])
        if not listed.names(ledger) and is_last:
            listed = await self._checked(listed, handed_out)
        if is_last or any(map(listed.names, known)):  # otherwise ledgers between both may have been trimmed
            known += [each.id for each in listed.ledgers]
        self._known = sorted({*known})
        following = listed.closed_before(self._after) or next((known for known in self._known if known > ledger), None)
        if following is None:
            return False
        await self._open(following, EntryId(0))
        return True

    async def _refresh(self, reader: EntryReader) -> bool:
        """Read the current ledger's metadata again. Return False if the reader has moved to another ledger, because
        this ledger's metadata is lost and all of its entries were returned."""
        self._is_stale = False
        try:
            reader.metadata = await self._metadata(reader.metadata.ledger)
        except (UndecodableNode, LedgerDeleted):
            self._is_stale = True
            listed, _ = await self._lists.read(self._partition)
            later = listed.closed_before(self._after)
            if later is None:
                return True
            self._known = [each.id for each in listed.ledgers]
            await self._open(later, EntryId(0))
            return False
        except MetadataError:
            self._is_stale = True  # continue with the known metadata until the metadata store is back
            return True
        self._checked_at = self._ports.clock.now()
        self._end.ensemble_changed()
        return True

    # Entries of the current ledger.

    async def _batch(self, reader: EntryReader) -> list[LogEntry]:
        """Return entries from `_next` on, in order, bounded in number and bytes. If the call is cancelled, no entry
        counts as returned."""
        entries: list[LogEntry] = []
        size = 0
        following, limit = self._next, self._end.limit
        while following <= limit and len(entries) < BATCH_ENTRIES_MAX and size < self._batch_bytes:
            last = EntryId(min(limit, following + BATCH_ENTRIES_MAX - len(entries) - 1))
            bytes_left = self._batch_bytes - size
            packets = await self._read_some(reader, following, last, bytes_left, is_first=not entries)
            if not packets:
                break
            for packet in packets:
                entries.append(LogEntry(Position(reader.metadata.ledger, packet.entry), packet.payload))
                size += len(packet.payload)
                following = EntryId(packet.entry + 1)
                if packet.lac > self._end.lac:
                    self._end.lac = packet.lac
        if entries:
            self._after, self._next = entries[-1].position, following
        return entries

    async def _read_some(
        self, reader: EntryReader, entry: EntryId, last: EntryId, bytes_left: int, *, is_first: bool
    ) -> list[Packet]:
        payload = self._end.fresh.take(entry)
        if payload is not None:
            return [Packet(entry, NO_ENTRY, 0, payload)]
        if self._end.piggyback is not None and (piggyback := self._end.take(entry)) is not None:
            return [piggyback]
        if entry < last and (packets := await self._read_many(reader, entry, last, bytes_left)):
            return packets
        nearest = reader.order(entry)[0]
        if nearest == self._ports.choice.own:
            own_copy = await self._own_copy(reader, nearest, entry)
            if own_copy is not None:
                return [own_copy]
        try:
            return await self._read_ahead(reader, entry, EntryId(min(last, entry + PARALLEL_MAX - 1)))
        except (BookieError, NoSuchEntry) as error:
            self._is_stale = True  # the ensemble may have changed
            if not is_first:
                return []  # hand out what was read; the next call raises
            if given_up(reader.metadata)(entry):  # docs/protocol.md A14
                raise NoSuchEntry(
                    f"partition {self._partition}: entry {entry} of ledger {reader.metadata.ledger} is marked as lost"
                ) from error
            raise BookieError(f"ledger {reader.metadata.ledger}: {error}") from error

    # docs/protocol.md T12
    async def _read_many(self, reader: EntryReader, first: EntryId, last: EntryId, bytes_left: int) -> list[Packet]:
        """Return consecutive entries starting at `first`, from batches and from the entries that the node's own bookie
        has reported. Return none if `first` is not available there."""
        fresh = self._end.fresh
        wanted = [EntryId(entry) for entry in range(first, last + 1) if entry not in fresh]
        if len(wanted) < 2:
            return []
        found = await reader.read_batch(wanted, min(bytes_left, BATCH_BYTES))
        packets: list[Packet] = []
        for entry in map(EntryId, range(first, last + 1)):
            packet = found.get(entry)
            if packet is None:
                payload = fresh.take(entry)
                if payload is None:
                    break
                packet = Packet(entry, NO_ENTRY, 0, payload)
            packets.append(packet)
        return packets

    # docs/protocol.md T1
    async def _own_copy(self, reader: EntryReader, own: BookieId, entry: EntryId) -> Packet | None:
        """Return the entry from this node's own bookie with a plain call, without a task. Return None if the bookie has
        no good copy or its disk does not answer quickly."""
        try:
            async with asyncio.timeout(HEDGE_S):
                answer = await self._ports.bookies.read(own, reader.metadata.ledger, entry)
            if answer.packet is not None:
                return reader.digest.open(reader.metadata.ledger, entry, answer.packet)
        except (BookieError, Corrupted, TimeoutError) as error:
            log.info("own bookie's copy not used ledger=%d entry=%d error=%r", reader.metadata.ledger, entry, error)
        return None

    async def _read_ahead(self, reader: EntryReader, first: EntryId, last: EntryId) -> list[Packet]:
        """Read several entries concurrently from other nodes. Raises the error of the first entry, if it has one."""
        if first == last:
            return [await reader.read(first)]
        tasks = [
            self._nursery.spawn(reader.read_or_error(EntryId(entry)), name=f"read {entry}")
            for entry in range(first, last + 1)
        ]
        packets: list[Packet] = []
        for task in tasks:
            got = await task
            if not isinstance(got, Packet):
                if not packets:
                    raise got
                break
            packets.append(got)
        return packets
