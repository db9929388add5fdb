"""Queues reads at a leader while values are large. Each connection has a line, and the leader reads from the lines in
turn, so that a client which asks for thousands of large values delays only its own reads. Reads whose caller is gone
are skipped. Decides only.

In a line, reads whose proof has arrived (docs/protocol.md P19) come first: they arrived before the proof was sent.
Reads behind them still need a proof or a lease.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile

from kvstore.partition.state.commands import Op, Sink

Read = tuple[Op, Sink, int]


class Proved(Read):
    """A read whose proof has arrived. It may be answered as soon as there is a turn for it."""


DROPPED_MAX = 4_096
"""Approximate maximum number of reads that one `take` drops. Each is answered, which takes a microsecond."""


class ReadLines:
    """The lines of reads at one leader. Reads of one line keep their order, so that each sees at least the state of the
    one before it."""

    def __init__(self) -> None:
        self._lines: OrderedDict[object, deque[Read]] = OrderedDict()
        """The lines, by `Sink.line`. The first line is served next."""
        self.count = 0
        """Number of reads in all lines. A plain attribute, because it is checked in every turn."""
        self.dropped: list[Read] = []
        """Reads that `take` skipped because their caller is gone. The caller of `take` answers them."""

    def __iter__(self) -> Iterator[Read]:
        for line in self._lines.values():
            yield from line

    def add(self, reads: Iterable[Read]) -> None:
        """Append reads to the ends of their lines."""
        for read in reads:
            self._lines.setdefault(read[1].line, deque()).append(read)
            self.count += 1

    def put_back(self, reads: list[Read]) -> None:
        """Put reads in front of all others. They were taken in this order and not read."""
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
        """Put reads whose proof has arrived behind the proved reads of their line, in front of the others."""
        arrived: dict[object, list[Read]] = {}
        for read in reads:
            arrived.setdefault(read[1].line, []).append(Proved(read))
        for name, some in arrived.items():
            line = self._lines.setdefault(name, deque())
            before = sum(1 for _ in takewhile(_is_proved, line))
            self._lines[name] = deque([*islice(line, before), *some, *islice(line, before, None)])
            self.count += len(some)

    def take(self, most: int) -> list[Read]:
        """Take one read of each line in turn, up to `most`. Reads that no caller waits for any more go to `dropped`."""
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
        """Remove all reads, and return them."""
        every = list(self)
        self._lines.clear()
        self.count = 0
        return every


def _is_proved(read: Read) -> bool:
    return read.__class__ is Proved
