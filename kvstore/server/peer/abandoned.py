"""Finds operations from another server that have waited here longer than that server waits for the answers.

The clients of these operations have already received a timeout. If the operations were still executed, later operations
would wait behind them until they time out as well. For example, a minute of large reads that no client takes could
block a partition for all clients of that server, and a write might be executed long after its client gave up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvstore.errors import Overloaded
from kvstore.server.peer.flow_control import OPERATION_TIMEOUT_S, FlowControl

CHECK_S = 0.5
"""Interval in seconds of the check while operations wait."""
REASON = Overloaded(
    f"the operation waited for {OPERATION_TIMEOUT_S:g} s behind others of its partition and was not started"
)


class Abandoned:
    """Finds the abandoned operations of one link. `begin` removes them from the queue and refuses them."""

    def __init__(self, flow: FlowControl, now: Callable[[], float], begin: Callable[[], None]) -> None:
        self._flow, self._now, self._begin = flow, now, begin
        self._samples: deque[tuple[float, int]] = deque()
        """The time of each check, and the number of the newest operation that was waiting then."""
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Check regularly until no operation waits."""
        if self._timer is None:
            self._check()

    def end(self) -> None:
        """Stop checking, because the link was lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer, now = None, self._now()
        if not self._flow.waiting:
            self._samples.clear()
            return
        self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._check)
        before = self._flow.abandoned
        while self._samples and now - self._samples[0][0] >= OPERATION_TIMEOUT_S:
            self._flow.abandoned = self._samples.popleft()[1]
        self._samples.append((now, self._flow.newest()))
        if self._flow.abandoned > before:
            self._begin()
