"""How much all Redis connections of a server have under way together. Decides only.

What is beyond it waits unread in its connection: a client that sends more than the store takes is slowed down, where a
queue further on would have to refuse. Connections that wait go on in the order in which they came. A command of several
keys counts as many times as it has operations under way at once. One command of a connection that has none under way
may begin all the same, so that others, whose reads may take long, do not hold it up. For this it counts once, however
many keys others' have: those of one large command may all wait for a partition that has no leader.
"""

from __future__ import annotations

from typing import Protocol

COMMANDS_MAX = 16_384
"""Half of what one partition's queue takes: two servers may forward as much to one leader."""
BYTES_MAX = 8 << 20
"""Bytes of their values; a quarter of what one partition's queue takes."""
FEW = 64
"""Operations of a command that is small. A larger one, which may take megabytes, counts all operations of others."""


class Waiter(Protocol):
    """A connection with commands that wait."""

    def resume(self) -> None:
        """Go on, if nothing else is in the way."""
        ...


class InflightLimit:
    """Counts what all connections have under way. `is_full` is looked at before each command, so it is a plain
    attribute."""

    def __init__(self, commands_max: int = COMMANDS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self.commands = 0
        self.more = 0
        """Operations beside one for each command."""
        self.bytes = 0
        self.is_full = False
        self._commands_max, self._bytes_max = commands_max, bytes_max
        self._waiting: dict[Waiter, None] = {}
        self._is_waking = False

    def begin(self, commands: int, size: int, more: int = 0) -> None:
        """Count `commands` with `size` bytes of values as under way; `more`: operations beside one for each command."""
        self.commands += commands
        self.more += more
        self.bytes += size
        self.is_full = self.commands + self.more >= self._commands_max or self.bytes >= self._bytes_max

    def end(self, commands: int, size: int, more: int = 0) -> None:
        """Count them as ended. Wakes waiters as long as there is room."""
        self.commands -= commands
        self.more -= more
        self.bytes -= size
        if self.is_full and self.bytes <= self._bytes_max // 2 and self.commands + self.more <= self._commands_max // 2:
            self.is_full = False
        if self._waiting and not self._is_waking:
            self._wake()

    def has_spare(self, operations: int = 1) -> bool:
        """Whether, though it is full, there is room for a command of so many operations of a connection that has none
        under way."""
        counted = self.commands if operations <= FEW else self.commands + self.more
        return self.bytes < self._bytes_max and counted < 2 * self._commands_max

    def wait(self, waiter: Waiter) -> None:
        """Be woken when there is room."""
        self._waiting[waiter] = None

    def forget(self, waiter: Waiter) -> None:
        self._waiting.pop(waiter, None)

    def _wake(self) -> None:
        self._is_waking = True
        try:
            while self._waiting and not self.is_full:
                waiter = next(iter(self._waiting))
                del self._waiting[waiter]
                waiter.resume()
        finally:
            self._is_waking = False
