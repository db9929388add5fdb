"""A bookie's knowledge of one ledger. State without behaviour beyond its own arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvstore.bookie.index.entry_index import EntryIndex
from kvstore.bookie.index.sealed_entries import SealedEntries
from kvstore.proto.digest import LAC_HEADER
from kvstore.types import LedgerId

UNKNOWN_TOP = 1 << 63
"""Above every entry: before the first add nobody has looked which entries the ledger has."""


class LedgerListener(Protocol):
    """A reader on this node (kvstore.wal.ports.Listener). Its calls raise nothing."""

    def entry_stored(self, entry: int, packet: bytes) -> None: ...
    def lac_raised(self, lac: int) -> None: ...


class Ledger:
    """One ledger on this bookie. All that `index` has is on the disk; what is not yet only counts in `last_group`."""

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
        """The master key of the first contact; whoever shows another is refused."""
        self.index = EntryIndex()
        self.sealed: SealedEntries | None = None
        """What `index` has in full segments."""
        self.is_fenced = False
        """No ordinary add any more. True as soon as the fence is asked for, before it is on the disk."""
        self.is_admitted = False
        """The metadata store has confirmed that the ledger is open and that its ensembles name this bookie."""
        self.is_limbo = False
        """Records may be missing: an entry that is not here is unknown, never absent."""
        self.lac = -1
        """The highest last-add-confirmed known: from the entries' headers and from explicit ones."""
        self.explicit_lac = b""
        """The last explicit LAC packet as it came."""
        self.last_group = 0
        """The last journal group with a record of this ledger; on the disk if the journal has synced that group."""
        self.top = UNKNOWN_TOP
        """The highest entry that was ever accepted for storing: an add of a higher one replaces nothing."""
        self.waiters: dict[Callable[[], None], None] = {}
        """Called once, and forgotten, when `lac` rises or the ledger goes."""
        self.listeners: tuple[LedgerListener, ...] = ()
        """Of this node: told of every packet once it is on the disk, and of `lac`."""
        self.tail_file = 0
        """The segment that is being written, if entries of the ledger are in it; `index` has them in memory."""
        self.superseded: dict[int, int] = {}
        """Older segments, and how many bytes in them are wanted no more because that segment has their entries."""

    def raise_lac(self, lac: int) -> None:
        """Learn of a last add confirmed; wakes whoever waits for it."""
        if lac <= self.lac:
            return
        self.lac = lac
        for each in self.listeners:
            each.lac_raised(lac)
        if self.waiters:
            self.wake()

    def wake(self) -> None:
        """Let everyone who waits look again."""
        waiters, self.waiters = self.waiters, {}
        for waiter in waiters:
            waiter()

    def set_explicit_lac(self, body: bytes) -> None:
        """Keep an explicit LAC packet unless it is older than the one there is."""
        lac = lac_of(body)
        if not self.explicit_lac or lac >= lac_of(self.explicit_lac):
            self.explicit_lac = body
        self.raise_lac(lac)


def lac_of(body: bytes) -> int:
    """The last add confirmed that an explicit LAC packet carries."""
    lac: int = LAC_HEADER.unpack_from(body)[1]
    return lac
