"""Two versions of a file's bytes: as processes see them (page cache) and as the platter has them, with the writes in
between."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

SECTOR = 512


class Content:
    """Bytes up to the last one written; zeroes from there to `size`."""

    __slots__ = ("data", "size")

    def __init__(self, data: bytes | bytearray = b"", size: int = 0) -> None:
        self.data = bytearray(data)
        self.size = max(size, len(data))

    def read(self, offset: int, size: int) -> bytes:
        end = min(offset + size, self.size)
        found = bytes(self.data[offset:end])
        return found + bytes(max(0, end - offset - len(found)))

    def write(self, offset: int, data: bytes) -> None:
        end = offset + len(data)
        if len(self.data) < offset:
            self.data.extend(bytes(offset - len(self.data)))
        self.data[offset:end] = data
        self.size = max(self.size, end)

    def resize(self, size: int) -> None:
        del self.data[size:]
        self.size = size

    def copy(self) -> Content:
        return Content(self.data, self.size)


@dataclass(frozen=True, slots=True)
class Write:
    offset: int
    data: bytes

    def apply(self, content: Content) -> None:
        content.write(self.offset, self.data)

    def sectors(self) -> range:
        return range(self.offset // SECTOR, -(-(self.offset + len(self.data)) // SECTOR))


@dataclass(frozen=True, slots=True)
class Resize:
    size: int

    def apply(self, content: Content) -> None:
        content.resize(self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """The fate of writes that no sync covers, as probabilities. Writes that are neither kept nor torn are dropped."""

    keep: float
    tear: float
    last_only: bool = False
    """Keep all writes but the last, which is torn."""


KEEP_ALL = Fate(keep=1, tear=0)
DROP_ALL = Fate(keep=0, tear=0)
TEAR_LAST = Fate(keep=1, tear=0, last_only=True)
FATES = (KEEP_ALL, DROP_ALL, TEAR_LAST, Fate(keep=0.5, tear=0), Fate(keep=0.3, tear=0.5), Fate(keep=0, tear=1))


@dataclass(slots=True)
class Inode:
    """One file, independent of its name."""

    number: int
    cache: Content = field(default_factory=Content)
    platter: Content = field(default_factory=Content)
    pending: list[Write | Resize] = field(default_factory=list)
    flushed: int = 0
    """Number of changes that have left `pending` since the file was created."""

    def change(self, change: Write | Resize) -> None:
        change.apply(self.cache)
        self.pending.append(change)

    @property
    def mark(self) -> int:
        """Return a mark of the changes made so far."""
        return self.flushed + len(self.pending)

    def flush(self, mark: int) -> None:
        """Write the changes up to `mark` to the platter."""
        for change in self._leave(mark):
            change.apply(self.platter)

    def lose(self, mark: int, random: Random) -> None:
        """Record a failed sync: the changes up to `mark` count as clean, and an unknown part of them reached the
        platter."""
        settle(self.platter, self._leave(mark), random.choice(FATES), random)

    def power_cut(self, fate: Fate, random: Random) -> None:
        """Decide the fate of the changes that no sync has covered, then start again from the platter."""
        settle(self.platter, self._leave(self.mark), fate, random)
        self.cache = self.platter.copy()

    def copy(self) -> Inode:
        return Inode(self.number, self.cache.copy(), self.platter.copy(), list(self.pending), self.flushed)

    def _leave(self, mark: int) -> list[Write | Resize]:
        count = max(0, mark - self.flushed)
        leaving, self.pending = self.pending[:count], self.pending[count:]
        self.flushed += len(leaving)
        return leaving


def settle(platter: Content, changes: list[Write | Resize], fate: Fate, random: Random) -> None:
    """Let a part of `changes` reach `platter`, sector by sector.

    A sector reaches the platter as the page cache had it at some moment, including all earlier changes to it.
    """
    cache = platter.copy()
    for index, change in enumerate(changes):
        change.apply(cache)
        draw = random.random()
        torn = index == len(changes) - 1 if fate.last_only else fate.keep <= draw < fate.keep + fate.tear
        kept = draw < fate.keep and not torn
        if isinstance(change, Resize):
            if kept or (torn and random.random() < 0.5):
                change.apply(platter)
            continue
        for sector in change.sectors() if kept or torn else ():
            if kept or random.random() < 0.5:
                start = sector * SECTOR
                platter.write(start, cache.read(start, SECTOR))
