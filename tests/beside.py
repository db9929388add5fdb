"""Work beside a test, in threads that end with a `with` block, also if the block fails: a thread that outlived its test
would write to the next cluster on the same ports. `beside` is for work that lasts until the end of the block, a
ThreadPoolExecutor in a `with` for calls with a result. tests/test_tidy.py refuses other threads in tests."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socketserver import BaseServer
from typing import Any

from tests.waiting import PATIENCE_S

ENDED_S = 2 * PATIENCE_S
"""Time limit for the end of work, in seconds. A client's call may take PATIENCE_S."""


@contextmanager
def beside(*works: Callable[[threading.Event], object]) -> Iterator[Callable[[], None]]:
    """Run each function in its own thread until the end of the block, which sets the event that they get, and waits for
    them. Yield a function that does so earlier. Raises AssertionError with the stacks of functions that do not return.
    pytest reports their exceptions."""
    over = threading.Event()
    threads = [
        threading.Thread(target=work, args=(over,), name=getattr(work, "__qualname__", None), daemon=True)
        for work in works
    ]

    def end() -> None:
        over.set()
        deadline = time.monotonic() + ENDED_S
        started = [each for each in threads if each.ident is not None]
        for each in started:
            each.join(max(0.0, deadline - time.monotonic()))
        left = [stack_of(each) for each in started if each.is_alive()]
        assert not left, f"not over after {ENDED_S:g} s:\n" + "\n".join(left)

    try:
        for each in threads:
            each.start()
        yield end
    finally:
        end()


def in_time(call: Callable[[], Any]) -> Any:
    """Make a call in its own thread, because a call that hangs would block the test. Return its result."""
    results: list[Any] = []
    with beside(lambda _: results.append(call())):
        pass
    (result,) = results
    return result


@contextmanager
def served(server: BaseServer) -> Iterator[None]:
    """Answer requests beside the block, and close the server after it."""
    with server, beside(lambda _: server.serve_forever(0.02)):
        try:
            yield
        finally:
            server.shutdown()


def stack_of(thread: threading.Thread) -> str:
    """Return the name and the stack of a thread."""
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{thread.name}\n{''.join(traceback.format_stack(frame)) if frame else ''}"
