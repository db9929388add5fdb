"""A bookie's knowledge of one ledger. State without behaviour except its own arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvstore.bookie.index.entry_index import EntryIndex
from kvstore.bookie.index.sealed_entries import SealedEntries
from kvstore.proto.digest import LAC_HEADER
from kvstore.types import LedgerId

UNKNOWN_TOP = 1 << 63
"""A value above every entry: before the first add, nobody has looked which entries the ledger has."""


class LedgerListener(Protocol):
    """A reader on this node (kvstore.wal.ports.EntryListener). Its methods must not raise."""

    def entry_stored(self, entry: int, packet: bytes) -> None: ...
    def lac_raised(self, lac: int) -> None: ...


class Ledger:
    """One ledger on this bookie. Everything in `index` is on disk; what is not on disk yet shows only in
    `last_group`."""

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
        """The master key of the first contact. Senders with another key are refused."""
        self.index = EntryIndex()
        self.sealed: SealedEntries | None = None
        """The part of `index` that is in full segments."""
        self.is_fenced = False
        """True if ordinary adds are refused. Set when the fence is requested, before it is on disk."""
        self.is_admitted = False
        """True if the metadata store has confirmed that the ledger is open and that its ensembles name this bookie."""
        self.is_limbo = False
        """True if records may be missing: an entry that is not here is unknown, never absent."""
        self.lac = -1
        """The highest known last-add-confirmed, from the headers of entries and from explicit ones."""
        self.explicit_lac = b""
        """The last explicit LAC packet as it was received."""
        self.last_group = 0
        """The last journal group with a record of this ledger. The records are on disk if the journal has synced that
        group."""
        self.top = UNKNOWN_TOP
        """The highest entry that was ever accepted for storing. An add of a higher one replaces nothing."""
        self.waiters: dict[Callable[[], None], None] = {}
        """Called once, and removed, when `lac` rises or the ledger is dropped."""
        self.listeners: tuple[LedgerListener, ...] = ()
        """Readers on this node, which are notified of every packet once it is on disk, and of `lac`."""
        self.tail_file = 0
        """The segment that is being written, if it has entries of the ledger; `index` has them in memory."""
        self.superseded: dict[int, int] = {}
        """Older segments, with the number of bytes that are no longer needed because the current segment has their
        entries."""

    def raise_lac(self, lac: int) -> None:
        """Record a last-add-confirmed, and wake those who wait for it."""
        if lac <= self.lac:
            return
        self.lac = lac
        for each in self.listeners:
            each.lac_raised(lac)
        if self.waiters:
            self.wake()

    def wake(self) -> None:
        """Let every waiter check again."""
        waiters, self.waiters = self.waiters, {}
        for waiter in waiters:
            waiter()

    def set_explicit_lac(self, body: bytes) -> None:
        """Keep an explicit LAC packet unless it is older than the current one."""
        lac = lac_of(body)
        if not self.explicit_lac or lac >= lac_of(self.explicit_lac):
            self.explicit_lac = body
        self.raise_lac(lac)


def lac_of(body: bytes) -> int:
    """Return the last-add-confirmed of an explicit LAC packet."""
    lac: int = LAC_HEADER.unpack_from(body)[1]
    return lac
