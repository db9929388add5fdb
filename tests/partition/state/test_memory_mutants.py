"""Tests that cannot fail prove nothing: each way to break the engines' budget is caught by the sentence beside it."""

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
    patch.setattr(RocksMemory, "look", lambda self: None)


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
        (flush_nothing, alone(tests.test_a_hundred_engines_under_writes_stay_within_the_budget_and_lose_nothing)),
        (flush_nothing, alone(tests.test_a_busy_engine_makes_no_small_files_because_idle_ones_hold_much)),
        (flush_the_smallest_first, alone(tests.test_only_the_largest_is_flushed_if_that_is_enough)),
        (let_nobody_wait, tests.test_a_writer_waits_while_buffers_beyond_the_second_bound_are_flushed_and_only_then),
        (
            wait_for_no_flush,
            alone(tests.test_what_a_view_holds_of_flushed_buffers_causes_no_flushes_and_stops_no_writer),
        ),
        (open_as_it_was, alone(tests.test_an_engine_that_is_opened_again_has_the_filters_and_the_shared_cache)),
        (clear_beside_a_flush, tests.test_a_state_is_cleared_while_it_is_flushed),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
async def test_a_broken_budget_is_noticed(
    breakage: Callable[[Patch], None], sentence: Sentence, tmp_path: Path, monkeypatch: Patch
) -> None:
    breakage(monkeypatch)
    with pytest.raises((AssertionError, OSError, RuntimeError)):
        await sentence(tmp_path, monkeypatch)
