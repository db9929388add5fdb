"""The latency of Redis commands. One round of commands in 16 is timed, so the other rounds cost only a subtraction."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstore.env.histogram import Histogram
from kvstore.env.slow_log import SlowLog
from kvstore.server.redis.commands.table import COMMANDS
from kvstore.server.redis.parser import Words

EVERY = 16
"""One in this many rounds is timed, over all connections. A round is the commands that a client sends at once."""
_NAMES = ("GET", "SET", "DEL", "MGET", "MSET", "INCR", "SCAN", "EXEC", "PING")
_OTHER = "other"

Timed = tuple[int, Histogram, float, Words]
"""The number of the round's first command on its connection, the histogram for the latency, the start time, the
command."""
_KEYED = frozenset((b"GET", b"SET", b"DEL", b"MGET", b"MSET", b"INCR"))
"""Commands whose first argument is a key. The first argument of others may be secret, such as a password."""


class CommandLatency:
    """Times the commands of one server. A timed round counts once, under the name of its first command."""

    def __init__(self, now: Callable[[], float], slow: SlowLog) -> None:
        self.histograms: dict[str, Histogram] = {name: Histogram(1e-6) for name in (*_NAMES, _OTHER)}
        self.left = EVERY
        """Rounds until the next timed one."""
        self._by_word = {name.encode(): self.histograms[name] for name in _NAMES}
        self._now, self._slow, self._slow_s = now, slow, slow.limit_s

    def begin(self, commands: Iterable[Words], number: int) -> Timed:
        """Start timing a round of these commands. The round ends when its first command, which has this number, is
        answered."""
        self.left = EVERY
        words = next(iter(commands), [b""])
        return number, self._by_word.get(words[0].upper(), self.histograms[_OTHER]), self._now(), words

    def end(self, timed: Timed) -> None:
        """Record the latency of the round. Call this right before the reply to its first command is written."""
        _, histogram, at, words = timed
        took = self._now() - at
        histogram.add(took)
        if took > self._slow_s:
            self._note_slow(words, took)

    def _note_slow(self, words: Words, took: float) -> None:
        name = words[0].upper()
        key = words[1] if name in _KEYED and len(words) > 1 else None
        self._slow.note("endpoint", name.decode() if name in COMMANDS else _OTHER, took, key=key)
