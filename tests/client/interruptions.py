"""Exceptions that strike a thread between two steps, as those of signal handlers do.

CPython raises such an exception where a Python function begins and after each call of a C function. A profile function
is called at the same places, so it can strike at each of them in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

UNRAISABLE = ("__del__", "_remove")
"""Finalizers, and the callbacks of weak sets. Python drops exceptions that strike there."""


class Struck(BaseException):
    """The exception that strikes. No code of ours knows it."""


def is_interrupted(call: Callable[[], object], step: int) -> bool:
    """Make the call, and raise Struck at that step of the present thread. Returns False if the call ended before."""
    left = step

    def strike(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        code = frame.f_code
        if event not in ("call", "c_return") or code.co_filename in (__file__, call.__code__.co_filename):
            return
        if any(caller.f_code.co_name in UNRAISABLE for caller in _callers(frame)):
            return
        if left == 0:
            raise Struck
        left -= 1

    try:
        sys.setprofile(strike)
        call()
    except Struck:
        return True
    finally:
        sys.setprofile(None)
    return False


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frame, its caller, and so on: the garbage collector runs finalizers anywhere."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def interruptions(call: Callable[[], object]) -> Iterator[int]:
    """Interrupt the call at its first step, at its second, and so on, until it ends first. Yields the number of each
    step."""
    step = 0
    while is_interrupted(call, step):
        yield step
        step += 1
    assert step > 5, "the call has steps"
