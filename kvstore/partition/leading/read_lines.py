"""Reads that wait at a leader while values are large. Each connection has a line, and the leader reads one of each line
in turn, so that a client which asks for thousands of large values delays its own reads alone. Reads whose caller is
gone are not done. Decides only.

In a line those whose proof has come (docs/protocol.md P19) stand in front: they had arrived before it was sent, and
what is behind them needs one still, or a lease.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile

from kvstore.partition.state.commands import Op, Sink

Read = tuple[Op, Sink, int]


class Proved(Read):
    """A read whose proof has come: it may be answered whenever there is a turn for it."""


DROPPED_MAX = 4_096
"""Reads that one `take` drops, or little more: each is answered, which takes a microsecond."""


class ReadLines:
    """The lines of reads at one leader. Reads of one line keep their order: each sees no less than the one before
    it."""

    def __init__(self) -> None:
        self._lines: OrderedDict[object, deque[Read]] = OrderedDict()
        """The lines, by `Sink.line`; the one that is served next is the first."""
        self.count = 0
        """How many wait in all of them. A plain attribute: it is looked at in each turn."""
        self.dropped: list[Read] = []
        """Reads that `take` has passed over because their caller is gone: the caller of `take` answers them."""

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
        front: dict[object, None] = {}
        for read in reversed(reads):
            name = read[1].line
            self._lines.setdefault(name, deque()).appendleft(read)
            front.pop(name, None)
            front[name] = None  # the line whose first read comes first is the last here
        for name in front:
            self._lines.move_to_end(name, last=False)
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
        """One of each line in turn, up to `most`; what nobody waits for any more goes to `dropped`."""
        taken: list[Read] = []
        dropped = self.dropped = []
        while self._lines and len(taken) < most and len(dropped) < DROPPED_MAX:
            name, line = self._lines.popitem(last=False)
            while line and line[0][1].is_gone:
                dropped.append(line.popleft())
            if line:
                taken.append(line.popleft())
            if line:
                self._lines[name] = line
        self.count -= len(taken) + len(dropped)
        return taken

    def clear(self) -> list[Read]:
        """Take all reads out, and return them."""
        every = list(self)
        self._lines.clear()
        self.count = 0
        return every


def _is_proved(read: Read) -> bool:
    return read.__class__ is Proved
