"""The interfaces through which the log asks bookies, and partitions use the log."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

from kvstore.errors import BookieError, StoreError
from kvstore.proto.availability import HeldEntries
from kvstore.proto.bookkeeper import Status
from kvstore.proto.digest import EntryDigest
from kvstore.types import BookieId, EntryId, LedgerId, LedgerMetadata, PartitionId, Position, Seq


class ReadAnswer(NamedTuple):
    """A bookie's definite answer to a read. Everything indefinite is a BookieError instead."""

    entry: EntryId
    packet: bytes | None
    """The entry packet as stored, its digest not yet verified; None if the bookie is sure that it has no such entry."""
    max_lac: EntryId
    """The highest last-add-confirmed that this bookie knows; NO_ENTRY if none."""


class BookieClient(Protocol):
    """All bookies by id. The node's own bookie is called directly, the others over one connection each."""

    def add(
        self,
        bookie: BookieId,
        ledger: LedgerId,
        entry: EntryId,
        packet: bytes,
        key: bytes,
        recovery: bool,
        done: Callable[[StoreError | None], None],
    ) -> None:
        """Store an entry packet. `done` gets None once the entry is durable at the bookie, LedgerFenced, or another
        LedgerError if it was not stored."""
        ...

    def add_to_all(
        self,
        bookies: Sequence[BookieId],
        ledger: LedgerId,
        entry: EntryId,
        packet: bytes,
        key: bytes,
        recovery: bool,
        done: Callable[[EntryId, BookieId, StoreError | None], None],
    ) -> None:
        """Store an entry packet at each of the bookies. The node's own comes last, so that frames leave before it
        writes."""
        ...

    def write_lac(self, bookie: BookieId, ledger: LedgerId, key: bytes, body: bytes, lac: EntryId) -> None:
        """Send the last confirmed entry to a bookie; best effort."""
        ...

    async def read(
        self, bookie: BookieId, ledger: LedgerId, entry: EntryId, *, fence_key: bytes | None = None, priority: int = 0
    ) -> ReadAnswer:
        """Read one entry (NO_ENTRY: the last one stored). If `fence_key` is given, fence the ledger first. Raises
        BookieError."""
        ...

    async def read_batch(
        self,
        bookie: BookieId,
        ledger: LedgerId,
        entries: range,
        *,
        bytes_max: int,
        fence_key: bytes | None = None,
        priority: int = 0,
    ) -> Sequence[bytes]:
        """Return packets of some of the entries, in rising order, as stored, digests not yet verified; about
        `bytes_max` bytes at most. The bookie may omit entries that it has stored. Raises BookieError, including
        when the bookie answers no batched reads."""
        ...

    async def read_lac(self, bookie: BookieId, ledger: LedgerId, digest: EntryDigest) -> EntryId:
        """Return the bookie's last-add-confirmed, its digest verified; NO_ENTRY if it knows none. Raises
        BookieError."""
        ...

    def ask_lac(
        self, bookie: BookieId, ledger: LedgerId, digest: EntryDigest, done: Callable[[EntryId | BookieError], None]
    ) -> None:
        """Ask for the last-add-confirmed without a task. `done` is called exactly once, perhaps before this returns."""
        ...

    def long_poll(
        self,
        bookie: BookieId,
        ledger: LedgerId,
        previous_lac: EntryId,
        timeout_ms: int,
        done: Callable[[ReadAnswer | BookieError], None],
    ) -> None:
        """Wait until the LAC passes `previous_lac`, then get the entry after it if this bookie has it. `done` is called
        exactly once, perhaps before this returns."""
        ...

    def listen(self, ledger: LedgerId, listener: EntryListener) -> Callable[[], None] | None:
        """Let the node's own bookie notify `listener` of everything it stores of the ledger from now on. Return a
        function that ends this, or None if there is no bookie here or it does not know the ledger."""
        ...

    async def entries(self, bookie: BookieId, ledger: LedgerId) -> HeldEntries:
        """Return the ids of the ledger's entries that the bookie holds. Raises BookieError."""
        ...

    async def newest_ledger(self, bookie: BookieId) -> LedgerId:
        """Return the highest id of the cluster's own ledgers that the bookie has seen; NO_LEDGER if it has seen none or
        does not know the question. Raises BookieError."""
        ...


class EntryListener(Protocol):
    """Listens to what the node's own bookie stores of one ledger."""

    def entry_stored(self, entry: int, packet: bytes) -> None:
        """Receive the packet of an entry, which may not be confirmed yet."""
        ...

    def lac_raised(self, lac: int) -> None:
        """Receive the last-add-confirmed, learned from a packet with a valid digest."""
        ...


class NewestLedger(Protocol):
    """The cluster's own ledgers of which a bookie has had a record."""

    newest: LedgerId
    """The highest id."""


class LocalBookie(Protocol):
    """The node's own bookie, called without a socket: its storage (kvstore.bookie.storage.BookieStorage), which answers
    as it would on the wire. Each `done` is called exactly once, on the event loop, perhaps before the call returns."""

    @property
    def own_ledgers(self) -> NewestLedger: ...

    def add(
        self, ledger: int, entry: int, body: bytes, key: bytes, *, recovery: bool, done: Callable[[Status], Any]
    ) -> None:
        """Store an entry packet. `done` gets OK once it is on disk."""
        ...

    def write_lac(self, ledger: int, body: bytes, key: bytes, *, done: Callable[[Status], Any]) -> None:
        """Keep an explicit LAC packet."""
        ...

    def read(
        self,
        ledger: int,
        entry: int,
        *,
        key: bytes | None = None,
        fence: bool = False,
        done: Callable[[Status, int, bytes | None, int], Any],
    ) -> None:
        """Read an entry. `done` gets the status, the entry, the packet, and the highest known LAC."""
        ...

    def read_on(
        self, ledger: int, entry: int, body: bytes, limits: tuple[int, int], *, passes_over: bool = False
    ) -> list[bytes]:
        """Return the packet that was read of an entry, and those of the following entries that are here, within
        `limits` (entries, bytes). With `passes_over`, continue after missing entries."""
        ...

    def read_lac(self, ledger: int, *, done: Callable[[Status, bytes | None, bytes | None], Any]) -> None:
        """Read the LAC. `done` gets the status, the last explicit LAC packet, and the last entry packet."""
        ...

    def long_poll(
        self,
        ledger: int,
        previous_lac: int,
        timeout_ms: int,
        *,
        done: Callable[[Status, int, bytes | None, int], Any],
    ) -> object:
        """Read once the LAC has passed `previous_lac`, or at the timeout. `done` is called as by `read`."""
        ...

    def listen(self, ledger: int, listener: EntryListener) -> Callable[[], None] | None:
        """See BookieClient."""
        ...

    def list_entries(self, ledger: int, *, done: Callable[[Status, Sequence[tuple[int, int]]], Any]) -> None:
        """List the entries. `done` gets the status, and the entries as runs (first, count), in rising order."""
        ...

    def space(self) -> tuple[int, int]:
        """Return the bytes of the bookie's disks, and the free bytes."""
        ...


class LogEntry(NamedTuple):
    """An entry of a partition's log, its digest verified."""

    position: Position
    payload: bytes


class AppendDone(Protocol):
    def __call__(self, position: Position | None, sent_at: float, error: StoreError | None) -> None:
        """Called in the order of the appends. `error` is None once the entry can no longer be lost. `sent_at` is the
        boot-time clock when the entry's first byte was first sent; a lease counts from it. After the first error, every
        later append fails too: with OutcomeUnknown if anything may have been stored, with NotEnoughBookies if nothing
        was sent."""
        ...


class ListedLedger(NamedTuple):
    """One ledger of a partition's list (`/partitions/<id>/log`)."""

    id: LedgerId
    first_seq: Seq
    exact: bool
    """False while `first_seq` is only a lower bound."""
    epoch: int
    lease_ms: int


class LeaderLog(Protocol):
    """A partition's log, opened by the leader that may append to it (steps 1 to 4 of the takeover are done)."""

    @property
    def epoch(self) -> int: ...

    @property
    def lost(self) -> StoreError | None:
        """Why this leader can append no more; None if it can. Set before the entries in flight end, whose outcome is
        unknown whatever the reason is."""
        ...

    @property
    def recovered_end(self) -> Position:
        """The last entry before this leader's own ledger. Everything up to it is closed and readable."""
        ...

    @property
    def waited(self) -> bool:
        """False if a release record saved the wait for the former leader's lease, which is over in either case."""
        ...

    def append(self, payload: bytes, first_seq: Seq, done: AppendDone) -> None:
        """Send an entry to its write set. Several entries may be in flight; they are held back during a roll. The
        caller must keep far fewer than 1,000 in flight: beyond that the log is lost."""
        ...

    def close_for_good(self) -> None:
        """Send nothing more, for example because this leader was deposed. Entries in flight end with OutcomeUnknown."""
        ...

    def statistics(self) -> dict[str, Any]:
        """Return counters and gauges for operators."""
        ...

    def known_ledgers(self) -> tuple[Sequence[ListedLedger], LedgerMetadata]:
        """Return the ledgers of the log, first one first, and the metadata of the open one, from memory."""
        ...

    async def seal(self) -> None:
        """Close the ledger, so that the next leader has nothing to recover. The last append must be acknowledged."""
        ...

    async def trim(self, durable_seq: Seq, older_than_ms: int) -> int:
        """Drop closed ledgers whose entries are all at or below `durable_seq` and older than `older_than_ms`, by the
        rules of docs/protocol.md (list first, then pins, then delete). Return their number."""
        ...

    # docs/protocol.md G26
    def report_applied(self, position: Position) -> bool:
        """Handle the report that another replica has applied an entry at `position` and cannot find its ledger in the
        list. If this leader does not know that ledger either, its list is from an older copy: lose the log and return
        True."""
        ...

    def on_lost(self, lost: Callable[[StoreError], None]) -> None:
        """Call `lost` once when this leader can append no more: it was fenced, its list was changed, or there were too
        few bookies for too long."""
        ...


class Taker(Protocol):
    """Takes the next entries of a log as soon as they are confirmed, in the callback that delivers them."""

    def may_take(self) -> bool:
        """Return False if the taker cannot keep up now; the entries then wait."""
        ...

    def take(self, entries: Sequence[LogEntry]) -> None: ...


class LogReader(Protocol):
    """Reads a partition's log in order, without fencing: closed ledgers to their end, the open one up to its LAC."""

    async def read(self, wait_ms: int, taker: Taker | None = None) -> Sequence[LogEntry]:
        """Return the next entries in order (bounded in bytes), waiting up to `wait_ms` (a long poll) if there is none
        yet; empty at the timeout. Raises NoSuchLedger if the position was trimmed, BookieError if too few bookies
        answer now. While it waits, `taker` may get the next entries instead, in batches if they follow each other
        quickly; an error that it raises is raised here."""
        ...

    def give_now(self) -> None:
        """Give the taker the confirmed entries at once that are held back for batching."""
        ...

    def confirm(self, position: Position) -> None:
        """Record that the entry at `position`, and all before it, are acknowledged. Bookies report this to readers only
        a little later."""
        ...

    async def close(self) -> None: ...


class Logs(Protocol):
    """Access to the logs of all partitions on this node."""

    async def open_as_leader(
        self,
        partition: PartitionId,
        lease_ms: int,
        next_seq: Callable[[], Seq],
        applied: Callable[[], Position | None],
        others: Callable[[], Coroutine[Any, Any, Position | None]],
    ) -> LeaderLog:
        """Take over the log: fence and recover the last two ledgers, wait for the end of their leases, create and list
        a new ledger. After recovery, `next_seq` returns the lower bound of the new ledger's first sequence for the
        list. Before, `applied` returns the position of the local state, and `others` the furthest position of the other
        replicas; the log must reach both. Raises NotRecoverable, NotEnoughBookies, MetadataError (MetadataLost if the
        log does not reach them); the caller may try again from the start."""
        ...

    async def prepare(self, partition: PartitionId) -> None:
        """Do ahead what `open_as_leader`, which is about to be called, can use. Raises NotEnoughBookies,
        MetadataError."""
        ...

    def reader(self, partition: PartitionId, after: Position | None) -> LogReader:
        """Read from `after` on, or from the very first ledger."""
        ...

    async def ledgers(self, partition: PartitionId) -> tuple[Sequence[ListedLedger], Seq]:
        """Return the current list, and the sequence below which the log was trimmed."""
        ...
