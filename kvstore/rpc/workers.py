"""Worker threads that make the blocking clients' calls, so that no exception in a caller's thread can interrupt a step.

Python raises an exception between any two steps of a thread: from a signal handler (Ctrl-C, Celery's soft time limit,
`signal.alarm`), from `PyThreadState_SetAsyncExc`, and from a gevent timeout in a greenlet. If the exception strikes
while gRPC holds the lock of a channel, gRPC keeps that lock, and every later call on the channel waits for it forever.
A client's locks, request ids and counters are equally vulnerable, and a `finally` block does not help: the exception
can strike there too.

Therefore none of this happens in a caller's thread. A caller hands over a job and waits for its outcome on its own
lock, for a bounded time. Signal handlers run only in the main thread, and no other code knows the worker threads, so a
job always runs to its end. An interrupted caller leaves nothing behind but a job, which ends at its own deadline.

There is one pool per process. An idle worker ends after IDLE_S. In the child of a fork the pool starts empty. While the
interpreter exits, no thread can start (Python 3.12 and later), so a job without an idle worker runs in the thread of
its caller: `atexit` handlers release locks and write what remains.
"""

from __future__ import annotations

import _thread
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from math import inf
from typing import Any, Generic, TypeVar

from kvstore.errors import Overloaded

T = TypeVar("T")
IDLE_S = 10.0
THREADS_MAX = 10_000
"""Maximum number of jobs in progress in one process. A further job is refused."""
AT_EXIT = "at interpreter shutdown"
"""Python's text for a thread that cannot start because the interpreter exits."""


class Late(Exception):
    """Raised when a job does not end in time. The job may still end later, when nobody waits for its outcome."""


class Job(Generic[T]):
    """A function call that a worker thread runs once, in the caller's context variables, and the outcome of the
    call."""

    __slots__ = ("_claim", "_ended", "_error", "_function", "_result", "is_over")

    _error: BaseException | None

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = partial(
            copy_context().run, function
        )  # keeps the caller's tracing span
        self._claim, self._ended = threading.Lock(), threading.Lock()
        self._ended.acquire()
        self._result: Any = None
        self._error = None
        self.is_over = False
        """True once `wait` returns without delay."""

    def wait(self, wait_s: float = inf) -> T:
        """Wait for the function and return its result or raise its error. Can be called once. Raises Late after
        `wait_s` seconds."""
        if not self.join(wait_s):
            raise Late
        error = self._error
        if error is None:
            result: T = self._result
            return result
        self._error = None
        try:
            raise error
        finally:
            # The error's traceback names this frame and the frame of `run`, which names the job. If the error stayed
            # reachable from them, it would keep itself and the caller's values alive until a garbage collection.
            del error, self

    def join(self, wait_s: float = inf) -> bool:
        """Wait until the function has ended. Return False if that takes longer than `wait_s` seconds."""
        if not self.is_over and self._ended.acquire(timeout=min(max(0.0, wait_s), threading.TIMEOUT_MAX)):
            self._ended.release()
        return self.is_over

    def run(self, ending: Callable[[], object]) -> None:
        """Run the function unless another worker already runs it. `ending` is called right before the caller is
        woken."""
        if not self._claim.acquire(blocking=False):
            ending()
            return
        function, self._function = self._function, None
        assert function is not None, "a job is claimed once"
        try:
            self._result = function()
        except BaseException as error:  # noqa: BLE001  # the caller raises it
            self._error = error
        ending()
        self.is_over = True
        self._ended.release()


class Workers:
    """The worker threads of one process."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job[Any]] = queue.SimpleQueue()
        self._idle: deque[None] = deque()
        """One item for each worker that waits at the queue. A caller removes one item before it queues a job."""
        self.idents = set[int]()

    def start(self, job: Job[Any]) -> None:
        """Let a worker run the job. Idempotent. Raises Overloaded if the process cannot start another thread."""
        try:
            self._idle.pop()
        except IndexError:
            self._start_thread(job)
        else:
            self._jobs.put(job)

    def _start_thread(self, job: Job[Any]) -> None:
        if len(self.idents) >= THREADS_MAX:
            raise Overloaded(
                f"expected at most {THREADS_MAX:,} concurrent calls of blocking clients, got more; use fewer threads"
            )
        try:
            # One step, unlike Thread.start, which waits on an event: if interrupted, it may keep the event's lock.
            _thread.start_new_thread(self._work, (job,))
        except RuntimeError as error:
            if AT_EXIT in str(error):
                job.run(lambda: None)
                return
            raise Overloaded(f"a blocking client needs a thread, and the process cannot start one: {error}") from error

    def _work(self, first: Job[Any]) -> None:
        ident = threading.get_ident()
        self.idents.add(ident)
        job: Job[Any] | None = first
        del first  # its result may be large, and belongs to the caller alone
        try:
            while job is not None:
                job.run(self._is_idle)
                job = None
                job = self._next()
        finally:
            self.idents.discard(ident)

    def _is_idle(self) -> None:
        self._idle.append(None)

    def _next(self) -> Job[Any] | None:
        """Return the next job, or None if this worker has been idle for too long."""
        while True:
            try:
                return self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                try:
                    self._idle.pop()
                except IndexError:
                    continue  # a caller has just reserved this worker: its job follows
                return None


_workers: Workers | None = None
"""Created by the first call, because gevent's patches may come after the import."""


def workers() -> Workers:
    """Return the worker pool of the process."""
    global _workers
    found = _workers
    if found is None:
        found = _workers = Workers()
    return found


def start(job: Job[Any]) -> None:
    """Let a worker of the process's pool run the job. Idempotent, so a caller that was interrupted here may call it
    again with the same job. Raises Overloaded."""
    workers().start(job)


def run(function: Callable[[], T], wait_s: float = inf) -> T:
    """Call the function in a worker thread and return its result or raise its error. Raises Late after `wait_s`
    seconds. If the caller is a worker itself, the function runs in that thread, without a time limit."""
    if is_worker():
        return function()
    job = Job(function)
    start(job)
    return job.wait(wait_s)


def is_worker() -> bool:
    """Return True if the current thread is a worker. Jobs that a worker starts run in its own thread."""
    return threading.get_ident() in workers().idents


def run_within(function: Callable[[], object], wait_s: float) -> None:
    """Call a function that may hang, in another worker thread. The caller waits for at most `wait_s` seconds."""
    job = Job(function)
    try:
        start(job)
    except Overloaded:  # also while the process exits, when no thread can start
        job.run(lambda: None)
    with suppress(Late):
        job.wait(wait_s)


def _forget_parents_workers() -> None:
    global _workers
    _workers = None


if hasattr(os, "register_at_fork"):  # where there are forks
    os.register_at_fork(after_in_child=_forget_parents_workers)
