"""A profile of the process's own threads."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvstore.env import profiler
from kvstore.env.profiler import OTHERS, RATE_MAX, SECONDS_MAX, Profiler, name_of, sample_for
from kvstore.errors import InvalidRequest, Overloaded
from tests.beside import beside
from tests.waiting import PATIENCE_S, wait_until

SAMPLES = 20


class Work:
    """A thread that runs and one that waits."""

    def __init__(self) -> None:
        self.turns = 0

    def spin(self, over: threading.Event) -> None:
        while not over.is_set():
            self.turn()

    def rest(self, over: threading.Event) -> None:
        over.wait()

    def turn(self) -> None:
        self.turns += sum(range(1_000)) > 0

    def progress(self, samples: int) -> Iterator[bool]:
        """Run for this many samples, and let the running thread proceed between two of them."""
        for _ in range(samples):
            before = self.turns
            while self.turns < before + 10:
                pass
            yield False
        yield True


@contextmanager
def working() -> Iterator[Work]:
    work = Work()
    with beside(work.spin, work.rest):
        yield work


def test_running_code_has_processor_time_and_waiting_code_has_none() -> None:
    with working() as work:
        steps = work.progress(SAMPLES)
        profile = sample_for(PATIENCE_S, RATE_MAX, lambda _: next(steps))
    assert profile.samples == SAMPLES
    cpu_ns, samples = dict[str, int](), dict[str, int]()
    functions: dict[str, set[str]] = {}
    for (thread, calls), seen in profile.stacks.items():
        cpu_ns[thread] = cpu_ns.get(thread, 0) + seen.cpu_ns
        samples[thread] = samples.get(thread, 0) + seen.samples
        functions.setdefault(thread, set()).update(code.co_qualname for code in calls)
    assert samples["Work.spin"] == samples["Work.rest"] == SAMPLES
    assert cpu_ns["Work.spin"] > 20 * cpu_ns["Work.rest"]
    assert {"Work.spin", "Work.turn"} <= functions["Work.spin"]
    assert "Event.wait" in functions["Work.rest"]


def test_sampling_thread_does_not_see_itself() -> None:
    with working() as work:
        steps = work.progress(3)
        profile = sample_for(PATIENCE_S, RATE_MAX, lambda _: next(steps))
    assert threading.current_thread().name not in {thread for thread, _ in profile.stacks}


def test_stacks_are_bounded_in_number_and_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "STACKS_MAX", 1)
    monkeypatch.setattr(profiler, "DEPTH_MAX", 2)
    with working() as work:
        steps = work.progress(SAMPLES)
        profile = sample_for(PATIENCE_S, RATE_MAX, lambda _: next(steps))
    assert len(profile.stacks) == 2
    assert (OTHERS, ()) in profile.stacks
    assert all(len(calls) <= 2 for _, calls in profile.stacks)
    assert profile.stacks[OTHERS, ()].samples >= SAMPLES


async def test_profiles_are_taken_one_at_a_time() -> None:
    taken = Profiler()
    first = asyncio.ensure_future(taken.take(SECONDS_MAX))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="another profile"):
        await taken.take(1)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first

    async def has_ended() -> bool:
        return taken._stop is None and not any(each.name == "profiler" for each in threading.enumerate())

    await wait_until(has_ended, what="the end of its thread")
    await wait_until(lambda: has_looked(taken), what="a profile with samples")


async def has_looked(profiler: Profiler) -> bool:
    """Return True if there was a sample: a profile that is too short has none."""
    return (await profiler.take(0.05, RATE_MAX)).samples > 0


async def test_profile_can_be_taken_after_a_thread_could_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    taken = Profiler()
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start"):
        await taken.take(0.05)
    monkeypatch.undo()
    await wait_until(lambda: has_looked(taken), what="a profile with samples")


@pytest.mark.parametrize(
    ("seconds", "rate"), [(0, 1), (-1, 1), (SECONDS_MAX + 1, 1), (float("nan"), 1), (1, RATE_MAX + 1)]
)
async def test_profile_parameters_are_bounded(seconds: float, rate: int) -> None:
    with pytest.raises(InvalidRequest, match="expected"):
        await Profiler().take(seconds, rate)


def test_function_is_named_with_its_file() -> None:
    assert name_of(sample_for.__code__).startswith("sample_for (kvstore/env/profiler.py:")
    assert name_of(pytest.main.__code__).split("(")[1].startswith("_pytest/")
    assert sys.prefix not in name_of(threading.Thread.start.__code__)
