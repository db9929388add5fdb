"""Where connections wait while a bookie has enough to do."""

from __future__ import annotations

from collections.abc import Callable


class Door:
    """Lets in who waits, first come, first served, for as long as the bookie is not busy."""

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self.waiting: dict[Callable[[], None], None] = {}

    def wait(self, again: Callable[[], None]) -> None:
        """Call `again`, once, when the bookie is not busy any more."""
        self.waiting[again] = None

    def let_in(self) -> None:
        """Something has ended: call who waits, until the bookie is busy again."""
        while self.waiting and not self._is_busy():
            again = next(iter(self.waiting))
            del self.waiting[again]
            again()
