"""Tests that cannot fail prove nothing: each way to break the engines' budget is detected by the test beside it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.partition.state import engine_rocks, rocks_memory
from kvstore.partition.state.engine_rocks import RocksEngine
from kvstore.partition.state.rocks_memory import PAUSE_SHARE, RocksMemory
from tests.partition.state import test_rocks_memory as tests

Patch = pytest.MonkeyPatch
Sentence = Callable[[Path, Patch], Awaitable[None]]


def flush_nothing(patch: Patch) -> None:
    patch.setattr(RocksMemory, "flush_excess", lambda self: None)


def flush_the_smallest_first(patch: Patch) -> None:
    def smallest_first(sizes: dict[Any, int], *, excess: int) -> list[Any]:
        return rightly({each: 1 << 40 - size.bit_length() for each, size in sizes.items() if size}, excess=excess)

    rightly = rocks_memory.largest_first
    patch.setattr(rocks_memory, "largest_first", smallest_first)


def let_nobody_wait(patch: Patch) -> None:
    patch.setattr(RocksMemory, "is_over", lambda self: False)


def wait_for_no_flush(patch: Patch) -> None:
    patch.setattr(RocksMemory, "is_over", lambda self: self.buffers.get_usage() >= self.budget_bytes * PAUSE_SHARE)


def clear_beside_a_flush(patch: Patch) -> None:
    patch.setattr(RocksEngine, "_end_flushes", lambda self: None)


def open_as_it_was(patch: Patch) -> None:
    original = engine_rocks.Rdict

    def opened(path: str, options: Any, families: Any, access_type: Any) -> Any:
        return original(path, options, access_type=access_type)

    patch.setattr(engine_rocks, "Rdict", opened)


def alone(sentence: Callable[[Path], Awaitable[None]]) -> Sentence:
    return lambda path, _: sentence(path)


@pytest.mark.parametrize(
    ("breakage", "sentence"),
    [
        (flush_nothing, alone(tests.test_hundred_engines_stay_within_the_budget)),
        (flush_nothing, alone(tests.test_busy_engine_makes_no_small_files_beside_idle_ones)),
        (flush_the_smallest_first, alone(tests.test_largest_buffer_alone_is_flushed_if_that_suffices)),
        (let_nobody_wait, tests.test_writer_waits_only_while_flushes_beyond_the_pause_share_run),
        (
            wait_for_no_flush,
            alone(tests.test_buffers_held_by_views_cause_no_flushes_and_no_pause),
        ),
        (open_as_it_was, alone(tests.test_reopened_engine_has_filters_and_the_shared_cache)),
        (clear_beside_a_flush, tests.test_state_can_be_cleared_during_a_flush),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
async def test_broken_budget_is_detected(
    breakage: Callable[[Patch], None], sentence: Sentence, tmp_path: Path, monkeypatch: Patch
) -> None:
    breakage(monkeypatch)
    with pytest.raises((AssertionError, OSError, RuntimeError)):
        await sentence(tmp_path, monkeypatch)
