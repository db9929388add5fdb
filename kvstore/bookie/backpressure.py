"""Where connections wait while a bookie has enough to do."""

from __future__ import annotations

from collections.abc import Callable


class Door:
    """Lets in who waits, first come, first served, until it is shut again."""

    def __init__(self) -> None:
        self.is_shut = False
        self.waiting: dict[Callable[[], None], None] = {}

    def shut(self) -> None:
        """The bookie has enough to do."""
        self.is_shut = True

    def wait(self, again: Callable[[], None]) -> None:
        """Call `again`, once, when the door is open."""
        self.waiting[again] = None

    def open(self) -> None:
        """The bookie has less to do: call who waits. Any of them may shut the door."""
        self.is_shut = False
        while self.waiting and not self.is_shut:
            again = next(iter(self.waiting))
            del self.waiting[again]
            again()
