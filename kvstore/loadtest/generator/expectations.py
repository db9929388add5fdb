"""The values that a process may expect to read, from its own writes and reads. Decides only.

Two rules of freshness. *Versions*: the store's version of a key rises with each write, so a read never gives an older
one than was acknowledged or read before it began, and a write is always given a newer one. *Numbers*: some doors do not
tell versions. There, once a write was acknowledged, a read gives neither a value of ours whose own write had ended
before that one began, nor a value of an earlier run or of the preload. A write of unknown outcome may show at any time.

Which of them a read must follow is its level's: linearizable and strict reads both; session reads that of versions,
which are told only through gRPC, by the client whose session it is; stale reads none.

And of scans, since no workload deletes: what was there before a scan began is in it, if its place is.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from sortedcontainers import SortedSet

from kvstore.client import Level
from kvstore.loadtest.generator.values import NOBODY, Stamp, WrongValue, decode, run_of

KEYS_MAX = 1_000_000
"""Keys that are remembered; of any more nothing is expected."""
UNKNOWN_MAX = 64
"""Writes of unknown outcome that are remembered of one key."""
WON_MAX = 1_024
"""Generations and counts remembered of one key."""


class Floor(NamedTuple):
    """The oldest that a read which begins now may give."""

    is_there: bool
    """The key was written: it must be found."""
    version: int
    number: int


NO_FLOOR = Floor(is_there=False, version=0, number=0)


class Write(NamedTuple):
    """A write under way."""

    key: bytes
    number: int
    ended_below: int
    """Our writes of this key with a smaller number had ended when it began, or are of unknown outcome."""
    floor: Floor


@dataclass(slots=True)
class Known:
    """The known history of one key."""

    version: int = 0
    number: int = 0
    """Our writes with a smaller one are overwritten, but for those of unknown outcome."""
    unknown: list[int] | None = None
    """Numbers of writes of unknown outcome, sorted."""
    unknown_up_to: int = 0
    """Smaller numbers, and this one, may be of unknown outcome, too: they are remembered no more."""

    def note_unknown(self, number: int) -> None:
        self.unknown = self.unknown or []
        insort(self.unknown, number)
        if len(self.unknown) > UNKNOWN_MAX:
            self.unknown_up_to = max(self.unknown_up_to, self.unknown.pop(0))

    def may_be_unknown(self, number: int) -> bool:
        return number <= self.unknown_up_to or number in (self.unknown or ())


class Once:
    """Numbers of which only one caller may be given each, by key."""

    def __init__(self) -> None:
        self._given: dict[bytes, deque[int]] = {}

    def give(self, key: bytes, number: int) -> bool:
        """False: somebody else was given it, too."""
        given = self._given.setdefault(key, deque(maxlen=WON_MAX))
        if number in given:
            return False
        given.append(number)
        return True


class Expectations:
    """The expectations of one process. The values that it writes carry `writer`."""

    def __init__(self, writer: int, *, keys_max: int = KEYS_MAX) -> None:
        self.writer = writer
        self._keys_max = keys_max
        self._number = 0
        self._known: dict[bytes, Known] = {}
        self._open: dict[bytes, set[int]] = {}
        self._won, self._counted = Once(), Once()
        self._counts: dict[bytes, int] = {}
        self._there: SortedSet[bytes] = SortedSet()
        """Keys that are there, as this process knows."""

    # ── writes ──

    def begin(self, key: bytes) -> Write:
        """To be ended by one of the following three."""
        self._number += 1
        others = self._open.setdefault(key, set())
        write = Write(key, self._number, min(others, default=self._number), self.floor(key))
        others.add(self._number)
        return write

    def stamp(self, write: Write) -> Stamp:
        return Stamp(self.writer, write.number)

    def acknowledged(self, write: Write, version: int | None = None) -> None:
        """It is done; `version` is None if the door does not tell it. Raises WrongValue."""
        self._end(write)
        known = self._of(write.key)
        known.number = max(known.number, write.ended_below)
        self._is_there(write.key)
        if version is not None:
            self.rose(write.key, version, write.floor)

    def refused(self, write: Write) -> None:
        """It was definitely not done."""
        self._end(write)

    def unknown(self, write: Write) -> None:
        """It may be done, or may be later."""
        self._end(write)
        self._of(write.key).note_unknown(write.number)

    def rose(self, key: bytes, version: int, floor: Floor) -> None:
        """Judge the version that a write was given; `floor` is from before it began. Raises WrongValue."""
        if version <= floor.version:
            raise WrongValue(f"{key!r} was written as version {version}, after version {floor.version} was seen")
        self.saw(key, version)

    def _end(self, write: Write) -> None:
        others = self._open[write.key]
        others.discard(write.number)
        if not others:
            del self._open[write.key]

    # ── reads ──

    def saw(self, key: bytes, version: int) -> None:
        known = self._of(key)
        known.version = max(known.version, version)

    def floor(self, key: bytes, level: Level = Level.LINEARIZABLE) -> Floor:
        """To be asked before the read begins."""
        if level == Level.STALE:
            return NO_FLOOR
        known = self._known.get(key) or Known()
        if level == Level.SESSION:
            return Floor(known.version > 0, known.version, 0)
        return Floor(True, known.version, known.number)

    def check(self, key: bytes, value: bytes, floor: Floor, version: int | None = None) -> Stamp:
        """Judge what a read gave; `version` is None if the door does not tell it. Raises WrongValue."""
        stamp = decode(key, value)
        if version is not None:
            if version < floor.version:
                raise WrongValue(f"{key!r} was read at version {version}, after version {floor.version} was seen")
            self.saw(key, version)
        if floor.number:
            self._check_number(key, stamp, floor.number)
        self._is_there(key)
        return stamp

    def _check_number(self, key: bytes, stamp: Stamp, number: int) -> None:
        if run_of(stamp.writer) != run_of(self.writer):
            raise WrongValue(f"{key!r} holds a value of an earlier run, which a write of ours had overwritten")
        is_old = stamp.writer == self.writer and stamp.number < number
        if is_old and not self._of(key).may_be_unknown(stamp.number):
            raise WrongValue(f"{key!r} holds our write {stamp.number}, which a later one had overwritten")

    def absent(self, key: bytes) -> WrongValue:
        """Return the error for a written key that is missing."""
        version = self.floor(key).version or "unknown"
        return WrongValue(f"{key!r} is absent, but was written: version {version}")

    def not_found(self, key: bytes, floor: Floor) -> None:
        """Judge a read that gave nothing of a key that was written. Raises WrongValue."""
        if floor.is_there:
            raise self.absent(key)

    def misplaced(self, key: bytes, last: bytes, start: bytes, end: bytes) -> WrongValue:
        """Return the error for a scan that returns a key out of order or range."""
        return WrongValue(f"a scan from {start!r} to {end!r} gave {key!r} after {last!r}")

    def there(self, start: bytes, end: bytes, most: int, level: Level = Level.LINEARIZABLE) -> dict[bytes, Floor]:
        """The first keys from `start` up to and without `end` that are known to be there, at most so many, and which
        of their values a scan may give. To be asked before it begins. Fewer if reads may be stale."""
        keys = islice(self._there.irange(start, end, inclusive=(True, False)), most)
        floors = {key: self.floor(key, level) for key in keys}
        return {key: floor for key, floor in floors.items() if floor.is_there}

    def scanned(self, there: Iterable[bytes], found: Container[bytes], last: bytes | None) -> None:
        """Judge a scan that came to `last`, None: to its end. Raises WrongValue if it passed over a key."""
        for key in there:
            if key not in found and (last is None or key <= last):
                raise WrongValue(f"a scan passed over {key!r}, which was there before it began")

    # ── what only one may get ──

    def won(self, key: bytes, generation: int) -> None:
        """A compare-and-set has raised the key to this generation. Raises WrongValue if another has, too."""
        if not self._won.give(key, generation):
            raise WrongValue(f"{key!r}: two compare-and-sets were both told that they made generation {generation}")

    def count_floor(self, key: bytes) -> int:
        return self._counts.get(key, 0)

    def counted(self, key: bytes, count: int, floor: int) -> None:
        """An increment gave this; `floor` is from before it began. Raises WrongValue if the counter went back, or if
        another increment gave the same."""
        if count <= floor:
            raise WrongValue(f"{key!r} was incremented to {count}, after it had been {floor}")
        if not self._counted.give(key, count):
            raise WrongValue(f"{key!r}: two increments both gave {count}")
        self._counts[key] = max(count, self._counts.get(key, 0))

    # ── what is remembered ──

    def _of(self, key: bytes) -> Known:
        """To be added to; in vain if too many keys are remembered."""
        known = self._known.get(key)
        if known is None:
            known = Known()
            if len(self._known) < self._keys_max:
                self._known[key] = known
        return known

    def _is_there(self, key: bytes) -> None:
        self._of(key)
        if key in self._known:
            self._there.add(key)


def next_generation(key: bytes, value: bytes | None) -> Stamp:
    """The stamp of a compare-and-set's value, from the value it replaces. Raises WrongValue."""
    return Stamp(NOBODY, 1 if value is None else decode(key, value).number + 1)
