"""How much all Redis connections of a server hold for replies together. Decides only.

What a client asks to read is read at once, however much it is. A reply for which there is no room when it has come is
forgotten, and read again in its turn (rereads.py); a command that cannot be done again begins only when there is room
for all that it may answer. Clients that wait for room go on in the order in which they came. When others wait, a client
that does not read what it was sent is left alone for PATIENCE_S, and then closed: else no room would ever come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

SMALL_BYTES = 4 << 10
"""Replies up to this size are not counted before their client is slow: IN_FLIGHT_MAX of them are little."""
CHECK_S = 0.02
"""Between two looks at what connections still hold; in between only what comes is counted."""
SINGLE_BYTES = 2 << 20
"""Bytes that a command with one value takes. Larger requests have three quarters of the room, so that all of it never
goes to a few clients that ask for much and read slowly."""
PATIENCE_S = 1.0
REFUSE_S = 6.0
"""A client that has waited so long for room gets an error for the one command that waits."""


class Holder(Protocol):
    """A connection that holds replies."""

    @property
    def held_bytes(self) -> int:
        """Replies that its socket has not taken, and what is reserved for others."""
        ...

    @property
    def full_since(self) -> float | None:
        """Since when its client has not read enough of what it was sent; None if it does."""
        ...

    def resume(self) -> None:
        """There may be room now."""
        ...

    def refuse(self) -> None:
        """There is no room: answer the command that waits for it with an error."""
        ...

    def abort(self) -> None: ...


class ReplyMemory:
    """Bounds what holders hold. It counts what comes, and looks at what is left only when that seems too much: nothing
    is done when bytes go, but when much that was reserved turns out not to be needed."""

    def __init__(self, now: Callable[[], float], bytes_max: int) -> None:
        self.bytes = 0
        """No less than what is held."""
        self.closed = self.put_off = self.refused = 0
        """Connections closed, replies put off and commands refused for want of room."""
        self._now, self._bytes_max = now, bytes_max
        self._holders: dict[Holder, None] = {}
        self._waiting: dict[Holder, tuple[int, float]] = {}
        self._counted_at = -CHECK_S
        self._is_serving_soon = False

    @property
    def is_awaited(self) -> bool:
        """Whether `look` should be called in CHECK_S."""
        return bool(self._waiting)

    def take(self, holder: Holder, size: int) -> bool:
        """Count `size` bytes in. False: there is no room. A holder that is alone always has room."""
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
        """Count out `size` bytes that `holder` had reserved and does not hold. Whether `serve` is to be called in the
        next turn: holders wait, and until the next look others might take what there is."""
        if size > 0 and holder in self._holders:
            self.bytes -= size
        is_wanted = bool(self._waiting) and not self._is_serving_soon
        self._is_serving_soon |= is_wanted
        return is_wanted

    def add(self, holder: Holder, size: int) -> None:
        """Count in what is there already, of a client that does not read. Too much of it is never kept: the slowest
        clients are closed."""
        self._holders[holder] = None
        self.bytes += size
        if self.bytes > self._bytes_max:
            now = self._now()
            if now - self._counted_at >= CHECK_S or self.bytes > 2 * self._bytes_max:
                self._count(now)
                self._close(now, 0)

    def wait(self, holder: Holder, size: int) -> None:
        """Have `holder` resumed, or refused, when there is room for `size` bytes or will be none."""
        self._waiting.setdefault(holder, (size, self._now()))

    def forget(self, holder: Holder) -> None:
        self._waiting.pop(holder, None)
        self._holders.pop(holder, None)

    def check(self) -> None:
        """Count what is held, and serve those that wait."""
        self._count(self._now())
        self.serve()

    def serve(self) -> None:
        """Resume the holders that wait and for which there is room now; refuse those that have waited for too long."""
        self._is_serving_soon = False
        now = self._now()
        for holder, (size, since) in list(self._waiting.items()):
            if now - since > PATIENCE_S:
                self._close(now - PATIENCE_S, size)
            is_room = self._fits(size)
            if not is_room and now - since < REFUSE_S:
                if size <= SINGLE_BYTES:
                    return
                continue
            if self._waiting.pop(holder, None) is None:
                continue
            if is_room:
                holder.resume()
            else:
                self.refused += 1
                holder.refuse()

    def held(self) -> int:
        """Bytes that are held now, counted anew."""
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
        """Close the clients that have read too little since `before`, the largest first, until there is room for
        `size`."""
        slow = [each for each in self._holders if (since := each.full_since) is not None and since <= before]
        for each in sorted(slow, key=lambda each: each.held_bytes, reverse=True):
            if self._fits(size):
                return
            self.bytes -= each.held_bytes
            self._holders.pop(each)
            self.closed += 1
            each.abort()
