"""The Nursery port on asyncio: tasks with an owner, an order and a name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from kvstore.env.ports import Task

logger = logging.getLogger(__name__)

T = TypeVar("T")
OnError = Callable[[str, BaseException], object]


async def shielded(work: Awaitable[T]) -> T:
    """Wait for a task or future. If the caller is cancelled, the task continues and its outcome is ignored. (From
    Python 3.14 on, asyncio.shield reports a later error to the loop's exception handler.)"""
    future = asyncio.ensure_future(work)
    if not future.done():
        future.add_done_callback(_retrieve_error)
        await asyncio.wait((future,))
    return future.result()


def _retrieve_error(future: asyncio.Future[Any]) -> None:
    """Retrieve the error, so that asyncio does not report it as never retrieved."""
    if not future.cancelled():
        future.exception()


class TaskNursery:
    """Owns the tasks and nurseries that are started in it, and ends them in that order.

    An error that leaves a task is logged with the task's name and passed to `on_error`; other tasks continue. Each task
    runs in a copy of `context`, by default that of its caller.
    """

    def __init__(self, name: str, *, on_error: OnError | None = None, context: Context | None = None) -> None:
        self.name = name
        self._on_error = on_error
        self._context = context
        self._members: dict[asyncio.Task[Any] | TaskNursery, None] = {}
        self._is_closed = False
        self._parent: TaskNursery | None = None
        self._idle: asyncio.Future[None] | None = None

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> Task:
        """Start a task. Raises RuntimeError once the nursery is closed."""
        if self._is_closed:
            work.close()
            raise RuntimeError(f"nursery {self.name} is closed; it cannot start {name}")
        context = None if self._context is None else self._context.copy()
        task = asyncio.get_running_loop().create_task(work, name=f"{self.name}/{name}", context=context)
        self._members[task] = None
        task.add_done_callback(self._ended)
        return task

    def child(self, name: str) -> TaskNursery:
        """Return a nursery that ends with this one. Raises RuntimeError once the nursery is closed."""
        if self._is_closed:
            raise RuntimeError(f"nursery {self.name} is closed; it cannot have a child {name}")
        child = TaskNursery(f"{self.name}/{name}", on_error=self._on_error, context=self._context)
        child._parent = self
        self._members[child] = None
        return child

    async def close(self) -> None:
        """Cancel the running tasks, oldest first, and wait for them, except for the task that calls this.

        Nothing can be started afterwards. A second call waits like the first one.
        """
        self._is_closed = True
        me = asyncio.current_task()
        for member in list(self._members):
            if isinstance(member, TaskNursery):
                await member.close()
            elif member is not me:
                member.cancel()
        while any(member is not me for member in self._members):
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            await shielded(self._idle)
        if self._parent is not None:
            self._parent._members.pop(self, None)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._members.pop(task, None)
        if self._idle is not None:
            idle, self._idle = self._idle, None
            idle.set_result(None)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            logger.error("task %s failed", task.get_name(), exc_info=error)
            if self._on_error is not None:
                self._on_error(task.get_name(), error)
