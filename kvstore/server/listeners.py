"""A list of callbacks that are called after a change."""

from __future__ import annotations

from collections.abc import Callable


class Listeners:
    """Callbacks, called in the order in which they were added. A callback stays until it is removed."""

    def __init__(self) -> None:
        self._calls: dict[int, Callable[[], None]] = {}
        self._last = 0

    def add(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Register `changed`, which is called after each change. Returns a function that removes it."""
        self._last += 1
        number = self._last
        self._calls[number] = changed

        def end() -> None:
            self._calls.pop(number, None)

        return end

    def notify(self) -> None:
        """Call every callback. A callback that is removed by an earlier callback is still called this time."""
        for changed in list(self._calls.values()):
            changed()
