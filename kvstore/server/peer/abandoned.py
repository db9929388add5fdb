"""Operations of another server that have waited here for longer than it waits for their answers.

Whoever asked for them was told so long ago. To do them all the same would keep those waiting that came later, whose
time runs out in turn: so a minute of large reads, which nobody takes, could stop a partition for all clients of that
server; and a write might be done long after its client had given it up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvstore.errors import Overloaded
from kvstore.server.peer.flow_control import OPERATION_TIMEOUT_S, Pace

LOOK_S = 0.5
"""Between two looks at what waits, while something does."""
REASON = Overloaded(f"it waited for {OPERATION_TIMEOUT_S:g} s behind others of its partition, and was not begun")


class Abandoned:
    """Those of one link. What is found goes out of the pace by `begin`, and is refused there."""

    def __init__(self, pace: Pace, now: Callable[[], float], begin: Callable[[], None]) -> None:
        self._pace, self._now, self._begin = pace, now, begin
        self._marks: deque[tuple[float, int]] = deque()
        """When which number was the newest that waited."""
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Look from now on, until nothing waits any more."""
        if self._timer is None:
            self._look()

    def end(self) -> None:
        """The link is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer, now = None, self._now()
        if not self._pace.waiting:
            self._marks.clear()
            return
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        before = self._pace.abandoned
        while self._marks and now - self._marks[0][0] >= OPERATION_TIMEOUT_S:
            self._pace.abandoned = self._marks.popleft()[1]
        self._marks.append((now, self._pace.newest()))
        if self._pace.abandoned > before:
            self._begin()
