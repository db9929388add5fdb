"""The threads of a blocking client that wait because as much of a partition is under way as may be."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from kvstore.client.blocking.link import CallWaiter
from kvstore.client.core.operation import ClientOperation, Numbering
from kvstore.env import Clock


class AdmissionQueue:
    """The room of one client: each partition's, in which operations begin in the order of coming."""

    def __init__(self, lock: threading.Lock, clock: Clock) -> None:
        """`lock` is the client's, which guards the numberings."""
        self._lock, self._clock = lock, clock
        self.waiting: dict[Numbering, OrderedDict[CallWaiter, ClientOperation]] = {}
        """Answered whether the operation has begun; not if the client was closed."""

    def enqueue(self, numbering: Numbering, operation: ClientOperation) -> CallWaiter:
        """Take in one for which there is no room. With the lock."""
        waiter = CallWaiter()
        self.waiting.setdefault(numbering, OrderedDict())[waiter] = operation
        return waiter

    def wait(self, numbering: Numbering, waiter: CallWaiter, operation: ClientOperation) -> bool:
        """Return once the operation has begun, by the end of another; False if its time is over before, or the client
        was closed."""
        is_interrupted = True  # KeyboardInterrupt, a timeout of gevent
        try:
            waiter.wait(operation.deadline - self._clock.now())
            is_interrupted = False
        finally:
            with self._lock:
                has_begun = waiter.answer is True
                if not has_begun:
                    self.waiting.get(numbering, OrderedDict()).pop(waiter, None)
                elif is_interrupted:
                    numbering.end(operation)
                self._give(numbering)
        return has_begun

    def begin(self, numbering: Numbering, operation: ClientOperation) -> bool:
        """Take an operation in, as Numbering does; if there is no room, first end what should have ended long ago. With
        the lock."""
        if numbering.begin(operation):
            return True
        return numbering.end_overdue(self._clock.now()) and numbering.begin(operation)

    def end(self, operations: Sequence[ClientOperation]) -> None:
        """Nobody waits for the operations any more: others have their room."""
        with self._lock:
            for operation in operations:
                operation.numbering.end(operation)
            if self.waiting:
                for numbering in dict.fromkeys(operation.numbering for operation in operations):
                    self._give(numbering)

    def close(self) -> None:
        """Let all go that wait. With the lock."""
        for waiter in [each for waiting in self.waiting.values() for each in waiting]:
            waiter.set(False)

    def _give(self, numbering: Numbering) -> None:
        """Begin what has waited longest, as much as there is room for, and wake nobody else: of many who wait most
        would wake for nothing, each time. With the lock."""
        waiting = self.waiting.get(numbering)
        while waiting:
            waiter, operation = next(iter(waiting.items()))
            if not waiter.is_answered:  # else the client was closed
                if not self.begin(numbering, operation):
                    return
                waiter.set(True)
            del waiting[waiter]
        self.waiting.pop(numbering, None)
