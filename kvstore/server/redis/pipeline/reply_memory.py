"""The memory that all Redis connections of a server hold for replies. Decides only.

Reads are submitted at once, whatever their size. If there is no capacity for a reply when it arrives, the reply is
dropped, and the read is repeated in its turn (rereads.py). A command that cannot be repeated begins only when there is
capacity for the largest reply that it may have. Connections that wait for capacity continue in the order of their
arrival. While others wait, a client that does not read its replies is closed after PATIENCE_S, because otherwise no
capacity would become free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

SMALL_BYTES = 4 << 10
"""Replies up to this size are counted only while their client reads slowly: IN_FLIGHT_MAX of them take little memory.
"""
CHECK_S = 0.02
"""Time in seconds between two counts of what connections hold. Between counts only additions are tracked."""
SINGLE_BYTES = 2 << 20
"""Bytes that a command with one value takes. Larger requests may use three quarters of the memory, so that a few
clients that ask for much and read slowly never occupy all of it."""
PATIENCE_S = 1.0
REFUSE_S = 6.0
"""A client that has waited this many seconds for capacity gets an error for the command that waits."""


class Holder(Protocol):
    """A connection that holds replies."""

    @property
    def held_bytes(self) -> int:
        """Bytes of replies that the socket has not taken, and bytes reserved for other replies."""
        ...

    @property
    def full_since(self) -> float | None:
        """Time since which the client has not read enough of its replies; None if it reads enough."""
        ...

    def resume(self) -> None:
        """Continue, because there may be capacity for replies now."""
        ...

    def refuse(self) -> None:
        """Reply with an error to the command that waits, because there is no capacity."""
        ...

    def abort(self) -> None: ...


class ReplyMemory:
    """Bounds the memory that connections hold for replies. It adds what arrives, and counts what is left only when the
    sum seems too large. Freed bytes are tracked only when a large reservation turns out to be unnecessary."""

    def __init__(self, now: Callable[[], float], bytes_max: int) -> None:
        self.bytes = 0
        """Upper bound of the bytes that are held."""
        self.closed = self.put_off = self.refused = 0
        """Numbers of connections closed, replies postponed and commands refused because of missing capacity."""
        self._now, self._bytes_max = now, bytes_max
        self._holders: dict[Holder, None] = {}
        self._waiting: dict[Holder, tuple[int, float]] = {}
        self._counted_at = -CHECK_S
        self._is_serving_soon = False

    @property
    def is_awaited(self) -> bool:
        """True if `check` should be called in CHECK_S seconds."""
        return bool(self._waiting)

    def take(self, holder: Holder, size: int) -> bool:
        """Count `size` bytes and return True, or return False if there is no capacity. If no other connection holds
        anything, there is always capacity."""
        if not self._fits(size):
            now = self._now()
            if now - self._counted_at >= CHECK_S:
                self._count(now)
            if not self._fits(size):
                return False
        self._holders[holder] = None
        self.bytes += size
        return True

    def give_back(self, holder: Holder, size: int) -> bool:
        """Stop counting `size` bytes that `holder` reserved but does not use. Return True if the caller must call
        `serve` in the next turn, because other holders wait and the bytes might otherwise be taken before the next
        check."""
        if size > 0 and holder in self._holders:
            self.bytes -= size
        is_wanted = bool(self._waiting) and not self._is_serving_soon
        self._is_serving_soon |= is_wanted
        return is_wanted

    def add(self, holder: Holder, size: int) -> None:
        """Count bytes that a slow client already holds. If all clients hold too much, close the slowest ones."""
        self._holders[holder] = None
        self.bytes += size
        if self.bytes > self._bytes_max:
            now = self._now()
            if now - self._counted_at >= CHECK_S or self.bytes > 2 * self._bytes_max:
                self._count(now)
                self._close(now, 0)

    def wait(self, holder: Holder, size: int) -> None:
        """Resume `holder` when there is capacity for `size` bytes, or refuse it if none becomes free."""
        self._waiting.setdefault(holder, (size, self._now()))

    def forget(self, holder: Holder) -> None:
        self._waiting.pop(holder, None)
        self._holders.pop(holder, None)

    def check(self) -> None:
        """Recount what is held, and serve the waiting holders."""
        self._count(self._now())
        self.serve()

    def serve(self) -> None:
        """Resume the waiting holders for which there is capacity, and refuse those that have waited too long."""
        self._is_serving_soon = False
        now = self._now()
        for holder, (size, since) in list(self._waiting.items()):
            if now - since > PATIENCE_S:
                self._close(now - PATIENCE_S, size)
            fits = self._fits(size)
            if not fits and now - since < REFUSE_S:
                if size <= SINGLE_BYTES:
                    return
                continue
            if self._waiting.pop(holder, None) is None:
                continue
            if fits:
                holder.resume()
            else:
                self.refused += 1
                holder.refuse()

    def held(self) -> int:
        """Recount and return the bytes that are held."""
        self._count(self._now())
        return self.bytes

    def _fits(self, size: int) -> bool:
        most = self._bytes_max if size <= SINGLE_BYTES else self._bytes_max * 3 // 4
        return not self.bytes or self.bytes + size <= most

    def _count(self, now: float) -> None:
        self._counted_at = now
        held = {holder: size for holder in self._holders if (size := holder.held_bytes)}
        self._holders = dict.fromkeys(held)
        self.bytes = sum(held.values())

    def _close(self, before: float, size: int) -> None:
        """Close clients that have read too little since `before`, the largest first, until there is capacity for `size`
        bytes."""
        slow = [each for each in self._holders if (since := each.full_since) is not None and since <= before]
        for each in sorted(slow, key=lambda each: each.held_bytes, reverse=True):
            if self._fits(size):
                return
            self.bytes -= each.held_bytes
            self._holders.pop(each)
            self.closed += 1
            each.abort()
