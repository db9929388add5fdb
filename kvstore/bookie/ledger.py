"""A bookie's knowledge of one ledger. Holds state; the only behaviour is arithmetic on that state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvstore.bookie.index.entry_index import EntryIndex
from kvstore.bookie.index.sealed_entries import SealedEntries
from kvstore.proto.digest import LAC_HEADER
from kvstore.types import LedgerId

UNKNOWN_TOP = 1 << 63
"""Value of `top` before the first add, when the highest entry has not been looked up yet. It is greater than every
entry id."""


class LedgerListener(Protocol):
    """A reader on this node that follows a ledger (kvstore.wal.ports.EntryListener). Its methods must not raise."""

    def entry_stored(self, entry: int, packet: bytes) -> None: ...
    def lac_raised(self, lac: int) -> None: ...


class Ledger:
    """The state of one ledger on this bookie. Everything in `index` is on disk. Records that are not on disk yet only
    advance `last_group`."""

    __slots__ = (
        "explicit_lac",
        "id",
        "index",
        "is_admitted",
        "is_fenced",
        "is_limbo",
        "key",
        "lac",
        "last_group",
        "listeners",
        "sealed",
        "superseded",
        "tail_file",
        "top",
        "waiters",
    )

    def __init__(self, ledger: LedgerId, key: bytes) -> None:
        self.id = ledger
        self.key = key
        """Master key of the ledger, recorded at first contact. The bookie refuses senders with another key."""
        self.index = EntryIndex()
        self.sealed: SealedEntries | None = None
        """The entries in full segments, as part of `index`; None if there are none."""
        self.is_fenced = False
        """True if the bookie refuses ordinary adds. Set when a fence is requested, before the fence is on disk."""
        self.is_admitted = False
        """True if the metadata store has confirmed that the ledger is open and that its ensembles name this bookie."""
        self.is_limbo = False
        """True if records of this ledger may be missing. An entry that is not stored here is then unknown, never
        absent."""
        self.lac = -1
        """The highest known last-add-confirmed, from entry packets and explicit LAC packets; -1 if none is known."""
        self.explicit_lac = b""
        """The last explicit LAC packet as it was received."""
        self.last_group = 0
        """The last journal group with a record of this ledger. The records are on disk if the journal has synced that
        group."""
        self.top = UNKNOWN_TOP
        """The highest entry that was ever accepted for storing. An add of a higher one replaces nothing."""
        self.waiters: dict[Callable[[], None], None] = {}
        """Callbacks that are called once and removed when `lac` rises or the ledger is dropped."""
        self.listeners: tuple[LedgerListener, ...] = ()
        """Readers on this node. They are notified of every packet once it is on disk, and whenever `lac` rises."""
        self.tail_file = 0
        """Number of the segment being written if it has entries of this ledger. `index` keeps those entries in
        memory."""
        self.superseded: dict[int, int] = {}
        """Bytes in each older segment that are no longer needed, because the current segment, or one that was removed
        since, has newer copies of the entries."""

    def raise_lac(self, lac: int) -> None:
        """Raise the last-add-confirmed to `lac`, and notify listeners and waiters. Does nothing if `lac` is not
        higher."""
        if lac <= self.lac:
            return
        self.lac = lac
        for each in self.listeners:
            each.lac_raised(lac)
        if self.waiters:
            self.wake()

    def wake(self) -> None:
        """Call every waiter once, so that it checks the ledger's state again."""
        waiters, self.waiters = self.waiters, {}
        for waiter in waiters:
            waiter()

    def set_explicit_lac(self, body: bytes) -> None:
        """Keep an explicit LAC packet unless it is older than the current one, and raise the LAC."""
        lac = lac_of(body)
        if not self.explicit_lac or lac >= lac_of(self.explicit_lac):
            self.explicit_lac = body
        self.raise_lac(lac)


def lac_of(body: bytes) -> int:
    """Return the last-add-confirmed in an explicit LAC packet."""
    lac: int = LAC_HEADER.unpack_from(body)[1]
    return lac
