"""How a blocking session waits, renews and ends: the part of a session that differs from asyncio (tasks.py).

Workers run the steps of callers (kvstore.rpc.workers), so an exception that strikes a caller's thread interrupts no
step. One thread of the session renews the lease.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kvstore.client.blocking.stream import end_in
from kvstore.client.blocking.watch import Watch
from kvstore.client.coordination.lease import CLOSE_S, SessionLease
from kvstore.client.coordination.steps import Found, NotInTime, Recipe
from kvstore.client.core import forks
from kvstore.client.core.batch import Batch
from kvstore.env.library_env import LibraryEnv
from kvstore.errors import StoreError
from kvstore.rpc import workers

T = TypeVar("T")


class RecipeCaller:
    """The caller of a recipe, as the worker sees it that runs a step for the caller."""

    has_left = False
    """True once the caller was interrupted: its write must not follow the write that undoes it."""
    waits: Watch | None = None
    """Watch of the step that waits for a change. Once the caller has gone, nobody else closes it."""

    def __init__(self, lease: SessionLease) -> None:
        self._lease = lease
        self._new: Sequence[bytes] = ()
        """Keys that a step has added to the session, until the caller has received the result."""

    # docs/protocol.md Q6
    def wrote(self, new: Sequence[bytes]) -> None:
        """Record that a step has added these keys to the session. The session keeps them only if the caller receives
        the result."""
        self._new = new
        if self.has_left:
            self._forget_new()

    def received(self) -> None:
        """Record that the caller has received the result of its step."""
        self._new = ()

    def _forget_new(self) -> None:
        for key in self._new:
            self._lease.forget(key)

    def leave(self, recipe: Recipe[Any]) -> None:
        """End the recipe and the step that a worker may still run, because the caller takes no more steps."""
        self.has_left = True
        recipe.close()
        self._forget_new()
        if (waits := self.waits) is not None:
            workers.start(workers.Job(waits.close))


class SessionRunner:
    """The threads of one session: the thread that renews the lease, and the threads that wait for their turn or a
    change."""

    def __init__(self, env: LibraryEnv, lease: SessionLease) -> None:
        self._env, self.lease = env, lease
        self.lost = threading.Event()
        self._make_locks()
        self._wake = threading.Event()
        self._waits: dict[Watch, None] = {}
        """The watches of threads that wait for a change. The end of the session closes them. Guarded by `_guard`."""
        self._keeper: threading.Thread | None = None
        forks.watch(self)

    def _make_locks(self) -> None:
        self._mutex, self._guard = threading.Lock(), threading.Lock()

    def after_fork_in_child(self) -> None:
        """See kvstore.client.core.forks."""
        self._make_locks()  # a thread that does not exist in the child may hold them
        self.lost, self._wake, self._waits, self._keeper = threading.Event(), threading.Event(), {}, None
        self.lost.set()
        self.lease.end()

    def _run_step(self, step: Callable[[], T]) -> T:
        """Run a step in a worker for the caller."""
        return workers.run(step)

    def _run_step_or_undo(self, step: Callable[[], T], undo: Callable[[], None]) -> T:
        """Run a step in a worker for the caller, and undo it in another worker if the caller is interrupted."""
        try:
            return workers.run(step)
        except StoreError:
            raise
        except BaseException:
            workers.start(workers.Job(undo))
            raise

    @contextmanager
    def _turn(self, left_s: float | None, caller: RecipeCaller | None) -> Iterator[None]:
        """Serialize the batches of the session. Raises NotInTime."""
        if not self._mutex.acquire(timeout=-1 if left_s is None else left_s):
            raise NotInTime("the session was busy with other writes until the deadline")
        try:
            if caller is not None and caller.has_left:
                raise NotInTime("the caller was interrupted before its turn")
            yield
        finally:
            self._mutex.release()

    def _watched(
        self, changes: Watch, wait_in: Callable[[Watch], Found | None], left_s: float | None, caller: RecipeCaller
    ) -> Found | None:
        """Return the result of `wait_in`, or None once the timeout has expired or the session has ended."""
        if left_s is not None:
            end_in(changes, left_s)
        with self._guard:
            self._waits[changes] = None
        caller.waits = changes
        try:
            if caller.has_left or not self.lease.is_alive(self._env.clock.now()):
                return None
            changes.ready()
            return wait_in(changes)
        finally:
            caller.waits = None
            with self._guard:
                del self._waits[changes]
            changes.close()

    def _start(self, renew: Callable[[], None]) -> bool:
        """Start the thread that renews the lease. Return False if the session was closed before."""
        if self.lost.is_set():
            return False
        self._keeper = threading.Thread(target=self._keep_alive, args=(renew,), name="kvstore session", daemon=True)
        self._keeper.start()
        return True

    def _keep_alive(self, renew: Callable[[], None]) -> None:
        try:
            renew()
        finally:
            self._over()

    def _pause(self, seconds: float) -> None:
        """Wait, at most until `_wake` is set."""
        self._wake.wait(seconds)
        self._wake.clear()

    def _pause_before_retry(self, seconds: float) -> None:
        """Wait before the next attempt to renew, or until the session has ended."""
        self.lost.wait(seconds)

    def _drop_discarded(self) -> None:
        """Delete the keys that the lease has discarded now."""
        workers.run(self._wake.set)

    def _end(self) -> Batch:
        """End the session here, and return the batch that ends it in the store."""
        is_free = self._mutex.acquire(timeout=CLOSE_S)  # let the current write end
        closing = self.lease.closing()
        self._over()
        if is_free:
            self._mutex.release()
        self._wake.set()
        if self._keeper is not None and self._keeper is not threading.current_thread():
            self._keeper.join(CLOSE_S)
        return closing

    def _over(self) -> None:
        self.lease.end()
        with self._guard:
            waits = list(self._waits)
        for each in waits:
            each.close()
        self.lost.set()  # last: callers wait for it, and a caller that is interrupted may keep the lock of the event
