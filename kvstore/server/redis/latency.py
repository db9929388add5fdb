"""How long Redis commands take: one round of commands in so many is timed, so that the others cost a subtraction."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstore.env.histogram import Histogram
from kvstore.server.redis.parser import Command

EVERY = 16
"""One round in so many, over all connections, is timed: what a client sends at once is a round."""
_NAMES = ("GET", "SET", "DEL", "MGET", "MSET", "INCR", "SCAN", "EXEC", "PING")
_OTHER = "other"

Timed = tuple[int, Histogram, float]
"""The number of its first command on its connection, where its time goes, when it began."""


class CommandLatency:
    """Of one server. A round that is timed counts once, under the name of its first command."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.histograms: dict[str, Histogram] = {name: Histogram(1e-6) for name in (*_NAMES, _OTHER)}
        self.left = EVERY
        """Rounds until the next one that is timed."""
        self._by_word = {name.encode(): self.histograms[name] for name in _NAMES}
        self._now = now

    def begin(self, commands: Iterable[Command], number: int) -> Timed:
        """Time the round of these commands, which is over when command `number`, the first of them, is answered."""
        self.left = EVERY
        name = next((words[0].upper() for words in commands), b"")
        return number, self._by_word.get(name, self.histograms[_OTHER]), self._now()

    def end(self, timed: Timed) -> None:
        """The reply of its first command is about to be written."""
        _, histogram, at = timed
        histogram.add(self._now() - at)
