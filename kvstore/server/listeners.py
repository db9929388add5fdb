"""Those who are told of a change."""

from __future__ import annotations

from collections.abc import Callable


class Listeners:
    """Called in the order in which they came, each until it ends that."""

    def __init__(self) -> None:
        self._calls: dict[int, Callable[[], None]] = {}
        self._last = 0

    def add(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` after each change; returns what ends that."""
        self._last += 1
        number = self._last
        self._calls[number] = changed

        def end() -> None:
            self._calls.pop(number, None)

        return end

    def tell(self) -> None:
        """There is a change. Whoever ends it meanwhile is still told of this one."""
        for changed in list(self._calls.values()):
            changed()
