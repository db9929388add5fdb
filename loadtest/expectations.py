"""What a process may expect of the keys it reads, from what it has written and seen itself. Decides only.

Two rules, both for linearizable reads. *Versions*: the store's version of a key rises with each write, so a read never
gives an older one than was acknowledged or read before it began. *Numbers*: some doors do not tell versions. There, if
a write was acknowledged before the read began, the read does not give a value of ours whose own write had ended before
that one began. A write of unknown outcome never ends, so it forbids nothing.

And of scans, since no workload deletes: what was there before a scan began is in it, if its place is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from itertools import islice
from typing import NamedTuple

from sortedcontainers import SortedSet

from loadtest.values import NOBODY, Stamp, WrongValue, decode

WON_MAX = 1_024
"""Generations remembered of one key."""


class Floor(NamedTuple):
    """The oldest that a read which begins now may give."""

    version: int
    number: int


class Write(NamedTuple):
    """A write under way."""

    key: bytes
    number: int
    ended_below: int
    """Our writes of this key with a smaller number had ended when it began."""


class Expectations:
    """One process's, whose values carry `writer`. `is_fresh`: False if reads may be stale by choice."""

    NO_FLOOR = Floor(0, 0)
    """For pages of a scan: they are of no single moment."""

    def __init__(self, writer: int, *, is_fresh: bool = True) -> None:
        self.writer = writer
        self._is_fresh = is_fresh
        self._number = 0
        self._versions: dict[bytes, int] = {}
        self._numbers: dict[bytes, int] = {}
        self._open: dict[bytes, set[int]] = {}
        self._won: dict[bytes, deque[int]] = {}
        self._counts: dict[bytes, int] = {}
        self._keys = SortedSet()
        """That are there, as this process knows."""

    # ── writes ──

    def begin(self, key: bytes) -> Write:
        self._number += 1
        others = self._open.setdefault(key, set())
        write = Write(key, self._number, min(others, default=self._number))
        others.add(self._number)
        return write

    def stamp(self, write: Write) -> Stamp:
        return Stamp(self.writer, write.number)

    def acknowledged(self, write: Write, version: int = 0) -> None:
        self._end(write)
        self._numbers[write.key] = max(self._numbers.get(write.key, 0), write.ended_below)
        self._keys.add(write.key)
        self.saw(write.key, version)

    def refused(self, write: Write) -> None:
        """It was definitely not done."""
        self._end(write)

    def _end(self, write: Write) -> None:
        others = self._open[write.key]
        others.discard(write.number)
        if not others:
            del self._open[write.key]

    # ── reads ──

    def saw(self, key: bytes, version: int) -> None:
        if version > self._versions.get(key, 0):
            self._versions[key] = version

    def floor(self, key: bytes) -> Floor:
        """To be asked before the read begins."""
        return Floor(self._versions.get(key, 0), self._numbers.get(key, 0))

    def check(self, key: bytes, value: bytes, floor: Floor, version: int | None = None) -> Stamp:
        """Judge what a read gave; `version` is None if the door does not tell it. Raises WrongValue."""
        stamp = decode(key, value)
        if version is not None:
            if self._is_fresh and version < floor.version:
                raise WrongValue(f"{key!r} was read at version {version}, after version {floor.version} was seen")
            self.saw(key, version)
        if self._is_fresh and stamp.writer == self.writer and stamp.number < floor.number:
            raise WrongValue(f"{key!r} holds our write {stamp.number}, which a later one had overwritten")
        self._keys.add(key)
        return stamp

    def absent(self, key: bytes) -> WrongValue:
        """What to raise when a key that was written is not there."""
        return WrongValue(f"{key!r} is absent, but was written: version {self._versions.get(key, 'unknown')}")

    def not_found(self, key: bytes) -> None:
        """Judge a read that gave nothing of a key that was written; one that may be stale may come before the write.
        Raises WrongValue."""
        if self._is_fresh:
            raise self.absent(key)

    def misplaced(self, key: bytes, last: bytes, start: bytes, end: bytes) -> WrongValue:
        """What to raise when a scan gives a key out of its order or range."""
        return WrongValue(f"a scan from {start!r} to {end!r} gave {key!r} after {last!r}")

    def there(self, start: bytes, end: bytes, most: int) -> Sequence[bytes]:
        """The first keys from `start` up to and without `end` that are known to be there, at most so many. To be asked
        before a scan begins; none if reads may be stale."""
        if not self._is_fresh:
            return []
        return list(islice(self._keys.irange(start, end, inclusive=(True, False)), most))

    def scanned(self, there: Sequence[bytes], found: Container[bytes], last: bytes | None) -> None:
        """Judge a scan that came to `last`, None: to its end. Raises WrongValue if it passed over a key."""
        for key in there:
            if key not in found and (last is None or key <= last):
                raise WrongValue(f"a scan passed over {key!r}, which was there before it began")

    # ── what only one may get ──

    def won(self, key: bytes, generation: int) -> None:
        """A compare-and-set has raised the key to this generation. Raises WrongValue if another has, too."""
        generations = self._won.setdefault(key, deque(maxlen=WON_MAX))
        if generation in generations:
            raise WrongValue(f"{key!r}: two compare-and-sets were both told that they made generation {generation}")
        generations.append(generation)

    def count_floor(self, key: bytes) -> int:
        return self._counts.get(key, 0)

    def counted(self, key: bytes, count: int, floor: int) -> None:
        """An increment gave this; `floor` is from before it began. Raises WrongValue if the counter went back."""
        if count <= floor:
            raise WrongValue(f"{key!r} was incremented to {count}, after it had been {floor}")
        self._counts[key] = max(count, self._counts.get(key, 0))


def next_generation(key: bytes, value: bytes | None) -> Stamp:
    """The stamp of a compare-and-set's value, from the value it replaces. Raises WrongValue."""
    return Stamp(NOBODY, 1 if value is None else decode(key, value).number + 1)
