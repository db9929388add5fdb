"""The engines of a node keep within one budget of memory, however many they are, and lose nothing by it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from random import Random
from threading import Event

import pytest

from kvstore.partition.state.engine import wait_caught_up
from kvstore.partition.state.engine_rocks import RocksEngine
from kvstore.partition.state.memory_share import cache_bytes, largest_first
from kvstore.partition.state.rocks_memory import CACHE_SHARE_MIN, FLUSH_SHARE, RocksMemory
from tests.partition.state.test_engine_conformance import contents, flushed, write

MIB = 1 << 20
BUDGET = 32 * MIB
TABLE = 64 << 10
"""Of an engine with a write buffer of 1 MiB: it is looked at again after so many bytes of writes."""


def test_largest_buffers_are_chosen_and_no_more_than_needed() -> None:
    sizes = {"a": 5, "b": 9, "c": 7, "d": 1}
    assert largest_first(sizes, excess=9) == ["b"]
    assert largest_first(sizes, excess=10) == ["b", "c"]
    assert largest_first(sizes, excess=100) == ["b", "c", "a", "d"]
    assert largest_first(sizes, excess=0) == []


def test_empty_buffers_are_skipped_and_ties_keep_order() -> None:
    assert largest_first({"a": 0, "b": 2, "c": 2}, excess=100) == ["b", "c"]


def test_indexes_leave_the_cache_its_minimum() -> None:
    assert cache_bytes(100, index_bytes=30, least=25) == 70
    assert cache_bytes(100, index_bytes=90, least=25) == 25


async def test_largest_buffer_alone_is_flushed_if_that_suffices(tmp_path: Path) -> None:
    memory = RocksMemory(BUDGET)
    engines = [RocksEngine(str(tmp_path / name), memory=memory, write_buffer_bytes=8 * BUDGET) for name in "abcd"]
    for engine, size in zip(engines, (2, 3, 12, 1), strict=True):
        for number in range(size):
            write(engine, (b"%d" % number, bytes(MIB)))
    memory.look()
    await flushed(engines[2])
    assert [engine.unflushed_bytes() // MIB for engine in engines] == [2, 3, 0, 1]
    for engine in engines:
        engine.close()


class Engines:
    """Engines of one budget, each with what was written to it."""

    def __init__(self, folder: Path, *, write_buffer_bytes: int = MIB) -> None:
        self.now = 1.0
        self.memory = RocksMemory(BUDGET, lambda: self.now)
        self.rows: list[dict[bytes, bytes]] = []
        self.all: list[RocksEngine] = []
        self.most = 0
        """The largest sum of all write buffers that was seen."""
        self._folder, self._write_buffer_bytes, self._random = folder, write_buffer_bytes, Random(7)

    def add(self, count: int) -> None:
        for number in range(len(self.all), len(self.all) + count):
            self.all.append(self.open(number, self.memory))
            self.rows.append({})

    def open(self, number: int, memory: RocksMemory) -> RocksEngine:
        path = self._folder / str(number)
        return RocksEngine(str(path), memory=memory, write_buffer_bytes=self._write_buffer_bytes)

    async def write(self, number: int, size: int) -> None:
        """Write rows of about this size together, as a leader does: not before the engine takes more."""
        engine, rows = self.all[number], self.rows[number]
        for _ in range(size // 8000):
            await wait_caught_up(engine)
            some = {b"%d" % (len(rows) + each): self._random.randbytes(1000) for each in range(8)}
            write(engine, *some.items())
            rows |= some
            self.most = max(self.most, self.memory.buffers.get_usage())

    def files(self, number: int) -> int:
        return int(self.all[number]._db.property_value("rocksdb.num-files-at-level0") or 0)

    async def close(self) -> None:
        for engine in self.all:
            await flushed(engine)
            engine.close()


async def test_hundred_engines_stay_within_the_budget(tmp_path: Path) -> None:
    engines = Engines(tmp_path)
    engines.add(60)
    for turn in range(8):
        if turn == 3:
            engines.add(60)  # nothing has to be divided anew
        for number in range(len(engines.all)):
            engines.now += 0.001
            await engines.write(number, 2 * TABLE)
    assert engines.memory.flushes > 0
    written = sum(1000 * len(rows) for rows in engines.rows)
    assert written > 2 * BUDGET
    assert BUDGET * FLUSH_SHARE < engines.most <= BUDGET
    await engines.close()
    other = RocksMemory(BUDGET)
    for number, rows in enumerate(engines.rows):
        engine = engines.open(number, other)
        assert contents(engine) == sorted(rows.items())
        engine.close()


async def test_busy_engine_makes_no_small_files_beside_idle_ones(tmp_path: Path) -> None:
    engines = Engines(tmp_path)
    engines.add(31)
    for number in range(30):
        await engines.write(number, 9 * MIB // 10)  # 27 MiB: more than may stay
    for _ in range(32):
        engines.now += 0.1
        await engines.write(30, MIB // 8)
    assert engines.files(30) <= 5, "a file for each full write buffer"
    assert engines.most <= BUDGET
    await engines.close()


async def test_writer_waits_only_while_flushes_beyond_the_pause_share_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = RocksMemory(BUDGET)
    full = RocksEngine(str(tmp_path / "a"), memory=memory, write_buffer_bytes=256 * MIB)
    other = RocksEngine(str(tmp_path / "b"), memory=memory)
    monkeypatch.setattr(full, "flush_to_free", Future[None])
    for number in range(25):
        write(full, (b"%d" % number, bytes(MIB)))
    assert memory.buffers.get_usage() >= BUDGET * 0.75
    assert not memory.is_over(), "nothing is being flushed that a writer could wait for"
    assert other.is_behind(), "the look has begun a flush"
    assert memory.flushes == 1
    await flushed(full)
    assert memory.buffers.get_usage() < BUDGET / 2
    assert not other.is_behind(), "the flush has not ended, but freed enough"
    full.close()
    other.close()


async def test_buffers_held_by_views_cause_no_flushes_and_no_pause(tmp_path: Path) -> None:
    memory = RocksMemory(BUDGET)
    engine = RocksEngine(str(tmp_path / "a"), memory=memory, write_buffer_bytes=256 * MIB)
    for number in range(28):
        write(engine, (b"%d" % number, bytes(MIB)))
    view = engine.view([(b"", b"\xff")])
    await flushed(engine)
    assert memory.buffers.get_usage() >= BUDGET * 0.75
    for number in range(100):
        assert not engine.is_behind()
        write(engine, (b"a%d" % number, b"v"))
        memory.look()
    assert memory.flushes == 0
    view.close()
    engine.close()


def test_indexes_take_memory_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1.0
    memory = RocksMemory(BUDGET, lambda: now)
    capacities: list[int] = []

    class Recorded:
        def set_capacity(self, size: int) -> None:
            capacities.append(size)

    engine = RocksEngine(str(tmp_path / "a"), memory=memory)
    monkeypatch.setattr(memory, "cache", Recorded())
    size = 5 * MIB
    monkeypatch.setattr(engine, "index_bytes", lambda: size)
    memory.look()
    size = BUDGET
    memory.look()
    assert capacities == [BUDGET - 5 * MIB], "the next look is not due"
    now += 60
    memory.look()
    assert capacities == [BUDGET - 5 * MIB, int(BUDGET * CACHE_SHARE_MIN)]
    engine.close()
    now += 60
    memory.look()
    assert capacities[-1] == BUDGET, "a closed engine has no indexes"


async def test_each_kind_of_memory_is_counted(tmp_path: Path) -> None:
    memory = RocksMemory(BUDGET)
    engine = RocksEngine(str(tmp_path / "a"), memory=memory)
    rows = [(b"%05d" % number, Random(number).randbytes(1000)) for number in range(4000)]
    write(engine, *rows)
    assert memory.statistics()["buffer_bytes"] > 4_000_000
    await flushed(engine)
    for key, value in rows:
        assert engine.get(key) == value
    found = memory.statistics()
    assert found["memory_budget_bytes"] == BUDGET
    assert found["buffer_bytes"] < 100_000
    assert 3_000_000 < found["block_bytes"] < 5_000_000
    assert 4000 < found["index_bytes"] < 400_000
    engine.close()


async def test_reopened_engine_has_filters_and_the_shared_cache(tmp_path: Path) -> None:
    """The library goes by options that stand beside the files, unless it is told ours: a cache for each engine, and no
    filters."""
    rows = [(b"%05d" % number, Random(number).randbytes(1000)) for number in range(4000)]
    engine = RocksEngine(str(tmp_path / "a"), memory=RocksMemory(BUDGET))
    write(engine, *rows)
    await flushed(engine)
    indexes = engine.index_bytes()
    engine.close()
    memory = RocksMemory(BUDGET)
    engine = RocksEngine(str(tmp_path / "a"), memory=memory)
    assert engine.index_bytes() == indexes
    for key, value in rows:
        assert engine.get(key) == value
    assert memory.statistics()["block_bytes"] > 3_000_000
    engine.close()


async def test_state_can_be_cleared_during_a_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RocksEngine(str(tmp_path / "a"), memory=RocksMemory(8 * BUDGET), write_buffer_bytes=8 * BUDGET)
    for _ in range(5):
        begun = Event()
        monkeypatch.setattr(engine, "_shortage", lambda begun=begun: begun.set() or "")
        for number in range(20):
            write(engine, (b"%d" % number, Random(number).randbytes(MIB)))
        flush = engine.flush_to_free()
        assert begun.wait(60)
        engine.clear()
        assert flush.result() is None
        assert contents(engine) == []
    write(engine, (b"a", b"1"))
    await flushed(engine)
    engine.close()


@pytest.mark.parametrize("end", [RocksEngine.close, RocksEngine.clear])
async def test_closed_engine_is_not_asked_to_flush(tmp_path: Path, end: Callable[[RocksEngine], None]) -> None:
    memory = RocksMemory(BUDGET)
    engines = [RocksEngine(str(tmp_path / name), memory=memory, write_buffer_bytes=256 * MIB) for name in "ab"]
    for engine, size in zip(engines, (5, 17), strict=True):
        for number in range(size):
            write(engine, (b"%d" % number, bytes(MIB)))
    end(engines[0])
    memory.look()
    await flushed(engines[1])
    assert memory.flushes == 1
    assert memory.buffers.get_usage() < MIB
