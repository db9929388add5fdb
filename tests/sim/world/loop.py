"""An asyncio event loop with virtual time, seeded interleaving, and processes that can crash and pause.

Order: each process has a FIFO ready queue, as asyncio promises to the code that runs on it. The seed decides, handle by
handle, whose queue is served next. Time stops while any process has a ready handle, then jumps to the next timer.
Timers of one instant become ready in the order in which they were set.

Ownership: a handle belongs to the process in its context (`current_node`). Contexts propagate through call_soon,
call_later and create_task, so a process owns everything that it starts. Handles without a process belong to the test.

A crash is not a cancellation: the handles of a crashed process are dropped without running. Its tasks are kept until
the loop is closed, so that neither `finally` nor garbage collection runs a line of them before.
"""

# A loop overrides what asyncio keeps to itself.
# mypy: disable-error-code="override,attr-defined,assignment"

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from heapq import heapify, heappop, heappush
from random import Random
from typing import Any, NoReturn
from weakref import WeakSet

logger = logging.getLogger(__name__)

HANDLES_PER_INSTANT_MAX = 200_000
_CLOSES_MAX = 1000
"""Maximum number of times that a coroutine is closed that does not end: once for each await in its `finally` blocks."""
_ROUNDS_MAX = 10
"""Maximum number of rounds in which tasks started by finalization are finalized."""
_Callback = Callable[..., object]


class Deadlock(RuntimeError):
    """A task waits and nothing at all is scheduled."""


class Livelock(RuntimeError):
    """Callbacks run endlessly without virtual time passing."""


class NotSimulated(RuntimeError):
    """The simulated loop has no threads, sockets or signals: use the ports."""


class ProcessDied(BaseException):
    """Leaves the code of a process that has just ended. It is not an Exception, because only the loop should catch
    it."""


class Process:
    """One incarnation of a node."""

    __slots__ = (
        *("__weakref__", "alive", "blocked", "context", "name", "number"),
        *("on_death", "paused", "queued", "ready", "tasks"),
    )

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.alive = True
        self.paused = False
        self.blocked = False
        """True if only the event loop is paused: other threads, and so the metadata session, continue."""
        self.ready: deque[asyncio.Handle] = deque()
        self.queued = False
        """True if it is in the loop's list of runnable processes, or barred from it."""
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self.on_death: list[Callable[[], object]] = []
        self.context = copy_context()
        self.context.run(current_node.set, self)

    def __repr__(self) -> str:
        state = "" if self.alive else " dead"
        return f"<{self.name}#{self.number}{state}{' paused' if self.paused else ''}>"

    def check_alive(self) -> None:
        """Raise ProcessDied if this process has ended: its ports no longer work."""
        if not self.alive:
            raise ProcessDied(self.name)


current_node: ContextVar[Process | None] = ContextVar("current_node", default=None)


class _Handle(asyncio.Handle):
    """asyncio's handle without the parts that only its debug mode needs."""

    __slots__ = ()
    _repr = _source_traceback = None

    def __init__(self, callback: _Callback, args: tuple[Any, ...], loop: SimLoop, context: Context) -> None:
        self._context = context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None


class _Timer(asyncio.TimerHandle):
    """A `_Handle` with a time."""

    __slots__ = ()
    _repr = _source_traceback = None

    def __init__(
        self, when: float, callback: _Callback, args: tuple[Any, ...], loop: SimLoop, context: Context
    ) -> None:
        self._when = when
        self._scheduled = True
        self._context = context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._callback = self._args = None
            if self._scheduled:
                self._loop._cancelled_timers += 1


class SimLoop(asyncio.BaseEventLoop):
    """Runs the handles of many processes in one thread, in an order that the seed of `random` determines."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.set_debug(False)
        self._draw = random.random
        self.now = 0.0
        self._timers: list[tuple[float, int, _Timer]] = []
        self._tickets = 0
        self._cancelled_timers = 0
        self._root = Process("test", 0)
        self._outside = copy_context()
        self._processes = [self._root]
        self._runnable: list[Process] = []
        self._graveyard: list[object] = []
        self._buried: set[asyncio.Task[Any]] = set()
        self.errors: list[tuple[str, str, BaseException | None]] = []
        """Errors raised by callbacks: (process, message, error)."""
        self.handles_run = 0
        self.order = 0
        """A digest of the order in which processes were served."""
        self.now_max = float("inf")
        """Virtual time at which `on_time_up` is called instead of continuing."""
        self.on_time_up: Callable[[], object] = self.stop

    # Processes

    def process(self, name: str) -> Process:
        """Return a new incarnation of the node `name`."""
        process = Process(name, len(self._processes))
        self._processes.append(process)
        return process

    def kill(self, process: Process) -> None:
        """End `process` at once. No line of it runs any more, except the rest of the current callback."""
        if not process.alive:
            return
        process.alive = False
        tasks = [task for task in process.tasks if not task.done()]
        self._graveyard += [process.ready, tasks]
        self._bar(process)
        process.ready = deque(maxlen=0)
        for on_death in process.on_death:
            self.call_soon(on_death, context=self._outside)

    def pause(self, process: Process) -> None:
        """Stop `process` as SIGSTOP does: its ready handles wait."""
        process.paused = True
        self._bar(process)

    def resume(self, process: Process) -> None:
        """Resume `process` as SIGCONT does."""
        process.paused = process.blocked = False
        if process.alive:
            process.queued = False
            if process.ready:
                self._make_runnable(process)

    def _bar(self, process: Process) -> None:
        if process in self._runnable:
            self._runnable.remove(process)
        process.queued = True

    def _make_runnable(self, process: Process) -> None:
        process.queued = True
        self._runnable.append(process)

    # Scheduling

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: _Callback, *args: Any, context: Context | None = None) -> asyncio.Handle:
        if context is None:
            context = copy_context()
        process = context.get(current_node) or self._root
        handle = _Handle(callback, args, self, context)
        process.ready.append(handle)
        if not process.queued:
            self._make_runnable(process)
        return handle

    def call_soon_threadsafe(self, callback: _Callback, *args: Any, context: Context | None = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: _Callback, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: _Callback, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, copy_context() if context is None else context)
        self._tickets += 1
        heappush(self._timers, (when, self._tickets, timer))
        return timer

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        process = (current_node.get() if context is None else context.get(current_node)) or self._root
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        process.tasks.add(task)
        return task

    # Running

    def _run_once(self) -> None:
        """Run until stopped; the base class calls this repeatedly."""
        runnable = self._runnable
        draw = self._draw
        count = 0
        while not self._stopping:
            if not runnable:
                before = self.now
                self._advance()
                if self.now > before:
                    count = 0
                continue
            size = len(runnable)
            process = runnable[int(draw() * size)] if size > 1 else runnable[0]
            ready = process.ready
            handle = ready.popleft()
            if not ready:
                runnable.remove(process)
                process.queued = False
            if handle._cancelled:
                continue
            self.order = (self.order * 1_000_003 + process.number) & 0xFFFF_FFFF_FFFF
            count += 1
            if count > HANDLES_PER_INSTANT_MAX:
                raise Livelock(f"{count} callbacks at {self.now} s, the last one {handle} of {process}")
            self.handles_run += 1
            try:
                handle._context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except ProcessDied:
                pass
            except BaseException as error:  # noqa: BLE001 - the root of every callback: recorded, and fails the run
                self._failed(process, f"exception in callback {handle!r}", error)

    def _advance(self) -> None:
        """Jump to the next timer and make everything ready that is due at that instant."""
        timers = self._timers
        if self._cancelled_timers > 100 and self._cancelled_timers * 2 > len(timers):
            timers[:] = [entry for entry in timers if not entry[2]._cancelled]
            heapify(timers)
            self._cancelled_timers = 0
        while timers and timers[0][2]._cancelled:
            heappop(timers)
            self._cancelled_timers -= 1
        if not timers:
            raise Deadlock(f"nothing is scheduled after {self.now} s\n{self.describe()}")
        when = timers[0][0]
        if when > self.now_max:
            self.on_time_up()
            return
        self.now = max(self.now, when)
        while timers and timers[0][0] <= when:
            timer = heappop(timers)[2]
            timer._scheduled = False
            if timer._cancelled:
                self._cancelled_timers -= 1
                continue
            process = timer._context.get(current_node) or self._root
            process.ready.append(timer)
            if not process.queued:
                self._make_runnable(process)

    def describe(self) -> str:
        """Return the paused processes and the awaitable of each live task."""
        lines = [f"  {process}: {len(process.ready)} parked" for process in self._processes if process.paused]
        for process in self._processes:
            waiting = sorted(_where(task) for task in process.tasks if process.alive and not task.done())
            lines += [f"  {process} {each}" for each in waiting]
        return "\n".join(lines)

    def _failed(self, process: Process, message: str, error: BaseException | None) -> None:
        logger.error("%s: %s", process.name, message, exc_info=error)
        self.errors.append((process.name, message, error))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        message, error = str(context.get("message")), context.get("exception")
        if self.is_closed() or "never retrieved" in message or isinstance(error, ProcessDied):
            logger.debug("%s", message, exc_info=error)
            return
        self._failed(current_node.get() or self._root, message, error)

    # Closing

    def close(self) -> None:
        """Finalize all tasks. Their `finally` blocks run now, without visible effect: their ports refuse, and
        nothing that they schedule runs."""
        if self.is_closed():
            return
        super().close()
        for process in self._processes:
            process.alive = False
            process.queued = True
            process.ready = deque(maxlen=0)
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)  # code that runs now may ask for the loop, and even start tasks
        try:
            for _ in range(_ROUNDS_MAX):
                self._bury_all()
        finally:
            asyncio._set_running_loop(before)
        self._timers.clear()
        self._graveyard.clear()

    def _bury_all(self) -> None:
        generators = list(self._asyncgens)
        for generator in generators:
            self._outside.copy().run(_bury_generator, generator)
        buried = self._buried
        tasks = [(task, process) for process in self._processes for task in process.tasks if task not in buried]
        for task, process in tasks:
            buried.add(task)
            if not task.done():
                process.context.copy().run(_bury, task)

    def _write_to_self(self) -> None:
        """Do nothing: no selector waits."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise NotSimulated("the simulated loop has no threads, sockets, pipes or signals: use the ports")

    run_in_executor = _refuse
    getaddrinfo = getnameinfo = _refuse
    add_reader = add_writer = remove_reader = remove_writer = _refuse
    sock_recv = sock_recv_into = sock_sendall = sock_connect = sock_accept = _refuse
    create_connection = create_server = create_datagram_endpoint = start_tls = _refuse
    create_unix_connection = create_unix_server = connect_accepted_socket = _refuse
    connect_read_pipe = connect_write_pipe = subprocess_exec = subprocess_shell = _refuse
    add_signal_handler = remove_signal_handler = _refuse


def _where(task: asyncio.Task[Any]) -> str:
    stack = task.get_stack(limit=1)
    place = f"{stack[-1].f_code.co_filename}:{stack[-1].f_lineno}" if stack else "not started"
    return f"{task.get_name()} waits at {place}"


def _bury(task: asyncio.Task[Any]) -> None:
    """Close the task's coroutine, even if it resists, and keep asyncio from complaining."""
    task._log_destroy_pending = False
    _close(task.get_coro())


def _bury_generator(generator: Any) -> None:
    """Close the awaitable of an asynchronous generator. Closing the task that waits for the generator is not enough:
    this ends at the generator's `asend`, and everything below would be finalized whenever it is collected."""
    if inspect.iscoroutine(generator.ag_await):
        _close(generator.ag_await)


def _close(coroutine: Any) -> None:
    for _ in range(_CLOSES_MAX):
        try:
            coroutine.close()
        except BaseException:  # noqa: BLE001 - a `finally` that awaits or fails; its process is dead
            continue
        return
