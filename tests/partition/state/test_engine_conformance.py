"""The conformance suite of engines. Adding a driver takes one line here."""

import asyncio
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from kvstore.partition.state import engine_rocks
from kvstore.partition.state.engine import Engine, ViewClosed, ViewCursor
from kvstore.partition.state.engine_rocks import (
    FILES_TO_COMPACT,
    MEMTABLE_BYTES_MIN,
    MEMTABLES_PER_FILE,
    RocksEngine,
)
from tests.partition.state.engine_memory import MemoryEngine
from tests.waiting import PATIENCE_S, wait_until_blocking

DRIVERS: dict[str, Callable[[Path], Engine]] = {
    "memory": lambda path: MemoryEngine(),
    "rocks": lambda path: RocksEngine(str(path / "engine")),
}


@pytest.fixture(params=list(DRIVERS.values()), ids=list(DRIVERS))
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    made: Engine = request.param(tmp_path)
    yield made
    made.close()


def write(engine: Engine, *pairs: tuple[bytes, bytes]) -> None:
    batch = engine.batch()
    for key, value in pairs:
        batch.put(key, value)
    engine.write(batch)


def contents(engine: Engine) -> list[tuple[bytes, bytes]]:
    return list(engine.iterate(b"", b"\xff"))


async def flushed(engine: Engine) -> None:
    done: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    engine.flush(done.set_result)
    assert await done is None


def test_unwritten_key_is_absent(engine: Engine) -> None:
    assert engine.get(b"a") is None
    assert engine.multi_get([b"a", b"b"]) == [None, None]
    assert engine.multi_get([]) == []
    assert contents(engine) == []


def test_batch_applies_in_order(engine: Engine) -> None:
    write(engine, (b"a", b"1"), (b"b", b"1"), (b"c", b"1"))
    batch = engine.batch()
    batch.put(b"a", b"2")
    batch.delete(b"a")
    batch.delete(b"b")
    batch.put(b"b", b"3")
    batch.delete(b"c")
    batch.put(b"d", b"")
    engine.write(batch)
    assert contents(engine) == [(b"b", b"3"), (b"d", b"")]


def test_multi_get_keeps_the_order_of_keys(engine: Engine) -> None:
    write(engine, (b"a", b"1"), (b"b", b"2"))
    assert engine.multi_get([b"b", b"x", b"a", b"b"]) == [b"2", None, b"1", b"2"]


def test_range_includes_its_begin_and_not_its_end(engine: Engine) -> None:
    write(engine, *((key, b"") for key in (b"a", b"a\0", b"b", b"b\xff", b"c")))
    assert [key for key, _ in engine.iterate(b"a\0", b"c")] == [b"a\0", b"b", b"b\xff"]
    assert list(engine.iterate(b"c", b"a")) == []


@pytest.mark.parametrize("backwards", [False, True])
def test_iterator_keeps_its_bound_alive(engine: Engine, backwards: bool) -> None:
    """RocksDB has a pointer to the bound: an iterator whose bound was freed ends early, as if there were no more
    rows."""
    write(engine, *((b"order/%05d" % number, b"") for number in range(2000)))
    for length in range(2, 40):
        iterate = engine.iterate_back if backwards else engine.iterate
        rows = iterate(b"order/", b"".join((b"p", b"\xff" * length)))
        others = [b"".join((b"a", b"b" * length)) for _ in range(50)]
        assert sum(1 for _ in rows) == 2000, others[0]


def test_backward_range_excludes_its_end(engine: Engine) -> None:
    keys = (b"a", b"a\0", b"b", b"b\xff", b"c")
    write(engine, *((key, key * 2) for key in keys))
    for begin, end in ((b"a\0", b"c"), (b"", b"\xff"), (b"a", b"b\0"), (b"b", b"b"), (b"c", b"a"), (b"d", b"e")):
        forward = list(engine.iterate(begin, end))
        assert list(engine.iterate_back(begin, end)) == forward[::-1], (begin, end)
    rows = engine.iterate_back(b"", b"\xff")
    write(engine, (b"bb", b"new"), (b"a", b"new"))
    assert [value for _, value in rows] == [key * 2 for key in reversed(keys)], "as they were when the view was made"


def test_keys_sort_as_unsigned_bytes(engine: Engine) -> None:
    keys = [bytes((0, 255)), bytes((127,)), bytes((128,)), bytes((254, 255))]
    write(engine, *((key, b"") for key in reversed(keys)))
    assert [key for key, _ in contents(engine)] == keys


def test_iterator_shows_rows_as_of_its_creation(engine: Engine) -> None:
    write(engine, *((b"%03d" % number, b"old") for number in range(300)))
    rows = engine.iterate(b"", b"\xff")
    batch = engine.batch()
    for number in range(100, 200):
        batch.delete(b"%03d" % number)
    batch.put(b"250", b"new")
    batch.put(b"2505", b"new")
    engine.write(batch)
    assert list(rows) == [(b"%03d" % number, b"old") for number in range(300)]
    assert len(contents(engine)) == 201


def taken(cursor: ViewCursor, rows_max: int = 7, bytes_max: int = 1 << 20) -> list[tuple[bytes, bytes]]:
    found: list[tuple[bytes, bytes]] = []
    while pairs := list(zip(*cursor.take(rows_max, bytes_max), strict=True)):
        found += pairs
    return found


async def test_view_shows_rows_as_of_its_creation(engine: Engine) -> None:
    write(engine, *((b"%03d" % number, b"old") for number in range(300)), (b"o", b"outside"))
    view = engine.view([(b"0", b"3"), (b"x", b"y")])
    batch = engine.batch()
    for number in range(100, 200):
        batch.delete(b"%03d" % number)
    batch.put(b"250", b"new")
    batch.put(b"2505", b"new")
    engine.write(batch)
    for number in range(20):
        await flushed(engine)
        write(engine, *((b"%03d" % each, b"%d" % number) for each in range(250)))
    assert taken(view.cursor(b"0", b"3")) == [(b"%03d" % number, b"old") for number in range(300)]
    assert taken(view.cursor(b"095", b"105")) == [(b"%03d" % number, b"old") for number in range(95, 105)]
    assert taken(view.cursor(b"x", b"y")) == []


def test_cursors_of_a_view_are_independent(engine: Engine) -> None:
    pairs = [(b"%03d" % number, b"v") for number in range(100)]
    write(engine, *pairs)
    view = engine.view([(b"", b"\xff")])
    first, second = view.cursor(b"000", b"050"), view.cursor(b"025", b"100")
    found: dict[int, list[tuple[bytes, bytes]]] = {1: [], 2: []}
    for _ in range(40):
        found[1] += zip(*first.take(3, 100), strict=True)
        found[2] += zip(*second.take(2, 100), strict=True)
    assert found == {1: pairs[:50], 2: pairs[25:]}


def test_cursor_bounds_rows_and_bytes(engine: Engine) -> None:
    write(engine, *((b"%d" % number, b"x" * 100) for number in range(9)))
    cursor = engine.view([(b"", b"\xff")]).cursor(b"", b"\xff")
    assert cursor.take(2, 1000)[0] == [b"0", b"1"]
    assert cursor.take(9, 150)[0] == [b"2", b"3"]
    assert cursor.take(9, 1)[0] == [b"4"]
    assert cursor.take(9, 1000)[0] == [b"5", b"6", b"7", b"8"]
    assert cursor.take(9, 1000) == ([], [])


@pytest.mark.parametrize("end", ["view", "clear"])
def test_closed_view_raises_and_frees_the_engine(engine: Engine, end: str) -> None:
    write(engine, (b"a", b"1"))
    view = engine.view([(b"", b"\xff")])
    cursor = view.cursor(b"", b"\xff")
    cursor.take(1, 1)
    view.close() if end == "view" else engine.clear()
    with pytest.raises(ViewClosed):
        cursor.take(1, 1)
    with pytest.raises(ViewClosed):
        view.cursor(b"", b"\xff")
    write(engine, (b"b", b"2"))
    assert engine.get(b"b") == b"2"


def test_engine_closes_and_reopens_with_open_views(tmp_path: Path) -> None:
    first = RocksEngine(str(tmp_path / "engine"))
    view = first.view([(b"", b"\xff")])
    cursor = view.cursor(b"", b"\xff")
    first.close()
    RocksEngine(str(tmp_path / "engine")).close()
    with pytest.raises(ViewClosed):
        cursor.take(1, 1)


def test_large_and_binary_rows_round_trip(engine: Engine) -> None:
    rows = [(b"\0" * 4096, bytes(range(256)) * 4096), (b"e", b"")]
    write(engine, *rows)
    assert contents(engine) == sorted(rows)


def test_idle_engine_is_not_behind(engine: Engine) -> None:
    write(engine, (b"a", b"1"))
    assert not engine.is_behind()


async def test_engine_never_blocks_a_writer_that_pauses_when_asked(tmp_path: Path) -> None:
    engine = RocksEngine(str(tmp_path / "engine"), write_buffer_bytes=64 << 10)
    pauses = 0
    for number in range(20_000):  # a quick disk keeps up with many
        if pauses and number >= 400:
            break
        while engine.is_behind():
            pauses += 1
            await flushed(engine)
        write(engine, *((b"%d-%d" % (number, each), b"v" * 1000) for each in range(20)))
        assert engine._db.property_int_value("rocksdb.is-write-stopped") == 0
    assert pauses > 0, "the test did not reach the bound"
    engine.close()


async def test_few_small_files_are_not_compacted_at_once(tmp_path: Path) -> None:
    engine = RocksEngine(str(tmp_path / "engine"))
    for number in range(FILES_TO_COMPACT - 1):
        write(engine, (b"a", b"%d" % number))
        await flushed(engine)
    properties = ("num-files-at-level0", "compaction-pending", "num-running-compactions")
    assert [int(engine._db.property_value(f"rocksdb.{each}") or 0) for each in properties] == [7, 0, 0]
    engine.close()


async def test_file_full_of_deletes_is_compacted(tmp_path: Path) -> None:
    """Otherwise each search for expired keys would step over them."""
    engine = RocksEngine(str(tmp_path / "engine"))
    keys = [b"x%08d" % number for number in range(2 * engine_rocks.DELETES_PER_BATCH_MAX)]
    write(engine, *((key, b"") for key in keys))
    await flushed(engine)
    batch = engine.batch()
    for key in keys:
        batch.delete(key)
    engine.write(batch)
    await flushed(engine)
    wait_until_blocking(lambda: int(engine._db.property_value("rocksdb.num-files-at-level0") or 0) == 0)
    assert contents(engine) == []
    engine.close()


def test_engine_checks_again_after_a_memtable_or_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RocksEngine(str(tmp_path / "engine"), write_buffer_bytes=MEMTABLES_PER_FILE * MEMTABLE_BYTES_MIN)
    now = 1.0
    monkeypatch.setattr(engine, "_now", lambda: now)
    assert not engine.is_behind()
    monkeypatch.setattr(engine_rocks, "RESERVE_BYTES", 1 << 62)
    write(engine, (b"a", b"1"))
    assert not engine.is_behind(), "no check is due"
    now += engine_rocks.CHECK_S
    assert engine.is_behind()
    monkeypatch.undo()
    monkeypatch.setattr(engine, "_now", lambda: now)
    assert not engine.is_behind(), "an engine that is behind is checked each time"
    monkeypatch.setattr(engine_rocks, "RESERVE_BYTES", 1 << 62)
    write(engine, (b"b", b"v" * MEMTABLE_BYTES_MIN))
    assert engine.is_behind()
    engine.close()


async def test_engine_on_a_full_disk_waits_for_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush that finds no space would stop the engine for good: it would take no writes afterwards, even if space is
    freed."""
    engine = RocksEngine(str(tmp_path / "engine"))
    monkeypatch.setattr(engine_rocks, "RESERVE_BYTES", 1 << 62)
    write(engine, (b"a", b"1"))
    assert engine.is_behind()
    told: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    engine.flush(told.set_result)
    error = await told
    assert error is not None
    assert error.errno == errno.ENOSPC
    assert contents(engine) == [(b"a", b"1")]
    monkeypatch.undo()
    assert not engine.is_behind()
    await flushed(engine)
    engine.close()


async def test_flush_reports_completion_and_changes_nothing(engine: Engine) -> None:
    write(engine, (b"a", b"1"))
    await flushed(engine)
    await flushed(engine)
    assert contents(engine) == [(b"a", b"1")]


async def test_flush_reports_a_failed_space_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopping replica that waits for the flush would otherwise wait forever."""
    engine, failure = RocksEngine(str(tmp_path / "engine")), OSError(errno.EIO, "a test")

    def fail() -> str:
        raise failure

    monkeypatch.setattr(engine, "_shortage", fail)
    done: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    engine.flush(done.set_result)
    assert await asyncio.wait_for(done, PATIENCE_S) is failure
    engine.close()


async def test_cleared_engine_is_empty_and_usable(engine: Engine) -> None:
    write(engine, (b"a", b"1"))
    await flushed(engine)
    engine.clear()
    assert contents(engine) == []
    write(engine, (b"b", b"2"))
    await flushed(engine)
    assert contents(engine) == [(b"b", b"2")]


async def test_flushed_rows_survive_a_reopen(tmp_path: Path) -> None:
    first = RocksEngine(str(tmp_path / "engine"))
    write(first, (b"a", b"1"))
    await flushed(first)
    first.close()
    second = RocksEngine(str(tmp_path / "engine"))
    assert contents(second) == [(b"a", b"1")]
    second.close()


def test_engine_open_elsewhere_cannot_be_opened(tmp_path: Path) -> None:
    first = RocksEngine(str(tmp_path / "engine"))
    with pytest.raises(OSError, match="engine"):
        RocksEngine(str(tmp_path / "engine"))
    first.close()


async def test_memory_engine_keeps_flushed_rows_over_a_crash() -> None:
    engine = MemoryEngine()
    write(engine, (b"a", b"1"), (b"b", b"1"))
    await flushed(engine)
    write(engine, (b"a", b"2"))
    batch = engine.batch()
    batch.delete(b"a")
    batch.delete(b"b")
    engine.write(batch)
    engine.crash()
    assert contents(engine) == [(b"a", b"1"), (b"b", b"1")]


async def test_memory_engine_may_keep_batches_after_the_mark() -> None:
    engine = MemoryEngine()
    for number in range(4):
        write(engine, (b"a", b"%d" % number), (b"b%d" % number, b""))
    engine.crash(keep=2)
    assert contents(engine) == [(b"a", b"1"), (b"b0", b""), (b"b1", b"")]


async def test_flush_covers_only_earlier_writes() -> None:
    engine = MemoryEngine()
    write(engine, (b"a", b"1"))
    done: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    engine.flush(done.set_result)
    write(engine, (b"a", b"2"))
    await done
    engine.crash()
    assert contents(engine) == [(b"a", b"1")]


async def test_flush_interrupted_by_a_crash_never_completes() -> None:
    engine = MemoryEngine()
    write(engine, (b"a", b"1"))
    told: list[OSError | None] = []
    engine.flush(told.append)
    engine.crash()
    write(engine, (b"b", b"1"))
    await flushed(engine)
    assert told == []
    engine.crash()
    assert contents(engine) == [(b"b", b"1")]


async def test_damaged_block_is_an_error_to_every_read(tmp_path: Path) -> None:
    engine = RocksEngine(str(tmp_path))
    rows = [(b"k%04d" % number, Random(number).randbytes(100)) for number in range(2000)]
    write(engine, *rows)
    await flushed(engine)
    engine.close()
    (file,) = tmp_path.glob("*.sst")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    engine = RocksEngine(str(tmp_path))
    with pytest.raises(OSError, match="checksum mismatch"):
        list(engine.iterate(b"k", b"l"))
    with pytest.raises(OSError, match="checksum mismatch"):
        engine.multi_get([key for key, _ in rows])
    cursor = engine.view([(b"k", b"l")]).cursor(b"k", b"l")
    with pytest.raises(OSError, match="checksum mismatch"):
        list(iter(lambda: cursor.take(1000, 1 << 20)[0], []))
    assert list(engine.iterate(b"k", b"k0100")) == rows[:100], "undamaged rows are returned"
    engine.close()
