"""Holds back connections while a bookie is overloaded."""

from __future__ import annotations

from collections.abc import Callable


class BackpressureGate:
    """A gate that is open unless some part of the bookie holds it shut. Waiting connections pass in the order of
    arrival."""

    def __init__(self) -> None:
        self.is_shut = False
        self.waiting: dict[Callable[[], None], None] = {}
        self._holders: set[object] = set()

    def shut(self, holder: object) -> None:
        """Shut the gate, because `holder` is overloaded."""
        self._holders.add(holder)
        self.is_shut = True

    def wait(self, again: Callable[[], None]) -> None:
        """Call `again` once, when the gate is next opened."""
        self.waiting[again] = None

    def open(self, holder: object) -> None:
        """Stop holding the gate shut for `holder`. If no other holder remains, call the waiting connections in order,
        until one of them shuts the gate again."""
        self._holders.discard(holder)
        self.is_shut = bool(self._holders)
        while self.waiting and not self.is_shut:
            again = next(iter(self.waiting))
            del self.waiting[again]
            again()
