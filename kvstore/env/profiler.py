"""A profile of this process: looks often, for some seconds, at where its threads are. A thread of its own does it, so
nothing is installed or attached, and nothing is slower but by the looks.

Each look gives the stack of every other thread that runs Python and the processor time that the thread has taken since
the look before. Names of functions and files are all that it sees: no arguments, no keys.
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
"""Different ones; those that come later are one together."""
DEPTH_MAX = 100
"""Calls of a stack, the innermost ones."""
OTHERS = "(other stacks)"
Stack = tuple[str, tuple[CodeType, ...]]
"""Name of the thread, and the calls from the outermost to the innermost."""


@dataclass(slots=True)
class StackCount:
    """How often a stack was seen, and the processor time that its thread took up to these looks."""

    looks: int = 0
    cpu_ns: int = 0


@dataclass(slots=True)
class Profile:
    """Stacks that were seen in `took_s` seconds."""

    stacks: dict[Stack, StackCount] = field(default_factory=dict)
    looks: int = 0
    took_s: float = 0.0


class Profiler:
    """Profiles one process: one profile at a time."""

    def __init__(self) -> None:
        self._stop: threading.Event | None = None
        """Of the profile that is being taken."""

    async def take(self, seconds: float, rate: int = 0) -> Profile:
        """Look for so long, `rate` times a second (0: RATE). Who is cancelled ends it. Raises InvalidRequest,
        Overloaded while another profile is being taken."""
        rate = rate or RATE
        if not 0 < seconds <= SECONDS_MAX:
            raise InvalidRequest(f"want above 0 and up to {SECONDS_MAX:g} seconds, got {seconds:g}")
        if not 1 <= rate <= RATE_MAX:
            raise InvalidRequest(f"want 1 to {RATE_MAX} looks a second, got {rate}")
        if self._stop is not None:
            raise Overloaded("another profile of this node is being taken; ask again when it is over")
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

        threading.Thread(target=work, name="profiler", daemon=True).start()  # fails where no more threads are allowed
        self._stop = stop
        try:
            return await done
        finally:
            stop.set()


def sample_for(seconds: float, rate: int, wait: Callable[[float], object]) -> Profile:
    """Look at all threads but this one. `wait(seconds)` returns true once it is to end. Blocks."""
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
    """Look once. `before`: the processor time of each thread at the last look."""
    own = threading.get_ident()
    names = {each.ident: each.name for each in threading.enumerate()}
    for thread, frame in sys._current_frames().items():
        name = names.get(thread)
        if thread == own or name is None:  # it is just ending: its clock may be gone
            continue
        cpu_ns = _cpu_ns(thread)
        passed, before[thread] = max(0, cpu_ns - before.get(thread, cpu_ns)), cpu_ns
        if is_first:
            continue
        stack = (name, _calls(frame))
        if stack not in profile.stacks and len(profile.stacks) >= STACKS_MAX:
            stack = (OTHERS, ())
        seen = profile.stacks.setdefault(stack, StackCount())
        seen.looks += 1
        seen.cpu_ns += passed
    profile.looks += not is_first


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
    """Name a function as people find it: `Leader._send (kvstore/partition/leading/leader.py:300)`."""
    parts = PurePath(code.co_filename).parts
    if "site-packages" in parts:
        begin = parts.index("site-packages") + 1
    elif "kvstore" in parts:
        begin = len(parts) - 1 - parts[::-1].index("kvstore")
    else:
        begin = max(0, len(parts) - 2)
    return f"{code.co_qualname} ({'/'.join(parts[begin:])}:{code.co_firstlineno})"
