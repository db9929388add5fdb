"""Callbacks that are notified of a change."""

from __future__ import annotations

from collections.abc import Callable


class Listeners:
    """Callbacks, called in the order in which they were added, each until it is removed."""

    def __init__(self) -> None:
        self._calls: dict[int, Callable[[], None]] = {}
        self._last = 0

    def add(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` after each change. Returns a function that removes the callback."""
        self._last += 1
        number = self._last
        self._calls[number] = changed

        def end() -> None:
            self._calls.pop(number, None)

        return end

    def tell(self) -> None:
        """Notify of a change. A callback that is removed meanwhile is still notified of this one."""
        for changed in list(self._calls.values()):
            changed()
