"""Where connections wait while a bookie has enough to do."""

from __future__ import annotations

from collections.abc import Callable


class BackpressureGate:
    """Lets in who waits, first come, first served, while nobody holds it shut."""

    def __init__(self) -> None:
        self.is_shut = False
        self.waiting: dict[Callable[[], None], None] = {}
        self._holders: set[object] = set()

    def shut(self, holder: object) -> None:
        """A part of the bookie has enough to do."""
        self._holders.add(holder)
        self.is_shut = True

    def wait(self, again: Callable[[], None]) -> None:
        """Call `again`, once, when the door is open."""
        self.waiting[again] = None

    def open(self, holder: object) -> None:
        """That part has less to do. If no other holds the door shut, call who waits; any of them may shut it again."""
        self._holders.discard(holder)
        self.is_shut = bool(self._holders)
        while self.waiting and not self.is_shut:
            again = next(iter(self.waiting))
            del self.waiting[again]
            again()
