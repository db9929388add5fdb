"""Queues reads at a leader while values are large. Each connection has its own line, and the leader takes reads
from the lines in turn, so that a client that requests thousands of large values delays only its own reads. Reads whose
caller is gone are skipped. Decides only.

In a line, reads whose proof has arrived (docs/protocol.md P19) come first, because they arrived before the proof was
sent. The reads behind them still need a proof or a lease.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile

from kvstore.partition.state.commands import Op, Sink

Read = tuple[Op, Sink, int]


class Proved(Read):
    """A read whose proof has arrived. It may be answered as soon as there is a turn for it."""

    since = 0.0
    """Time of the clock in seconds at which the read began to wait for transactions; 0 if it has not."""


DROPPED_MAX = 4_096
"""Approximate maximum number of reads that one `take` drops. Each is answered, which takes a microsecond."""


class ReadLines:
    """The lines of waiting reads at one leader. Reads in a line keep their order, so that each read sees a state at
    least as new as the read before it."""

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
        """Put reads at the front again. They were taken in this order and have not been carried out."""
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
        """Add reads whose proof has arrived: behind the proved reads in their line and in front of the others."""
        arrived: dict[object, list[Read]] = {}
        for read in reads:
            arrived.setdefault(read[1].line, []).append(Proved(read))
        for name, some in arrived.items():
            line = self._lines.setdefault(name, deque())
            before = sum(1 for _ in takewhile(_is_proved, line))
            self._lines[name] = deque([*islice(line, before), *some, *islice(line, before, None)])
            self.count += len(some)

    def take(self, most: int) -> list[Read]:
        """Remove and return up to `most` reads, one from each line in turn. Reads whose caller is gone go to `dropped`
        instead."""
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
        """Remove and return all reads."""
        every = list(self)
        self._lines.clear()
        self.count = 0
        return every


def _is_proved(read: Read) -> bool:
    return read.__class__ is Proved
