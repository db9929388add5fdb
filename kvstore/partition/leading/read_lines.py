"""Reads that wait at a leader while values are large. Each connection has a line, and the leader reads one of each line
in turn, so that a client which asks for thousands of large values delays its own reads alone. Decides only.

In a line those whose proof has come (docs/protocol.md P19) stand in front: they had arrived before it was sent, and
what is behind them needs one still, or a lease.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile

from kvstore.partition.state.commands import Op, Sink

Read = tuple[Op, Sink, int]


class Proved(Read):
    """A read whose proof has come: it may be answered whenever there is a turn for it."""


class ReadLines:
    """Reads of one line keep their order: each sees no less than the one before it."""

    def __init__(self) -> None:
        self._lines: dict[object, deque[Read]] = {}
        """By `Sink.line`; the one that is served next is the first."""
        self.count = 0
        """How many wait in all of them. A plain attribute: it is looked at in each turn."""

    def __iter__(self) -> Iterator[Read]:
        for line in self._lines.values():
            yield from line

    def add(self, reads: Iterable[Read]) -> None:
        """Let them wait behind those of their line."""
        for read in reads:
            self._lines.setdefault(read[1].line, deque()).append(read)
            self.count += 1

    def put_back(self, reads: list[Read]) -> None:
        """Let them wait in front of all others: they were taken, in this order, and not read."""
        front: dict[object, deque[Read]] = {}
        for read in reads:
            front.setdefault(read[1].line, deque()).append(read)
        for name, line in front.items():
            line.extend(self._lines.pop(name, ()))
        self._lines = front | self._lines
        self.count += len(reads)

    def add_proved(self, reads: Iterable[Read]) -> None:
        """Let reads whose proof has come wait behind those of their line that have theirs, in front of the others."""
        arrived: dict[object, list[Read]] = {}
        for read in reads:
            arrived.setdefault(read[1].line, []).append(Proved(read))
        for name, some in arrived.items():
            line = self._lines.setdefault(name, deque())
            before = sum(1 for _ in takewhile(_is_proved, line))
            self._lines[name] = deque([*islice(line, before), *some, *islice(line, before, None)])
            self.count += len(some)

    def take(self, most: int) -> list[Read]:
        """One of each line in turn, up to `most`."""
        taken: list[Read] = []
        while self._lines and len(taken) < most:
            name = next(iter(self._lines))
            line = self._lines.pop(name)
            taken.append(line.popleft())
            if line:
                self._lines[name] = line
        self.count -= len(taken)
        return taken

    def clear(self) -> list[Read]:
        """All of them; none waits any more."""
        every = list(self)
        self._lines.clear()
        self.count = 0
        return every


def _is_proved(read: Read) -> bool:
    return read.__class__ is Proved
