"""Reads a partition's log in order, over ledgers, without fencing: closed ledgers to their end, the open one up to its
LAC.

The end of a ledger is known only when it is CLOSED; that a next one is listed says nothing. Watches are hints to read
again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from kvstore.env.ports import Nursery
from kvstore.errors import BookieError, Corrupted, MetadataError, NoSuchEntry, NoSuchLedger
from kvstore.meta import paths
from kvstore.meta.store import MetadataStore, Watch
from kvstore.proto.digest import Packet
from kvstore.types import NO_ENTRY, BookieId, EntryId, LedgerId, LedgerState, PartitionId, Position
from kvstore.wal.entry_reader import EntryReader
from kvstore.wal.handle import LedgerPorts
from kvstore.wal.ledger_list import BEGINNING, LedgerList
from kvstore.wal.lists import LedgerLists
from kvstore.wal.polling import PollChoice
from kvstore.wal.ports import LogEntry, ReadAnswer

log = logging.getLogger(__name__)

BATCH_ENTRIES_MAX = 64
BATCH_BYTES_MAX = 4 << 20
PARALLEL_MAX = 8
"""Reads sent to other nodes at once."""
POLL_MS = 2_000
"""One long poll; when it brings nothing the other bookies are asked whether this one is behind."""
LOOK_AGAIN_S = 10.0
TIMER_MIN_S = 0.001
"""Less than this is not worth a timer, and may be nothing at all on the event loop's clock."""
POLL_RETRY_S = 0.02
ASK_S = 0.1
"""So long others have to say what they know when a long poll has brought nothing."""


class TailReader:
    """A LogReader (kvstore.wal.ports)."""

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
        """The last entry handed out, or where to begin."""
        self._store = store
        self._lists = lists
        self._ports = ports
        self._nursery = nursery
        self._reader: EntryReader | None = None
        """Of the ledger that is being read; None before the first."""
        self._next = EntryId(0)
        self._lac = NO_ENTRY
        self._piggyback: Packet | None = None
        self._known: list[LedgerId] = []
        """Ledgers that were listed when last looked: those trimmed since can be read on while a pin holds them."""
        self._has_news = False
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None
        self._wait_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_stale = False
        """The metadata of the present ledger may have changed."""
        self._looked_at = 0.0
        self._polling: EntryReader | None = None
        """Whose long poll is under way."""
        self._is_closed = False
        self._polls = PollChoice()
        self._watches: list[Watch] = [store.watch(paths.partition_log(partition), self._tell)]

    async def read(self, wait_ms: int) -> Sequence[LogEntry]:
        """The next entries; see LogReader."""
        deadline = self._ports.clock.now() + wait_ms / 1000
        while True:
            self._has_news = False
            entries = self._at_hand() or await self._available()
            left_s = deadline - self._ports.clock.now()
            if entries or left_s < TIMER_MIN_S:
                return entries
            self._poll()
            await self._wait(min(left_s, LOOK_AGAIN_S))
            if self._ports.clock.now() - self._looked_at >= LOOK_AGAIN_S:
                self._is_stale = True

    def confirm(self, position: Position) -> None:
        """Whoever appended the entry there says that it is acknowledged: no bookie need be asked for that."""
        reader = self._reader
        if reader is not None and reader.metadata.ledger == position.ledger and position.entry > self._lac:
            self._lac = position.entry
            self._tell()

    async def close(self) -> None:
        """Stop reading and watching."""
        self._is_closed = True
        self._on_close(self)
        for watch in self._watches:
            watch.close()
        if self._timer is not None:
            self._timer.cancel()
        await self._nursery.close()

    def nudge(self) -> None:
        """Look again: the ledger or the list has probably changed."""
        self._is_stale = True
        self._tell()

    def _at_hand(self) -> list[LogEntry]:
        """The one entry that a long poll has brought along, if it is the next: what a tail at the end of the log
        gets."""
        packet, reader = self._piggyback, self._reader
        if packet is None or reader is None or packet.entry != self._next or self._limit(reader) != self._next:
            return []
        self._piggyback = None
        self._next = EntryId(packet.entry + 1)
        self._after = Position(reader.metadata.ledger, packet.entry)
        return [LogEntry(self._after, packet.payload)]

    # docs/protocol.md L10
    async def _available(self) -> list[LogEntry]:
        """What can be read without waiting for the writer."""
        if self._reader is None and not await self._seek():
            return []
        while True:
            reader = self._reader
            assert reader is not None
            if self._is_stale:
                await self._refresh(reader)
            if self._next <= self._limit(reader):
                return await self._batch(reader)
            if reader.metadata.state is not LedgerState.CLOSED or not await self._move_on(reader):
                return []

    def _limit(self, reader: EntryReader) -> EntryId:
        """The last entry that may be handed out."""
        metadata = reader.metadata
        return metadata.last_entry if metadata.state is LedgerState.CLOSED else self._lac

    # Which ledger.

    async def _seek(self) -> bool:
        """Find the ledger to begin with; False if nothing is listed yet. Raises NoSuchLedger if it was trimmed."""
        listed, _ = await self._lists.read(self._partition)
        self._known = [each.id for each in listed.ledgers]
        if listed.names(self._after.ledger):
            await self._open(self._after.ledger, EntryId(self._after.entry + 1))
            return True
        self._check_not_trimmed(listed)
        if not listed.ledgers:
            return False
        await self._open(listed.ledgers[0].id, EntryId(0))
        return True

    def _check_not_trimmed(self, listed: LedgerList) -> None:
        """The ledger of `_after` is not listed: fine only if nothing behind `_after` was trimmed."""
        end = listed.trimmed_end
        missed = self._after != BEGINNING if end is None else self._after < Position(end.ledger, end.entry)
        if missed:
            raise NoSuchLedger(f"partition {self._partition}: the log after {self._after} was trimmed")

    async def _open(self, ledger: LedgerId, first: EntryId) -> None:
        metadata, _ = await self._ports.ledgers.read(ledger)
        self._reader = EntryReader(metadata, self._ports.bookies, self._nursery, self._ports.choice.own)
        self._next, self._lac, self._piggyback = first, EntryId(first - 1), None
        self._polls = PollChoice()
        self._looked_at = self._ports.clock.now()
        self._is_stale = False
        for watch in self._watches[1:]:
            watch.close()
        del self._watches[1:]
        if metadata.state is not LedgerState.CLOSED:
            self._watches.append(self._ports.ledgers.watch(ledger, self.nudge))
            self._is_stale = True  # it may have changed before the watch was set

    # docs/protocol.md T2
    async def _move_on(self, reader: EntryReader) -> bool:
        """From the end of a closed ledger to the next one; False if none is listed yet."""
        ledger = reader.metadata.ledger
        self._after = max(self._after, Position(ledger, reader.metadata.last_entry))
        listed, _ = await self._lists.read(self._partition)
        ids = [each.id for each in listed.ledgers]
        if ledger not in ids and ledger == self._known[-1]:
            self._check_not_trimmed(listed)
        self._known = sorted({*(known for known in self._known if known >= ledger), *ids})
        following = next((known for known in self._known if known > ledger), None)
        if following is None:
            return False
        await self._open(following, EntryId(0))
        return True

    async def _refresh(self, reader: EntryReader) -> None:
        self._is_stale = False
        try:
            reader.metadata, _ = await self._ports.ledgers.read(reader.metadata.ledger)
        except MetadataError:
            self._is_stale = True  # what is known goes on until the store is back
            return
        self._looked_at = self._ports.clock.now()

    # Entries of the present ledger.

    async def _batch(self, reader: EntryReader) -> list[LogEntry]:
        """From `_next` on, in order, bounded in number and bytes."""
        entries: list[LogEntry] = []
        size = 0
        limit = self._limit(reader)
        while self._next <= limit and len(entries) < BATCH_ENTRIES_MAX and size < self._batch_bytes:
            packets = await self._read_some(reader, limit, is_first=not entries)
            if not packets:
                break
            for packet in packets:
                entries.append(LogEntry(Position(reader.metadata.ledger, packet.entry), packet.payload))
                size += len(packet.payload)
                self._next = EntryId(packet.entry + 1)
                self._lac = max(self._lac, packet.lac)
        if entries:
            self._after = entries[-1].position
        return entries

    async def _read_some(self, reader: EntryReader, limit: EntryId, *, is_first: bool) -> list[Packet]:
        entry = self._next
        piggyback, self._piggyback = self._piggyback, None
        if piggyback is not None and piggyback.entry == entry:
            return [piggyback]
        nearest = reader.order(entry)[0]
        if nearest == self._ports.choice.own:
            own_copy = await self._own_copy(reader, nearest, entry)
            if own_copy is not None:
                return [own_copy]
        last = EntryId(min(limit, entry + PARALLEL_MAX - 1))
        try:
            return await self._read_ahead(reader, entry, last)
        except (BookieError, NoSuchEntry) as error:
            self._is_stale = True  # perhaps the ensemble has changed
            if not is_first:
                return []  # hand out what there is; the next call raises
            raise BookieError(f"ledger {reader.metadata.ledger}: {error}") from error

    async def _own_copy(self, reader: EntryReader, own: BookieId, entry: EntryId) -> Packet | None:
        """From this node's own bookie, if it has a good copy: a plain call, and no task."""
        try:
            answer = await self._ports.bookies.read(own, reader.metadata.ledger, entry)
            if answer.packet is not None:
                return reader.digest.open(reader.metadata.ledger, entry, answer.packet)
        except (BookieError, Corrupted) as error:
            log.info("ledger=%d entry=%d own copy is of no use: %s", reader.metadata.ledger, entry, error)
        return None

    async def _read_ahead(self, reader: EntryReader, first: EntryId, last: EntryId) -> list[Packet]:
        """Several entries at once from other nodes. Raises what the first of them raises."""
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

    # Waiting for the writer.

    async def _wait(self, seconds: float) -> None:
        """Until there is news, or so long. One timer serves many waits: it is set again only when it has fired
        early."""
        if self._has_news:
            return
        self._wait_until = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > self._wait_until:
            self._set_timer()
        self._waiting = self._loop.create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._wait_until, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._loop.time() + TIMER_MIN_S < self._wait_until:
            self._set_timer()
        else:
            self._wake_up()

    def _wake_up(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _tell(self) -> None:
        """There may be something new."""
        self._has_news = True
        self._wake_up()

    def _poll(self) -> None:
        """Have one long poll under way, in the open ledger only."""
        reader = self._reader
        if reader is None or reader.metadata.state is LedgerState.CLOSED or self._polling is reader:
            return
        self._polling = reader
        lac = self._lac
        near = reader.order(EntryId(lac + 1))
        others = [bookie for bookie in reader.metadata.fragments[-1].ensemble if bookie not in near]
        asked = self._polls.first((*near, *others))
        done = partial(self._polled, reader, lac, asked)
        self._ports.bookies.long_poll(asked, reader.metadata.ledger, lac, POLL_MS, done)

    def _polled(self, reader: EntryReader, lac: EntryId, asked: BookieId, answer: ReadAnswer | BookieError) -> None:
        if reader is not self._reader or self._is_closed:
            return
        now = self._ports.clock.now()
        if isinstance(answer, BookieError):
            log.debug("ledger=%d long poll: %s", reader.metadata.ledger, answer)
            self._polls.failed(asked, now)
            self._loop.call_later(POLL_RETRY_S, self._end_poll, reader)
        elif answer.max_lac <= lac:
            heard = {asked: answer.max_lac}
            self._nursery.spawn(self._ask_others(reader, heard), name="is the bookie behind that was asked")
        elif asked == self._ports.choice.own:  # it has checked what it learned that from (docs/protocol.md, B21)
            self._believe(reader, answer, answer.max_lac)
        else:
            self._nursery.spawn(self._verify(reader, asked, answer), name="verify a last-add-confirmed")

    async def _verify(self, reader: EntryReader, asked: BookieId, answer: ReadAnswer) -> None:
        """The number in an answer has no digest: it only says that it is worth asking for a packet that has one and
        says the same (docs/protocol.md, T10)."""
        heard: dict[BookieId, EntryId] = {}
        await self._hear(reader, asked, heard)
        lac = heard.get(asked, NO_ENTRY)
        if lac < answer.max_lac:
            log.info("ledger=%d %s says lac=%d and shows %d", reader.metadata.ledger, asked, answer.max_lac, lac)
            self._polls.failed(asked, self._ports.clock.now())
            await asyncio.sleep(POLL_RETRY_S)
        if reader is self._reader:
            self._believe(reader, answer, lac)

    def _believe(self, reader: EntryReader, answer: ReadAnswer, lac: EntryId) -> None:
        """A digest vouches for `lac`, or this node's own bookie does."""
        self._lac = max(self._lac, lac)
        self._keep_piggyback(reader, answer)
        self._end_poll(reader)
        for bookie in self._polls.due(self._ports.clock.now()):
            self._nursery.spawn(self._ask_again(reader, bookie, lac), name=f"has {bookie} caught up")

    async def _ask_others(self, reader: EntryReader, heard: dict[BookieId, EntryId]) -> None:
        """A long poll brought nothing: there is nothing, or the bookie is one that gets no adds (docs/protocol.md, T3).
        `heard` is what it knows."""
        others = [bookie for bookie in reader.metadata.fragments[-1].ensemble if bookie not in heard]
        asking = [self._nursery.spawn(self._hear(reader, bookie, heard), name=f"ask {bookie}") for bookie in others]
        with suppress(TimeoutError):
            async with asyncio.timeout(ASK_S):
                for task in asking:
                    await task
        for task in asking:
            task.cancel()
        if reader is not self._reader:
            return
        most = self._polls.compare(heard, self._ports.clock.now())
        if most > self._lac:
            self._lac = most
        else:
            await asyncio.sleep(POLL_RETRY_S)  # a bookie that does not know the ledger yet answers at once
        self._end_poll(reader)

    async def _ask_again(self, reader: EntryReader, bookie: BookieId, known: EntryId) -> None:
        """Whether a bookie that was behind knows by now what another knew a moment ago."""
        await asyncio.sleep(ASK_S)
        heard: dict[BookieId, EntryId] = {}
        await self._hear(reader, bookie, heard)
        if reader is self._reader and heard.get(bookie, NO_ENTRY) >= known:
            self._polls.caught_up(bookie)

    async def _hear(self, reader: EntryReader, bookie: BookieId, heard: dict[BookieId, EntryId]) -> None:
        with suppress(BookieError):
            heard[bookie] = await self._ports.bookies.read_lac(bookie, reader.metadata.ledger, reader.digest)

    def _end_poll(self, reader: EntryReader) -> None:
        if self._polling is reader:
            self._polling = None
            self._tell()

    def _keep_piggyback(self, reader: EntryReader, answer: ReadAnswer) -> None:
        if answer.packet is None or answer.entry != self._next or answer.entry > answer.max_lac:
            return
        try:
            self._piggyback = reader.digest.open(reader.metadata.ledger, answer.entry, answer.packet)
        except Corrupted:
            return  # read again from elsewhere
