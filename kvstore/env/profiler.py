"""A sampling profiler for this process: it samples the stacks of all threads for some seconds. It runs in a thread of
its own, so nothing is installed or attached, and only the samples cost time.

Each sample has the stack of every other thread that runs Python, and the processor time that the thread has used since
the previous sample. It sees only names of functions and files, no arguments and no keys.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePath
from types import CodeType, FrameType

from kvstore.errors import InvalidRequest, Overloaded

SECONDS_MAX, RATE, RATE_MAX = 60.0, 100, 200
STACKS_MAX = 4_000
"""Maximum number of different stacks; further ones are counted together."""
DEPTH_MAX = 100
"""Maximum number of calls of a stack, the innermost ones."""
OTHERS = "(other stacks)"
Stack = tuple[str, tuple[CodeType, ...]]
"""Name of the thread, and the calls from the outermost to the innermost."""


@dataclass(slots=True)
class StackCount:
    """How often a stack was sampled, and the processor time of its thread up to these samples."""

    samples: int = 0
    cpu_ns: int = 0


@dataclass(slots=True)
class Profile:
    """Stacks that were sampled in `took_s` seconds."""

    stacks: dict[Stack, StackCount] = field(default_factory=dict)
    samples: int = 0
    took_s: float = 0.0


class Profiler:
    """Profiles one process: one profile at a time."""

    def __init__(self) -> None:
        self._stop: threading.Event | None = None
        """Set to stop the profile in progress."""

    async def take(self, seconds: float, rate: int = 0) -> Profile:
        """Take a profile for this time, with `rate` samples per second (0: RATE). Cancelling the call ends the
        profile. Raises InvalidRequest, or Overloaded while another profile is in progress."""
        rate = rate or RATE
        if not 0 < seconds <= SECONDS_MAX:
            raise InvalidRequest(f"expected more than 0 and up to {SECONDS_MAX:g} seconds, got {seconds:g}")
        if not 1 <= rate <= RATE_MAX:
            raise InvalidRequest(f"expected 1 to {RATE_MAX} samples a second, got {rate}")
        if self._stop is not None:
            raise Overloaded("another profile of this node is in progress; try again when it has ended")
        stop = threading.Event()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Profile] = loop.create_future()

        def ended(profile: Profile) -> None:
            self._stop = None
            if not done.done():
                done.set_result(profile)

        def work() -> None:
            profile = sample_for(seconds, rate, stop.wait)
            try:
                loop.call_soon_threadsafe(ended, profile)
            except RuntimeError:
                return  # the loop has ended, and nobody waits

        threading.Thread(target=work, name="profiler", daemon=True).start()  # fails if no more threads are allowed
        self._stop = stop
        try:
            return await done
        finally:
            stop.set()


def sample_for(seconds: float, rate: int, wait: Callable[[float], object]) -> Profile:
    """Sample all threads but this one. `wait(seconds)` returns true to end it. Blocks."""
    profile, before = Profile(), dict[int, int]()
    began = time.monotonic()
    _sample(profile, before, is_first=True)
    while (now := time.monotonic()) < began + seconds:
        if wait(min(1 / rate, began + seconds - now)):
            break
        _sample(profile, before)
    profile.took_s = time.monotonic() - began
    return profile


def _sample(profile: Profile, before: dict[int, int], *, is_first: bool = False) -> None:
    """Take one sample. `before`: the processor time of each thread at the previous sample."""
    own = threading.get_ident()
    names = {each.ident: each.name for each in threading.enumerate()}
    for thread, frame in sys._current_frames().items():
        name = names.get(thread)
        if thread == own or name is None:  # the thread is ending: its clock may be gone
            continue
        cpu_ns = _cpu_ns(thread)
        passed, before[thread] = max(0, cpu_ns - before.get(thread, cpu_ns)), cpu_ns
        if is_first:
            continue
        stack = (name, _calls(frame))
        if stack not in profile.stacks and len(profile.stacks) >= STACKS_MAX:
            stack = (OTHERS, ())
        seen = profile.stacks.setdefault(stack, StackCount())
        seen.samples += 1
        seen.cpu_ns += passed
    profile.samples += not is_first


def _cpu_ns(thread: int) -> int:
    try:
        return time.clock_gettime_ns(time.pthread_getcpuclockid(thread))
    except OSError:
        return 0


def _calls(frame: FrameType | None) -> tuple[CodeType, ...]:
    found: list[CodeType] = []
    while frame is not None and len(found) < DEPTH_MAX:
        found.append(frame.f_code)
        frame = frame.f_back
    return tuple(reversed(found))


def name_of(code: CodeType) -> str:
    """Return the name of a function for people: `Leader._send (kvstore/partition/leading/leader.py:300)`."""
    parts = PurePath(code.co_filename).parts
    if "site-packages" in parts:
        begin = parts.index("site-packages") + 1
    elif "kvstore" in parts:
        begin = len(parts) - 1 - parts[::-1].index("kvstore")
    else:
        begin = max(0, len(parts) - 2)
    return f"{code.co_qualname} ({'/'.join(parts[begin:])}:{code.co_firstlineno})"
