"""Operations that came to a partition which does not own their key (any more, or yet): they wait here, bounded in
number, bytes and time, and go out again when the ring has changed, or a little later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvstore.errors import Overloaded, StoreError, Unavailable
from kvstore.partition.commands import Op, Result, Sink

WAIT_S = 2.0
"""How long an operation is looked after, all its ways together."""


class FromPeer:
    """Base of sinks of other servers: those send out again themselves what was theirs to send."""


class Astray:
    """The sink of such an operation: knows until when it is worth trying."""

    __slots__ = ("_sink", "deadline")

    def __init__(self, sink: Sink, deadline: float) -> None:
        self._sink, self.deadline = sink, deadline

    def complete(self, token: int, result: Result | StoreError) -> None:
        self._sink.complete(token, result)

    def flush(self) -> None:
        self._sink.flush()


class Strays:
    """`send` carries an operation out from the beginning, `fail` refuses it on a later turn of the event loop."""

    def __init__(
        self,
        send: Callable[[Op, Sink, int], None],
        fail: Callable[[Sink, int, StoreError], None],
        *,
        most: int,
        bytes_max: int,
    ) -> None:
        self._send, self._fail, self._most, self._bytes_max = send, fail, most, bytes_max
        self._items: deque[tuple[Op, Astray, int, int]] = deque()
        self._bytes = 0
        self.total = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, op: Op, sink: Sink, token: int, size: int, now: float, deadline: float = 0.0) -> None:
        """Keep the operation, of `size` bytes, for a while. `deadline`: what it was given elsewhere, 0 if nothing."""
        if not isinstance(sink, Astray):
            sink = Astray(sink, deadline or now + WAIT_S)
        if sink.deadline <= now:
            self._fail(sink, token, Unavailable("the key is on its way from one partition to another"))
        elif len(self._items) >= self._most or self._bytes + size > self._bytes_max:
            self._fail(sink, token, Overloaded(f"{len(self._items)} operations wait for keys that are on their way"))
        else:
            self.total += 1
            self._bytes += size
            self._items.append((op, sink, token, size))

    def send_again(self) -> None:
        """All of them, in order. Those that come back come to the end."""
        items, self._items, self._bytes = self._items, deque(), 0
        for op, sink, token, _ in items:
            self._send(op, sink, token)

    def fail_all(self, error: StoreError) -> None:
        """Refuse all of them."""
        items, self._items, self._bytes = self._items, deque(), 0
        for _, sink, token, _ in items:
            self._fail(sink, token, error)
