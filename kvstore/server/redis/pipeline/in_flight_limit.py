"""The limit of what all Redis connections of a server have in flight. Decides only.

Commands beyond the limit wait unread in their connections. This slows down a client that sends more than the store
accepts, where a later queue would have to refuse. Waiting connections continue in the order of their arrival. A command
with several keys counts once for each operation that it has in flight.

A connection with nothing in flight may begin one command above the limit, so that slow reads of other connections do
not stop it. For this rule each command counts only once, because all operations of one large command may wait for a
partition without a leader.
"""

from __future__ import annotations

from typing import Protocol

COMMANDS_MAX = 16_384
"""Half of the capacity of one partition's queue, because two servers may each forward this many commands to one leader.
"""
BYTES_MAX = 8 << 20
"""Bytes of values: a quarter of the capacity of one partition's queue."""
FEW = 64
"""Maximum number of operations of a small command. A larger command may take megabytes, so for it all operations of
other commands count."""


class WaitingConnection(Protocol):
    """A connection whose commands wait for the limit."""

    def resume(self) -> None:
        """Begin the waiting commands unless something else blocks them."""
        ...


class InFlightLimit:
    """Counts what all connections have in flight. `is_full` is a plain attribute because it is read before each
    command."""

    def __init__(self, commands_max: int = COMMANDS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self.commands = 0
        self.more = 0
        """Operations in addition to one for each command."""
        self.bytes = 0
        self.is_full = False
        self._commands_max, self._bytes_max = commands_max, bytes_max
        self._waiting: dict[WaitingConnection, None] = {}
        self._is_waking = False

    def begin(self, commands: int, size: int, more: int = 0) -> None:
        """Count `commands` with `size` bytes of values as begun. `more`: operations in addition to one for each
        command."""
        self.commands += commands
        self.more += more
        self.bytes += size
        self.is_full = self.commands + self.more >= self._commands_max or self.bytes >= self._bytes_max

    def end(self, commands: int, size: int, more: int = 0) -> None:
        """Count commands as ended. Waiting connections are resumed while there is capacity."""
        self.commands -= commands
        self.more -= more
        self.bytes -= size
        if self.is_full and self.bytes <= self._bytes_max // 2 and self.commands + self.more <= self._commands_max // 2:
            self.is_full = False
        if self._waiting and not self._is_waking:
            self._wake()

    def has_spare(self, operations: int = 1) -> bool:
        """Return True if a connection with nothing in flight may begin a command with this many operations even
        though the limit is reached."""
        counted = self.commands if operations <= FEW else self.commands + self.more
        return self.bytes < self._bytes_max and counted < 2 * self._commands_max

    def wait(self, waiter: WaitingConnection) -> None:
        """Resume the connection when there is capacity."""
        self._waiting[waiter] = None

    def forget(self, waiter: WaitingConnection) -> None:
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
