"""How a session on asyncio waits, renews and ends: the part of a session that differs from threads (threads.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from kvstore.client.aio.watch import AsyncWatch
from kvstore.client.coordination.lease import CLOSE_S, SessionLease
from kvstore.client.coordination.steps import Found, NotInTime, Recipe
from kvstore.client.core import forks
from kvstore.client.core.batch import Batch
from kvstore.env.events import wait_within
from kvstore.env.library_env import LibraryEnv

T = TypeVar("T")


class RecipeCaller:
    """The caller of a recipe. If the caller is cancelled, its step ends too, and records nothing."""

    def __init__(self, lease: SessionLease) -> None:
        pass

    def wrote(self, new: Sequence[bytes]) -> None:
        """Do nothing, because the caller receives the result in the same turn of the event loop."""

    def received(self) -> None:
        """Do nothing, as `wrote` does."""

    def leave(self, recipe: Recipe[Any]) -> None:
        """End the recipe, because the caller takes no more steps."""
        recipe.close()


class SessionRunner:
    """The tasks of one session: the task that renews the lease, and the tasks that wait for their turn or a change."""

    def __init__(self, env: LibraryEnv, lease: SessionLease) -> None:
        self._env, self.lease = env, lease
        self.lost = asyncio.Event()
        self._mutex, self._wake = asyncio.Lock(), asyncio.Event()
        self._waits = set[asyncio.Timeout]()
        """The timeouts of tasks that wait for a change. The end of the session ends them."""
        self._is_closing = self._is_forked = False
        forks.watch(self)

    def after_fork_in_child(self) -> None:
        """See kvstore.client.core.forks."""
        self._is_closing = self._is_forked = True
        self.lost = asyncio.Event()
        self.lost.set()
        self.lease.end()

    def _run_step(self, step: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """Run a step for the caller."""
        return step()

    def _run_step_or_undo(self, step: Callable[[], Awaitable[T]], undo: Callable[[], Awaitable[None]]) -> Awaitable[T]:
        """Run a step for the caller. If the caller is cancelled, the step ends too, so nothing must be undone."""
        return step()

    @asynccontextmanager
    async def _turn(self, left_s: float | None, caller: RecipeCaller | None) -> AsyncIterator[None]:
        """Serialize the batches of the session. Raises NotInTime."""
        if not await _acquired(self._mutex, left_s):
            raise NotInTime("the session was busy with other writes until the deadline")
        try:
            yield
        finally:
            self._mutex.release()

    async def _watched(
        self,
        changes: AsyncWatch,
        wait_in: Callable[[AsyncWatch], Awaitable[Found | None]],
        left_s: float | None,
        caller: RecipeCaller,
    ) -> Found | None:
        """Return the result of `wait_in`, or None once the timeout has expired or the session has ended."""
        if not self.lease.is_alive(self._env.clock.now()):
            return None
        try:
            async with asyncio.timeout(left_s) as wait:
                self._waits.add(wait)
                try:
                    async with changes:
                        return await wait_in(changes)
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            return None

    def _start(self, renew: Callable[[], Awaitable[None]]) -> bool:
        """Start the task that renews the lease. Return False if the session was closed before."""
        if self._is_closing or self.lost.is_set():
            return False
        self._env.nursery.spawn(self._keep_alive(renew), name="keep alive")
        return True

    async def _keep_alive(self, renew: Callable[[], Awaitable[None]]) -> None:
        try:
            await renew()
        finally:
            if not self._is_closing:
                self._over()

    async def _pause(self, seconds: float) -> None:
        """Wait, at most until `_wake` is set."""
        await wait_within(self._wake, seconds)
        self._wake.clear()

    async def _pause_before_retry(self, seconds: float) -> None:
        """Wait before the next attempt to renew."""
        await asyncio.sleep(seconds)

    def _drop_discarded(self) -> None:
        """Delete the keys that the lease has discarded now."""
        self._wake.set()

    async def _end(self) -> Batch:
        """End the session here, and return the batch that ends it in the store."""
        if self._is_forked:
            return self.lease.closing()  # the task that renews belongs to the parent
        self._is_closing = True
        try:
            await self._env.nursery.close()
            is_free = await _acquired(self._mutex, CLOSE_S)  # let the current write end
            closing = self.lease.closing()
            self._over()
            if is_free:
                self._mutex.release()
            return closing
        finally:
            if not self.lost.is_set():  # it was cancelled: nobody renews the session any more
                self._over()

    def _over(self) -> None:
        self.lease.end()
        self.lost.set()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0.0)


async def _acquired(lock: asyncio.Lock, wait_s: float | None) -> bool:
    """Acquire the lock. Returns False if that takes longer than `wait_s` seconds."""
    try:
        async with asyncio.timeout(wait_s):
            return await lock.acquire()
    except TimeoutError:
        return False
