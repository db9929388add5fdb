"""The interfaces between a log, its reader, and the bookies that store it, and the values that pass between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from kvstore.errors import BookieError, StoreError
from kvstore.proto.availability import HeldEntries
from kvstore.proto.bookkeeper import Status
from kvstore.proto.digest import EntryDigest
from kvstore.types import BookieId, EntryId, LedgerId, Position, Seq


class ReadAnswer(NamedTuple):
    """A bookie's definite answer to a read. An indefinite answer is raised as BookieError instead."""

    entry: EntryId
    packet: bytes | None
    """The packet as stored, whose digest is not verified yet. None if the bookie is sure that it does not have the
    entry."""
    max_lac: EntryId
    """The highest last-add-confirmed that this bookie knows, or NO_ENTRY if it knows none."""


class BookieClient(Protocol):
    """A client of all bookies, addressed by id. It calls the node's own bookie directly, and uses one connection to
    each other bookie."""

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
        """Store an entry packet at `bookie`. `done` is called with None once the entry is durable there, with
        LedgerFenced if another writer has taken over the ledger, or with another LedgerError if the entry was not
        stored. `key` is the ledger's master key; `recovery` adds are accepted on a fenced ledger."""
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
        """Store an entry packet at each of the bookies. `done` is called once for each bookie, with the same errors as
        in `add`. The node's own bookie is called last, so that the requests to other bookies are sent before the local
        write."""
        ...

    def write_lac(self, bookie: BookieId, ledger: LedgerId, key: bytes, body: bytes, lac: EntryId) -> None:
        """Send an explicit LAC packet with the last confirmed entry to a bookie. Best effort: errors are not
        reported."""
        ...

    async def read(
        self, bookie: BookieId, ledger: LedgerId, entry: EntryId, *, fence_key: bytes | None = None, priority: int = 0
    ) -> ReadAnswer:
        """Read one entry; NO_ENTRY reads the last one stored. If `fence_key` is given, the bookie fences the ledger
        first. Raises BookieError if the bookie gives no definite answer."""
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
        """Return packets of some of `entries` as stored, in ascending order, about `bytes_max` bytes at most. The
        digests are not verified yet. A missing packet proves nothing, because the bookie may omit entries that it has.
        Raises BookieError, including when the bookie does not support batched reads."""
        ...

    async def read_lac(self, bookie: BookieId, ledger: LedgerId, digest: EntryDigest) -> EntryId:
        """Return the bookie's last-add-confirmed after verifying its digest, or NO_ENTRY if the bookie knows none.
        Raises BookieError."""
        ...

    def ask_lac(
        self, bookie: BookieId, ledger: LedgerId, digest: EntryDigest, done: Callable[[EntryId | BookieError], None]
    ) -> None:
        """Request the last-add-confirmed as `read_lac` does, without the cost of a task. `done` is called exactly once,
        possibly before this method returns."""
        ...

    def long_poll(
        self,
        bookie: BookieId,
        ledger: LedgerId,
        previous_lac: EntryId,
        timeout_ms: int,
        done: Callable[[ReadAnswer | BookieError], None],
    ) -> None:
        """Wait until the bookie's LAC passes `previous_lac`, then return the entry after `previous_lac` if the bookie
        has it. The bookie answers after `timeout_ms` milliseconds at the latest. `done` is called exactly once,
        possibly before this method returns."""
        ...

    def listen(self, ledger: LedgerId, listener: EntryListener) -> Callable[[], None] | None:
        """Notify `listener` of everything that the node's own bookie stores of the ledger from now on. Returns a
        function that removes the listener, or None if this node runs no bookie or its bookie does not know the
        ledger."""
        ...

    async def entries(self, bookie: BookieId, ledger: LedgerId) -> HeldEntries:
        """Return the ids of the ledger's entries that the bookie holds. Raises BookieError."""
        ...

    async def newest_ledger(self, bookie: BookieId) -> LedgerId:
        """Return the highest id of the cluster's own ledgers that the bookie has seen. Returns NO_LEDGER if the bookie
        has seen none or does not support the request. Raises BookieError."""
        ...


class EntryListener(Protocol):
    """A listener for the entries of one ledger that the node's own bookie stores."""

    def entry_stored(self, entry: int, packet: bytes) -> None:
        """Receive the packet of an entry that is on this bookie's disk. The entry may not be confirmed yet."""
        ...

    def lac_raised(self, lac: int) -> None:
        """Receive a higher last-add-confirmed, taken from a packet with a valid digest."""
        ...


class NewestLedger(Protocol):
    """A bookie's record of the newest ledger that the cluster created."""

    newest: LedgerId
    """Highest id of the cluster's own ledgers that the bookie has had a record of."""


class LocalBookie(Protocol):
    """The node's own bookie, called without a socket. The implementation is its storage
    (kvstore.bookie.storage.BookieStorage), which answers as it would over the network. Each `done` is called exactly
    once on the event loop, possibly before the call returns."""

    @property
    def own_ledgers(self) -> NewestLedger: ...

    def add(
        self, ledger: int, entry: int, body: bytes, key: bytes, *, recovery: bool, done: Callable[[Status], Any]
    ) -> None:
        """Store an entry packet. `done` gets OK once the packet is on disk, otherwise the reason of the refusal."""
        ...

    def write_lac(self, ledger: int, body: bytes, key: bytes, *, done: Callable[[Status], Any]) -> None:
        """Keep an explicit LAC packet, and show it to readers."""
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
        """Read an entry. `done` gets the status, the entry id, the packet or None, and the highest LAC that the bookie
        knows. With `fence`, the ledger is fenced durably before the answer."""
        ...

    def read_on(
        self, ledger: int, entry: int, body: bytes, limits: tuple[int, int], *, passes_over: bool = False
    ) -> list[bytes]:
        """Return `body`, the packet already read for `entry`, and the packets of the entries after it. `limits` are the
        maximum number of entries and of bytes. A missing entry ends the batch unless `passes_over` is True."""
        ...

    def read_lac(self, ledger: int, *, done: Callable[[Status, bytes | None, bytes | None], Any]) -> None:
        """Read the LAC. `done` gets the status, the last explicit LAC packet, and the last entry packet; either packet
        may be None."""
        ...

    def long_poll(
        self,
        ledger: int,
        previous_lac: int,
        timeout_ms: int,
        *,
        done: Callable[[Status, int, bytes | None, int], Any],
    ) -> object:
        """Answer once the LAC has passed `previous_lac`, or after `timeout_ms` milliseconds. `done` gets the same
        arguments as in `read`."""
        ...

    def listen(self, ledger: int, listener: EntryListener) -> Callable[[], None] | None:
        """Notify `listener` of everything stored of the ledger; see BookieClient.listen."""
        ...

    def list_entries(self, ledger: int, *, done: Callable[[Status, Sequence[tuple[int, int]]], Any]) -> None:
        """List the ledger's entries. `done` gets the status, and the entries as (first, count) runs in ascending
        order."""
        ...

    def space(self) -> tuple[int, int]:
        """Return the total and the free bytes of the bookie's disks."""
        ...


class LogEntry(NamedTuple):
    """An entry of a partition's log. Its digest has been verified."""

    position: Position
    payload: bytes


class AppendDone(Protocol):
    """The callback of an append."""

    def __call__(self, position: Position | None, sent_at: float, error: StoreError | None) -> None:
        """Receive the outcome of an append; calls come in the order of the appends. `error` is None once the entry can
        no longer be lost. `sent_at` is the boot-time clock in seconds when the entry's first byte was first sent; a
        lease counts from it. After the first error, every later append fails too. The error is NotEnoughBookies if
        nothing was sent, and OutcomeUnknown if anything may have been stored."""
        ...


class ListedLedger(NamedTuple):
    """One ledger in a partition's ledger list (`/partitions/<id>/log`)."""

    id: LedgerId
    first_seq: Seq
    exact: bool
    """True if `first_seq` is exact, False while it is only a lower bound."""
    epoch: int
    lease_ms: int


class Taker(Protocol):
    """A consumer that receives the next entries of a log as soon as they are confirmed, within the callback that
    delivers them."""

    def may_take(self) -> bool:
        """Return True if the consumer can accept entries now. If it returns False, the entries wait."""
        ...

    def take(self, entries: Sequence[LogEntry]) -> None: ...
