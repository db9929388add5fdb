"""Threads of a blocking client that wait because too many operations of a partition are in flight."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from kvstore.client.blocking.link import CallWaiter
from kvstore.client.core.operation import ClientOperation, Numbering
from kvstore.env import Clock


class AdmissionQueue:
    """The waiting operations of one client, which begin in order of arrival, partition by partition."""

    def __init__(self, lock: threading.Lock, clock: Clock) -> None:
        """`lock` is the client's lock, which guards the numberings."""
        self._lock, self._clock = lock, clock
        self.waiting: dict[Numbering, OrderedDict[CallWaiter, ClientOperation]] = {}
        """Waiters with their operations. A waiter's answer is True once its operation has begun, False if the client
        was closed."""

    def enqueue(self, numbering: Numbering, operation: ClientOperation) -> CallWaiter:
        """Queue an operation for which there is no free slot. Requires the lock."""
        waiter = CallWaiter()
        self.waiting.setdefault(numbering, OrderedDict())[waiter] = operation
        return waiter

    def wait(self, numbering: Numbering, waiter: CallWaiter, operation: ClientOperation) -> bool:
        """Wait until the operation begins because another one has ended. Returns False at the deadline, or if the
        client was closed."""
        is_interrupted = True  # KeyboardInterrupt, or a timeout of gevent
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
        """Begin an operation, as Numbering does. If there is no free slot, first end overdue operations. Requires the
        lock."""
        if numbering.begin(operation):
            return True
        return numbering.end_overdue(self._clock.now()) and numbering.begin(operation)

    def end(self, operations: Sequence[ClientOperation]) -> None:
        """End operations that have no waiter any more, and begin waiting ones."""
        with self._lock:
            for operation in operations:
                operation.numbering.end(operation)
            if self.waiting:
                for numbering in dict.fromkeys(operation.numbering for operation in operations):
                    self._give(numbering)

    def close(self) -> None:
        """Release all waiters. Requires the lock."""
        for waiter in [each for waiting in self.waiting.values() for each in waiting]:
            waiter.set(False)

    def _give(self, numbering: Numbering) -> None:
        """Begin the operations that have waited longest, as many as fit. Wake nobody else: with many waiters most
        wake-ups would be useless. Requires the lock."""
        waiting = self.waiting.get(numbering)
        while waiting:
            waiter, operation = next(iter(waiting.items()))
            if not waiter.is_answered:  # else the client was closed
                if not self.begin(numbering, operation):
                    return
                waiter.set(True)
            del waiting[waiter]
        self.waiting.pop(numbering, None)
