"""The values that a process may read, derived from its own writes and reads. Decides only.

There are two rules of freshness. *Versions*: the store's version of a key rises with each write. So a read never
returns a version older than one that was acknowledged or read before the read began, and a write always gets a newer
one. *Numbers*: some endpoints do not return versions. There, after an acknowledged write, a read returns neither one of
our values whose write had ended before that write began, nor a value of an earlier run or of the preload. A write with
an unknown outcome may appear at any time.

The level of a read selects the rules. Linearizable and strict reads follow both. Session reads follow the rule of
versions, which only gRPC returns, to the client that has the session. Stale reads follow neither.

No workload deletes keys. So a scan returns every key that existed before the scan began and is in its range.
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
"""Maximum number of keys that are remembered. The values of other keys are not checked."""
UNKNOWN_MAX = 64
"""Maximum number of writes with an unknown outcome that are remembered per key."""
WON_MAX = 1_024
"""Maximum number of generations and counts that are remembered per key."""


class Floor(NamedTuple):
    """The oldest state that a read which starts now may return."""

    is_there: bool
    """True if the key was written, so that a read must find it."""
    version: int
    number: int


NO_FLOOR = Floor(is_there=False, version=0, number=0)


class PendingWrite(NamedTuple):
    """A write in progress."""

    key: bytes
    number: int
    ended_below: int
    """Our writes of this key with a smaller number had ended when this one began, or have an unknown outcome."""
    floor: Floor


@dataclass(slots=True)
class KeyHistory:
    """The known history of one key."""

    version: int = 0
    number: int = 0
    """Our writes with smaller numbers are overwritten, except those with an unknown outcome."""
    unknown: list[int] | None = None
    """Numbers of writes with an unknown outcome, sorted."""
    unknown_up_to: int = 0
    """Writes up to this number may also have an unknown outcome, but are no longer remembered."""

    def note_unknown(self, number: int) -> None:
        self.unknown = self.unknown or []
        insort(self.unknown, number)
        if len(self.unknown) > UNKNOWN_MAX:
            self.unknown_up_to = max(self.unknown_up_to, self.unknown.pop(0))

    def may_be_unknown(self, number: int) -> bool:
        return number <= self.unknown_up_to or number in (self.unknown or ())


class UniqueNumbers:
    """Numbers that each may be given to only one caller, by key."""

    def __init__(self) -> None:
        self._given: dict[bytes, deque[int]] = {}

    def give(self, key: bytes, number: int) -> bool:
        """Return False if the number was given before."""
        given = self._given.setdefault(key, deque(maxlen=WON_MAX))
        if number in given:
            return False
        given.append(number)
        return True


class Expectations:
    """The expectations of one process, whose values carry `writer`."""

    def __init__(self, writer: int, *, keys_max: int = KEYS_MAX) -> None:
        self.writer = writer
        self._keys_max = keys_max
        self._number = 0
        self._known: dict[bytes, KeyHistory] = {}
        self._open: dict[bytes, set[int]] = {}
        self._won, self._counted = UniqueNumbers(), UniqueNumbers()
        self._counts: dict[bytes, int] = {}
        self._there: SortedSet[bytes] = SortedSet()
        """Keys that this process knows to exist."""

    # ── writes ──

    def begin(self, key: bytes) -> PendingWrite:
        """Begin a write. End it with `acknowledged`, `refused` or `unknown`."""
        self._number += 1
        others = self._open.setdefault(key, set())
        write = PendingWrite(key, self._number, min(others, default=self._number), self.floor(key))
        others.add(self._number)
        return write

    def stamp(self, write: PendingWrite) -> Stamp:
        return Stamp(self.writer, write.number)

    def acknowledged(self, write: PendingWrite, version: int | None = None) -> None:
        """Record that a write is done; `version` is None if the endpoint does not return it. Raises WrongValue."""
        self._end(write)
        known = self._of(write.key)
        known.number = max(known.number, write.ended_below)
        self._is_there(write.key)
        if version is not None:
            self.rose(write.key, version, write.floor)

    def refused(self, write: PendingWrite) -> None:
        """Record that a write was definitely not done."""
        self._end(write)

    def unknown(self, write: PendingWrite) -> None:
        """Record that a write may be done, now or later."""
        self._end(write)
        self._of(write.key).note_unknown(write.number)

    def rose(self, key: bytes, version: int, floor: Floor) -> None:
        """Check the version of a write against `floor`, which is from before the write. Raises WrongValue."""
        if version <= floor.version:
            raise WrongValue(f"{key!r} was written as version {version} after version {floor.version} had been seen")
        self.saw(key, version)

    def _end(self, write: PendingWrite) -> None:
        others = self._open[write.key]
        others.discard(write.number)
        if not others:
            del self._open[write.key]

    # ── reads ──

    def saw(self, key: bytes, version: int) -> None:
        known = self._of(key)
        known.version = max(known.version, version)

    def floor(self, key: bytes, level: Level = Level.LINEARIZABLE) -> Floor:
        """Return what a read may return. Call this before the read begins."""
        if level == Level.STALE:
            return NO_FLOOR
        known = self._known.get(key) or KeyHistory()
        if level == Level.SESSION:
            return Floor(known.version > 0, known.version, 0)
        return Floor(True, known.version, known.number)

    def check(self, key: bytes, value: bytes, floor: Floor, version: int | None = None) -> Stamp:
        """Check what a read returned; `version` is None if the endpoint does not return it. Raises WrongValue."""
        stamp = decode(key, value)
        if version is not None:
            if version < floor.version:
                raise WrongValue(f"{key!r} was read at version {version} after version {floor.version} had been seen")
            self.saw(key, version)
        if floor.number:
            self._check_number(key, stamp, floor.number)
        self._is_there(key)
        return stamp

    def _check_number(self, key: bytes, stamp: Stamp, number: int) -> None:
        if run_of(stamp.writer) != run_of(self.writer):
            raise WrongValue(f"{key!r} holds a value of an earlier run, which our write had overwritten")
        is_old = stamp.writer == self.writer and stamp.number < number
        if is_old and not self._of(key).may_be_unknown(stamp.number):
            raise WrongValue(f"{key!r} holds our write {stamp.number}, which a later write had overwritten")

    def absent(self, key: bytes) -> WrongValue:
        """Return the error for a written key that is missing."""
        version = self.floor(key).version or "unknown"
        return WrongValue(f"{key!r} is absent, but was written: version {version}")

    def not_found(self, key: bytes, floor: Floor) -> None:
        """Check a read that did not find its key. Raises WrongValue if the key was written."""
        if floor.is_there:
            raise self.absent(key)

    def misplaced(self, key: bytes, last: bytes, start: bytes, end: bytes) -> WrongValue:
        """Return the error for a scan that returns a key out of order or out of range."""
        return WrongValue(f"a scan from {start!r} to {end!r} returned {key!r} after {last!r}")

    def there(self, start: bytes, end: bytes, most: int, level: Level = Level.LINEARIZABLE) -> dict[bytes, Floor]:
        """Return up to `most` existing keys in [start, end), and the oldest state of each that a scan may return. Call
        this before the scan begins. Stale reads may miss any key, so for them the result is empty."""
        keys = islice(self._there.irange(start, end, inclusive=(True, False)), most)
        floors = {key: self.floor(key, level) for key in keys}
        return {key: floor for key, floor in floors.items() if floor.is_there}

    def scanned(self, there: Iterable[bytes], found: Container[bytes], last: bytes | None) -> None:
        """Check a scan that ended at `last`, or at its end if None. Raises WrongValue if it missed a key."""
        for key in there:
            if key not in found and (last is None or key <= last):
                raise WrongValue(f"a scan missed {key!r}, which existed before the scan began")

    # ── results that only one caller may get ──

    def won(self, key: bytes, generation: int) -> None:
        """Record that a compare-and-set made this generation of a key. Raises WrongValue if another one did, too."""
        if not self._won.give(key, generation):
            raise WrongValue(f"{key!r}: two compare-and-sets both made generation {generation}")

    def count_floor(self, key: bytes) -> int:
        return self._counts.get(key, 0)

    def counted(self, key: bytes, count: int, floor: int) -> None:
        """Record the result of an increment; `floor` is from before it began. Raises WrongValue if the counter went
        back, or another increment had the same result."""
        if count <= floor:
            raise WrongValue(f"{key!r} was incremented to {count} after it had been {floor}")
        if not self._counted.give(key, count):
            raise WrongValue(f"{key!r}: two increments both returned {count}")
        self._counts[key] = max(count, self._counts.get(key, 0))

    # ── memory ──

    def _of(self, key: bytes) -> KeyHistory:
        """Return the history of a key, to be updated. It is not kept if too many keys are remembered."""
        known = self._known.get(key)
        if known is None:
            known = KeyHistory()
            if len(self._known) < self._keys_max:
                self._known[key] = known
        return known

    def _is_there(self, key: bytes) -> None:
        self._of(key)
        if key in self._known:
            self._there.add(key)


def next_generation(key: bytes, value: bytes | None) -> Stamp:
    """Return the stamp of a compare-and-set, given the value that it replaces. Raises WrongValue."""
    return Stamp(NOBODY, 1 if value is None else decode(key, value).number + 1)
