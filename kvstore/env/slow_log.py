"""The slow log: the most recent slow operations and the parts of the path on which they spent their time. It is kept in
a bounded ring and written to the log. Keys appear as hashes, and values do not appear
(docs/how-to/find-slow-operations.md).

Code on hot paths compares times that it has measured anyway with `limit_s`, and calls `note` only for longer times.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Literal, NamedTuple

log = logging.getLogger("kvstore.slow")

KEPT = 256
PER_SECOND_MAX = 20
"""Maximum number of notes that are kept and written in one second; further ones are counted."""
Place = Literal["endpoint", "waiting", "link", "leader"]


class Slow(NamedTuple):
    """One slow operation, or several that shared an entry or a lane."""

    date_ms: int
    at: Place
    """Where it was measured: at the endpoint, from reading it to its answer; at a server that waits for a leader; on
    the link to the leader's server; at the leader."""
    operation: str
    key: str
    """Hash of the first key; empty if there is none."""
    partition: str
    took_s: float
    parts: dict[str, float]
    """Seconds by part of the operation."""
    operations: int
    starved: float
    """Share of the recent time, from 0 to 1, in which the event loop was ready and had no processor."""


class SlowLog:
    """The slow log of one node. Created without arguments, it considers no operation slow."""

    def __init__(
        self,
        slow_ms: int = 0,
        now: Callable[[], float] = lambda: 0.0,
        date_ms: Callable[[], int] = lambda: 0,
        starved: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`slow_ms` is the time in milliseconds above which an operation is slow; 0 means that no operation is slow."""
        self.slow_ms = slow_ms
        self.limit_s = slow_ms / 1000 if slow_ms else math.inf
        self._now, self._date_ms, self._starved = now, date_ms, starved
        self._kept: deque[Slow] = deque(maxlen=KEPT)
        self._counts: Counter[Place] = Counter()
        self._second, self._in_second, self._left_out = -1, 0, 0
        self.noted = 0
        """Number of notes kept since the start."""

    def note(
        self,
        at: Place,
        operation: str,
        took_s: float,
        *,
        key: object = None,
        partition: str = "",
        operations: int = 1,
        **parts: float,
    ) -> None:
        """Record operations that together took longer than `limit_s`. A `key` that is not bytes is ignored."""
        if self.slow_ms == 0:
            return
        self._counts[at] += operations
        second = math.floor(self._now())
        if second != self._second:
            self._second, self._in_second = second, 0
        self._in_second += 1
        if self._in_second > PER_SECOND_MAX:
            self._left_out += operations
            return
        name = hash_of(key) if isinstance(key, bytes) and key else ""
        found = Slow(self._date_ms(), at, operation, name, partition, took_s, parts, operations, self._starved())
        self._kept.append(found)
        self.noted += 1
        shown = " ".join(f"{part}_ms={seconds * 1000:.1f}" for part, seconds in parts.items())
        log.info(
            "slow at=%s operation=%s key=%s partition=%s took_ms=%.1f operations=%d starved=%.2f %s",
            at,
            operation,
            name,
            partition,
            took_s * 1000,
            operations,
            found.starved,
            shown,
            extra={"fields": {f"{part}_ms": round(seconds * 1000, 1) for part, seconds in parts.items()}},
        )

    @property
    def total(self) -> int:
        """Number of slow operations since the start, including those that were not kept."""
        return self._counts.total()

    @property
    def kept(self) -> int:
        """Number of notes that `latest` returns."""
        return len(self._kept)

    def clear(self) -> None:
        """Drop the kept notes; counts stay."""
        self._kept.clear()

    def latest(self, count: int = KEPT, key: str = "") -> list[Slow]:
        """Return at most `count` of the last notes, newest first. With `key`, return only notes with this hash."""
        found = [each for each in reversed(self._kept) if key in ("", each.key)]
        return found[:count]

    def statistics(self) -> dict[str, int]:
        places: tuple[Place, ...] = ("endpoint", "waiting", "link", "leader")
        return {**{f"slow_{at}_total": self._counts[at] for at in places}, "slow_left_out_total": self._left_out}


def hash_of(key: bytes) -> str:
    """Return a hash of a key as 16 hexadecimal digits, for places in which the key's bytes must not appear. Anyone
    who knows a key can recognise its hash."""
    return blake2b(key, digest_size=8, person=b"kvstore log").hexdigest()
