"""The interfaces through which the log asks bookies, and partitions ask the log."""

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
    """The entry packet as stored, digest not yet verified; None if the bookie is sure that it has no such entry."""
    max_lac: EntryId
    """The highest last-add-confirmed that this bookie knows of; NO_ENTRY if none."""


class BookieClient(Protocol):
    """Bookies by id. The node's own bookie is reached by a plain call, the others over one connection each."""

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
        """Store an entry packet. `done(None)` once it is durable there; LedgerFenced; another LedgerError when it is
        not."""
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
        """The same at each of the bookies; the node's own comes last, so that frames leave before it writes."""
        ...

    def write_lac(self, bookie: BookieId, ledger: LedgerId, key: bytes, body: bytes, lac: EntryId) -> None:
        """Tell a bookie the last confirmed entry; best effort."""
        ...

    async def read(
        self, bookie: BookieId, ledger: LedgerId, entry: EntryId, *, fence_key: bytes | None = None, priority: int = 0
    ) -> ReadAnswer:
        """Read one entry (NO_ENTRY: the last one stored), fencing the ledger first if `fence_key` is given. Raises
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
        """Packets of some of the entries, rising, as stored, digests not yet verified: about `bytes_max` at the most.
        Nothing is said of an entry that is not among them. Raises BookieError, also if the bookie gives no
        batches."""
        ...

    async def read_lac(self, bookie: BookieId, ledger: LedgerId, digest: EntryDigest) -> EntryId:
        """The bookie's last add confirmed, its digest verified; NO_ENTRY if it knows none. Raises BookieError."""
        ...

    def ask_lac(
        self, bookie: BookieId, ledger: LedgerId, digest: EntryDigest, done: Callable[[EntryId | BookieError], None]
    ) -> None:
        """The same without a task; `done` is called once, perhaps before this returns."""
        ...

    def long_poll(
        self,
        bookie: BookieId,
        ledger: LedgerId,
        previous_lac: EntryId,
        timeout_ms: int,
        done: Callable[[ReadAnswer | BookieError], None],
    ) -> None:
        """Wait until the LAC passes `previous_lac`, then the entry after it if this bookie has it. `done` is called
        once, perhaps before this returns."""
        ...

    def listen(self, ledger: LedgerId, listener: EntryListener) -> Callable[[], None] | None:
        """Have the node's own bookie tell what it stores of the ledger from now on; what is returned ends it. None if
        there is no bookie here, or it does not know the ledger."""
        ...

    async def entries(self, bookie: BookieId, ledger: LedgerId) -> HeldEntries:
        """The ids of the ledger's entries that the bookie holds. Raises BookieError."""
        ...

    async def newest_ledger(self, bookie: BookieId) -> LedgerId:
        """The highest id of the cluster's own ledgers that the bookie has seen; NO_LEDGER if it has seen none or does
        not know the question. Raises BookieError."""
        ...


class EntryListener(Protocol):
    """Hears of one ledger what the node's own bookie has on its disk."""

    def entry_stored(self, entry: int, packet: bytes) -> None:
        """The packet of an entry, which may not be confirmed yet."""
        ...

    def lac_raised(self, lac: int) -> None:
        """The last add confirmed, learned from a packet whose digest was right."""
        ...


class NewestLedger(Protocol):
    """The cluster's own ledgers of which a bookie has had a record."""

    newest: LedgerId
    """The highest id."""


class LocalBookie(Protocol):
    """The node's own bookie, reached without a socket: its storage (kvstore.bookie.storage.BookieStorage), which
    answers as it would on the wire. Each `done` is called once, on the event loop, perhaps before the call returns."""

    @property
    def own_ledgers(self) -> NewestLedger: ...

    def add(
        self, ledger: int, entry: int, body: bytes, key: bytes, *, recovery: bool, done: Callable[[Status], Any]
    ) -> None:
        """Store an entry packet; OK once it is on the disk."""
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
        """Status, entry, packet, highest LAC known."""
        ...

    def read_on(
        self, ledger: int, entry: int, body: bytes, limits: tuple[int, int], *, passes_over: bool = False
    ) -> list[bytes]:
        """The packet read of an entry, and those that follow it here, within `limits` in entries and bytes;
        `passes_over`: also behind those that are not here."""
        ...

    def read_lac(self, ledger: int, *, done: Callable[[Status, bytes | None, bytes | None], Any]) -> None:
        """Status, the last explicit LAC packet, the last entry packet."""
        ...

    def long_poll(
        self,
        ledger: int,
        previous_lac: int,
        timeout_ms: int,
        *,
        done: Callable[[Status, int, bytes | None, int], Any],
    ) -> object:
        """As `read`, once the LAC has passed `previous_lac` or at the timeout."""
        ...

    def listen(self, ledger: int, listener: EntryListener) -> Callable[[], None] | None:
        """See BookieClient."""
        ...

    def list_entries(self, ledger: int, *, done: Callable[[Status, Sequence[tuple[int, int]]], Any]) -> None:
        """Status, and the entries held as runs (first, count), rising."""
        ...

    def space(self) -> tuple[int, int]:
        """Bytes of its disks, and bytes that are free."""
        ...


class LogEntry(NamedTuple):
    """An entry of a partition's log, digest verified."""

    position: Position
    payload: bytes


class AppendDone(Protocol):
    def __call__(self, position: Position | None, sent_at: float, error: StoreError | None) -> None:
        """In order of the appends. `error` is None once the entry can no longer be lost; `sent_at` is the boot-time
        clock when its first byte was first sent (a lease counts from it). After the first error every later append
        fails too: OutcomeUnknown if anything may have been stored, NotEnoughBookies if nothing was sent."""
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
    """A partition's log, opened by the one who may append to it (steps 1 to 4 of the takeover are done)."""

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
        """False if a release record saved the wait for the former leader's lease (it is over in either case)."""
        ...

    def append(self, payload: bytes, first_seq: Seq, done: AppendDone) -> None:
        """Send an entry to the write set; entries may be in flight together. Held back during a roll. The caller keeps
        far fewer than 1,000 in flight: beyond that the log is lost."""
        ...

    def close_for_good(self) -> None:
        """Send nothing more, for example because this leader lost its place. Entries in flight end as
        OutcomeUnknown."""
        ...

    def statistics(self) -> dict[str, Any]:
        """Numbers for operators."""
        ...

    def known_ledgers(self) -> tuple[Sequence[ListedLedger], LedgerMetadata]:
        """The ledgers of the log, the first one first, and the metadata of the open one, from memory."""
        ...

    async def seal(self) -> None:
        """After the last append is acknowledged: close the ledger, so that the next leader has nothing to recover."""
        ...

    async def trim(self, durable_seq: Seq, older_than_ms: int) -> int:
        """Drop whole closed ledgers whose entries are all at or below `durable_seq` and older than `older_than_ms`, by
        the rules of docs/protocol.md (list first, then pins, then delete). Returns how many."""
        ...

    # docs/protocol.md G26
    def report_applied(self, position: Position) -> bool:
        """Another replica has applied an entry at `position`, and cannot find its ledger in the list. Return True, and
        lose the log, if this leader does not know that ledger either: its list is from an older copy."""
        ...

    def on_lost(self, lost: Callable[[StoreError], None]) -> None:
        """Call `lost` once when this leader can append no more: fenced, list changed, or too few bookies for too
        long."""
        ...


class Taker(Protocol):
    """Takes the next entries of a log as soon as they are confirmed, in the callback that has brought them."""

    def may_take(self) -> bool:
        """False: it does not keep up just now, and they have to wait."""
        ...

    def take(self, entries: Sequence[LogEntry]) -> None: ...


class LogReader(Protocol):
    """Reads a partition's log in order without fencing: closed ledgers to their end, the open one up to its LAC."""

    async def read(self, wait_ms: int, taker: Taker | None = None) -> Sequence[LogEntry]:
        """The next entries in order (bounded in bytes), waiting up to `wait_ms` (a long poll) if there is none yet;
        empty at timeout. Raises NoSuchLedger when the position was trimmed, BookieError when too few bookies answer
        just now. While it waits, `taker` may be given the next entries instead, several together where they follow each
        other fast; what it raises is raised here."""
        ...

    def give_now(self) -> None:
        """Give the taker at once what is confirmed and at hand, and is kept for a moment so that more comes along."""
        ...

    def confirm(self, position: Position) -> None:
        """The entry at `position` is known to be acknowledged, and so is all before it: readers hear of that from the
        bookies only a little later."""
        ...

    async def close(self) -> None: ...


class Logs(Protocol):
    """The door to all partitions' logs on this node."""

    async def open_as_leader(
        self,
        partition: PartitionId,
        lease_ms: int,
        next_seq: Callable[[], Seq],
        applied: Callable[[], Position | None],
        others: Callable[[], Coroutine[Any, Any, Position | None]],
    ) -> LeaderLog:
        """Take the log over: fence and recover the last two ledgers, wait out their leases, create and list a ledger of
        one's own. `next_seq` is asked after recovery, when the list entry is written: the lower bound of the first
        sequence; `applied` before, for the position of the state here, and `others` for the furthest one of the other
        replicas: the log must reach both. Raises NotRecoverable, NotEnoughBookies, MetadataError (MetadataLost if it
        does not); the caller may try again from the start."""
        ...

    async def prepare(self, partition: PartitionId) -> None:
        """Do ahead what `open_as_leader` can find done: it is about to be called. Raises NotEnoughBookies,
        MetadataError."""
        ...

    def reader(self, partition: PartitionId, after: Position | None) -> LogReader:
        """Read on after `after`, or from the very first ledger."""
        ...

    async def ledgers(self, partition: PartitionId) -> tuple[Sequence[ListedLedger], Seq]:
        """The present list, and the sequence below which the log was trimmed."""
        ...
