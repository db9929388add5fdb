"""Follows the end of one ledger that may still grow, with one long poll at a time and with the entries that the answers
carry. A bookie's LAC is a hint until a digest confirms it (docs/protocol.md T10). A bookie that receives no adds is
detected by asking the other bookies (T3)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from kvstore.env.ports import Nursery
from kvstore.errors import BookieError, Corrupted
from kvstore.proto.digest import Packet
from kvstore.types import NO_ENTRY, BookieId, EntryId, LedgerState
from kvstore.wal.entry_reader import EntryReader
from kvstore.wal.handle import LedgerPorts
from kvstore.wal.ports import ReadAnswer
from kvstore.wal.tailing.fresh import FreshEntries
from kvstore.wal.tailing.polling import PollChoice

log = logging.getLogger(__name__)

POLL_MS = 2_000
"""Duration of one long poll in milliseconds. If it returns nothing new, the other bookies are asked whether this bookie
is behind."""
POLL_RETRY_S = 0.02
ASK_S = 0.1
"""Seconds to wait for the answers of the other bookies after a long poll has returned nothing new."""


class LedgerEnd:
    """The known last-add-confirmed of one ledger, and the entry after it if the last answer carried that entry.
    `notify` is called when there may be something new."""

    def __init__(
        self, reader: EntryReader, first: EntryId, *, ports: LedgerPorts, nursery: Nursery, notify: Callable[[], None]
    ) -> None:
        """Start with all entries before `first` confirmed."""
        self.lac = EntryId(first - 1)
        self._reader, self._ports, self._nursery, self._notify = reader, ports, nursery, notify
        self._loop = asyncio.get_running_loop()
        self._choice = PollChoice()
        self._wanted = first
        self.piggyback: Packet | None = None
        """The packet that the last long poll carried."""
        self.fresh = FreshEntries(reader.metadata.digest, first)
        """Entries that the node's own bookie has reported."""
        self.entry_stored = self.fresh.keep
        """Called with each packet that the node's own bookie has on disk."""
        self._end_listening: Callable[[], None] | None = None
        self._notified_at = 0.0
        """When the node's own bookie last reported something new, on the event loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_polling = False
        self._waits_at: BookieId | None = None
        """The bookie whose answer is awaited, while no other answer is."""
        self._polls = 0
        self._is_over = False

    # docs/protocol.md L10
    @property
    def limit(self) -> EntryId:
        """The last entry that the reader may return."""
        metadata = self._reader.metadata
        return metadata.last_entry if metadata.state is LedgerState.CLOSED else self.lac

    def confirm(self, entry: EntryId) -> bool:
        """Record that the writer has reported `entry` as confirmed. Return True if that was not known before."""
        if entry <= self.lac:
            return False
        self.lac = entry
        return True

    def take(self, entry: EntryId) -> Packet | None:
        """Return the packet that a long poll carried if it is the packet of `entry`, otherwise None. The packet is
        dropped in either case."""
        packet, self.piggyback = self.piggyback, None
        return packet if packet is not None and packet.entry == entry else None

    def take_last(self, entry: EntryId) -> Packet | None:
        """Return the packet that a long poll carried if it is the packet of `entry` and `entry` is the last that the
        reader may return. Otherwise keep the packet and return None."""
        packet = self.piggyback
        if packet is None or packet.entry != entry or self.limit != entry:
            return None
        self.piggyback = None
        return packet

    def stop(self) -> None:
        """Stop following the ledger."""
        self._is_over = True
        if self._end_listening is not None:
            self._end_listening()
        if self._timer is not None:
            self._timer.cancel()

    def lac_raised(self, lac: int) -> None:
        """Record the last-add-confirmed that the node's own bookie reports. Its number is trusted (docs/protocol.md,
        T10)."""
        if lac > self.lac:
            self.lac = EntryId(lac)
            self._notified_at = self._loop.time()
            self._notify()

    # docs/protocol.md T5
    def ensemble_changed(self) -> None:
        """Stop waiting for a bookie that has left the ensemble and therefore receives no adds."""
        waits_at = self._waits_at
        if waits_at is not None and waits_at not in self._reader.metadata.fragments[-1].ensemble:
            self._waits_at = None
            self._polls += 1  # the answer to the current poll is ignored
            if self._timer is not None:
                self._timer.cancel()
            self._end_poll()

    def poll(self, wanted: EntryId) -> None:
        """Keep one long poll in progress, or listen to the node's own bookie, while the ledger is not closed. `wanted`
        is the entry to read next."""
        reader = self._reader
        self._wanted = wanted
        self.fresh.forget_before(wanted)
        if reader.metadata.state is LedgerState.CLOSED or self._is_polling or self._is_over:
            return
        self._is_polling = True
        lac = self.lac
        near = reader.order(EntryId(lac + 1))
        others = [bookie for bookie in reader.metadata.fragments[-1].ensemble if bookie not in near]
        asked = self._waits_at = self._choice.first((*near, *others))
        if asked == self._ports.choice.own and self._listens():
            self._watch(asked)
        else:
            self._long_poll(asked, lac)

    def _listens(self) -> bool:
        if self._end_listening is None:
            self._end_listening = self._ports.bookies.listen(self._reader.metadata.ledger, self)
        return self._end_listening is not None

    def _watch(self, own: BookieId) -> None:
        """If the node's own bookie reports nothing new for as long as a long poll takes, ask the other bookies."""
        for bookie in self._choice.due(self._ports.clock.now()):
            self._nursery.spawn(self._ask_again(bookie, self.lac), name=f"has {bookie} caught up")
        self._check_at(own, self._loop.time() + POLL_MS / 1000)

    def _check_at(self, own: BookieId, when: float) -> None:
        def check() -> None:
            due = self._notified_at + POLL_MS / 1000
            if due > when:
                self._check_at(own, due)
            else:
                self._waits_at = None
                self._ask_others({own: self.lac})

        self._timer = self._loop.call_at(when, check)

    def _long_poll(self, asked: BookieId, lac: EntryId) -> None:
        self._polls += 1
        done = partial(self._polled, self._polls, lac, asked)
        self._ports.bookies.long_poll(asked, self._reader.metadata.ledger, lac, POLL_MS, done)

    def _polled(self, number: int, lac: EntryId, asked: BookieId, answer: ReadAnswer | BookieError) -> None:
        if self._is_over or number != self._polls:
            return
        self._waits_at = None
        if isinstance(answer, BookieError):
            log.debug("long poll failed ledger=%d error=%s", self._reader.metadata.ledger, answer)
            self._choice.failed(asked, self._ports.clock.now())
            self._loop.call_later(POLL_RETRY_S, self._end_poll)
        elif answer.max_lac <= lac:
            self._ask_others({asked: answer.max_lac})
        # it has verified the packet that it learned this from (docs/protocol.md, B21)
        elif asked == self._ports.choice.own:
            self._believe(answer, answer.max_lac)
        else:
            self._nursery.spawn(self._verify(asked, answer), name="verify a last-add-confirmed")

    async def _verify(self, asked: BookieId, answer: ReadAnswer) -> None:
        """Read a packet that confirms the LAC of an answer. The packet has a digest, and the LAC in the answer has none
        (docs/protocol.md, T10)."""
        lacs: dict[BookieId, EntryId] = {}
        await self._read_lac(asked, lacs)
        lac = lacs.get(asked, NO_ENTRY)
        if lac < answer.max_lac:
            ledger = self._reader.metadata.ledger
            log.info(
                "bookie claims a higher LAC than it can show ledger=%d bookie=%s claimed=%d shown=%d",
                ledger,
                asked,
                answer.max_lac,
                lac,
            )
            self._choice.failed(asked, self._ports.clock.now())
            await asyncio.sleep(POLL_RETRY_S)
        if not self._is_over:
            self._believe(answer, lac)

    def _believe(self, answer: ReadAnswer, lac: EntryId) -> None:
        """Accept a `lac` that a digest or this node's own bookie confirms."""
        self.lac = max(self.lac, lac)
        self._keep_piggyback(answer)
        self._end_poll()
        for bookie in self._choice.due(self._ports.clock.now()):
            self._nursery.spawn(self._ask_again(bookie, lac), name=f"has {bookie} caught up")

    def _ask_others(self, lacs: dict[BookieId, EntryId]) -> None:
        """Ask the other bookies because a long poll returned nothing new. Either there is nothing new, or the polled
        bookie receives no adds (docs/protocol.md, T3). `lacs` has the last-add-confirmed of the polled bookie."""
        metadata = self._reader.metadata
        waiting = {bookie for bookie in metadata.fragments[-1].ensemble if bookie not in lacs}
        late = self._loop.call_later(ASK_S, self._compare, lacs, waiting)

        def on_lac(bookie: BookieId, lac: EntryId | BookieError) -> None:
            if bookie in waiting:
                waiting.discard(bookie)
                if not isinstance(lac, BookieError):
                    lacs[bookie] = lac
                if not waiting:
                    late.cancel()
                    self._compare(lacs, waiting)

        for bookie in sorted(waiting):
            self._ports.bookies.ask_lac(bookie, metadata.ledger, self._reader.digest, partial(on_lac, bookie))

    def _compare(self, lacs: dict[BookieId, EntryId], waiting: set[BookieId]) -> None:
        """Compare the answers once all have arrived or the bookies in `waiting` are late. Later answers are ignored."""
        waiting.clear()
        if self._is_over:
            return
        most = self._choice.compare(lacs, self._ports.clock.now())
        if self.confirm(most):
            self._end_poll()
        else:  # a bookie that does not know the ledger yet answers at once
            self._loop.call_later(POLL_RETRY_S, self._end_poll)

    async def _ask_again(self, bookie: BookieId, known: EntryId) -> None:
        """Ask a bookie that was behind whether it now knows the LAC that another bookie knew a moment ago."""
        await asyncio.sleep(ASK_S)
        lacs: dict[BookieId, EntryId] = {}
        await self._read_lac(bookie, lacs)
        if not self._is_over and lacs.get(bookie, NO_ENTRY) >= known:
            self._choice.caught_up(bookie)

    async def _read_lac(self, bookie: BookieId, lacs: dict[BookieId, EntryId]) -> None:
        with suppress(BookieError):
            lacs[bookie] = await self._ports.bookies.read_lac(bookie, self._reader.metadata.ledger, self._reader.digest)

    def _end_poll(self) -> None:
        if not self._is_over:
            self._is_polling = False
            self._notify()

    def _keep_piggyback(self, answer: ReadAnswer) -> None:
        if answer.packet is None or answer.entry != self._wanted or answer.entry > answer.max_lac:
            return
        reader = self._reader
        try:
            self.piggyback = reader.digest.open(reader.metadata.ledger, answer.entry, answer.packet)
        except Corrupted:
            return  # the entry is read again from elsewhere
