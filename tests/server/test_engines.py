"""A damaged state on this disk is not served, and does not prevent the node from starting."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import shutil
import threading
from pathlib import Path
from random import Random
from threading import Event

import pytest

from kvstore.env.disk import DirectoryDisk
from kvstore.errors import ConfigError
from kvstore.partition.config import (
    MEMORY_BYTES_MIN,
    WRITE_BUFFER_BYTES_MAX,
    WRITE_BUFFER_BYTES_MIN,
    PartitionConfig,
)
from kvstore.partition.state.engine import Engine
from kvstore.partition.state.engine_rocks import EngineDamaged
from kvstore.ranges import BYTES_MAX
from kvstore.server import engines
from kvstore.server.engines import Engines
from kvstore.types import PartitionId
from tests.waiting import PATIENCE_S

P1 = PartitionId("p1")
ROWS = [(b"k%04d" % number, Random(number).randbytes(100)) for number in range(2000)]


class Node:
    """The engines of one directory, and the errors for which they end the process."""

    def __init__(self, path: Path, config: PartitionConfig | None = None) -> None:
        self.home = path / "partitions" / "p1"
        self.ends: list[str] = []
        self.engines = Engines(DirectoryDisk(path), config or PartitionConfig(), self.ends.append)

    async def write(self) -> None:
        engine = self.engines.open(P1)
        batch = engine.batch()
        for key, value in ROWS:
            batch.put(key, value)
        engine.write(batch)
        done: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
        engine.flush(done.set_result)
        assert await done is None
        engine.close()

    def damage(self, pattern: str) -> None:
        (path,) = self.home.glob(f"engine/{pattern}")
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("write_buffer_bytes", "memory_bytes"),
    [
        (WRITE_BUFFER_BYTES_MIN, MEMORY_BYTES_MIN),
        (MEMORY_BYTES_MIN, MEMORY_BYTES_MIN),
        (WRITE_BUFFER_BYTES_MIN, BYTES_MAX),
        (WRITE_BUFFER_BYTES_MAX, BYTES_MAX),
    ],
)
async def test_engine_opens_with_its_memory_bounds(tmp_path: Path, write_buffer_bytes: int, memory_bytes: int) -> None:
    config = PartitionConfig(write_buffer_bytes=write_buffer_bytes, memory_bytes=memory_bytes)
    node = Node(tmp_path, config)
    await node.write()
    engine = node.engines.open(P1)
    assert engine.get(ROWS[7][0]) == ROWS[7][1]
    engine.close()
    assert node.ends == []


def deleted() -> None:
    """Wait until the removed directories have been deleted."""
    for thread in threading.enumerate():
        if thread.name == "delete states":
            thread.join()


def contents(engine: Engine) -> list[tuple[bytes, bytes]]:
    found = list(engine.iterate(b"", b"\xff"))
    engine.close()
    return found


async def test_unopenable_state_is_set_aside_once_and_rebuilt(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.write()
    node.damage("MANIFEST-*")
    before = sorted(each.name for each in node.home.glob("engine/*.sst"))
    assert contents(node.engines.open(P1)) == []
    assert sorted(each.name for each in node.home.glob("engine.damaged/*.sst")) == before
    assert contents(node.engines.open(P1)) == []
    node.damage("MANIFEST-*")
    with pytest.raises(ConfigError, match=r"partition p1: .* remove .*engine\.damaged"):
        node.engines.open(P1)
    assert node.ends == []


async def test_damage_found_by_a_read_ends_the_process(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.write()
    node.damage("*.sst")
    engine = node.engines.open(P1)
    assert engine.get(ROWS[0][0]) == ROWS[0][1]
    with pytest.raises(OSError, match="checksum mismatch"):
        list(engine.iterate(b"", b"\xff"))
    gc.collect()  # the error's frames may still hold the iterator, and an iterator holds the engine's lock
    engine.close()
    assert "partition p1: the state on this disk is damaged" in node.ends[0]
    assert contents(node.engines.open(P1)) == []
    assert not (node.home / "DAMAGED").exists()
    assert list(node.home.glob("engine.damaged/*.sst"))


async def test_damage_ends_the_process_without_room_for_its_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    engine = node.engines.open(P1)

    def is_full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(node.engines._disk, "open", is_full)
    failed = engine._failed(Exception("Corruption: a test"))  # type: ignore[attr-defined]
    assert isinstance(failed, EngineDamaged), "a full disk would only cost the lead"
    assert len(node.ends) == 1
    engine.close()


async def test_crash_while_setting_state_aside_never_reopens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    await node.write()
    node.engines._note_damage(P1, "a test")
    for step in ("rename", "remove"):
        with monkeypatch.context() as crash:
            crash.setattr(DirectoryDisk, step, lambda *_: (_ for _ in ()).throw(OSError("the process is gone")))
            with pytest.raises(OSError, match="the process is gone"):
                node.engines.open(P1)
    assert contents(node.engines.open(P1)) == []
    assert not (node.home / "DAMAGED").exists()
    assert list(node.home.glob("engine.damaged/*.sst"))


async def test_healthy_state_is_left_alone(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.write()
    assert contents(node.engines.open(P1)) == ROWS
    assert node.engines.find() == [P1]


# docs/protocol.md P35
async def test_outvoted_state_is_set_aside_and_only_first_kept(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.write()
    before = sorted(each.name for each in node.home.glob("engine/*.sst"))
    for _ in range(2):
        node.engines.set_damaged_aside(P1)
        assert sorted(each.name for each in node.home.glob("engine.damaged/*.sst")) == before
        assert contents(node.engines.open(P1)) == []
    assert not node.ends


async def test_state_of_replica_that_left_is_reused_on_return(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.write()
    for number in (1, 2):
        node.engines.retire(P1)
        assert node.engines.find() == []
        assert os.listdir(tmp_path / "partitions") == ["p1.retired-1-0"]
        node.engines.age_retired(60, 3600)
        assert os.listdir(tmp_path / "partitions") == ["p1.retired-1-60"]
        if number == 1:
            assert contents(node.engines.open(P1)) == ROWS
            assert node.engines.find() == [P1]
    node.engines.retire(P1)  # there is nothing to retire
    assert os.listdir(tmp_path / "partitions") == ["p1.retired-1-60"]


async def test_latest_retired_state_is_reused(tmp_path: Path) -> None:
    node = Node(tmp_path)
    (tmp_path / "partitions" / "p1.retired-9-20").mkdir(parents=True)
    (tmp_path / "partitions" / "p10.retired-12-0").mkdir(parents=True)
    (tmp_path / "partitions" / "p1").mkdir()
    await node.write()
    node.engines.retire(P1)
    assert sorted(os.listdir(tmp_path / "partitions")) == ["p1.retired-10-0", "p1.retired-9-20", "p10.retired-12-0"]
    assert contents(node.engines.open(P1)) == ROWS


async def test_retired_state_is_removed_at_its_age(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.write()
    node.engines.retire(P1)
    (tmp_path / "partitions" / "p2").mkdir()
    for age in range(60, 3600, 60):
        node.engines.age_retired(60, 3600)
        assert sorted(os.listdir(tmp_path / "partitions")) == [f"p1.retired-1-{age}", "p2"]
    node.engines.age_retired(60, 3600)
    deleted()
    assert os.listdir(tmp_path / "partitions") == ["p2"]


async def test_removed_state_stays_until_the_next_start_without_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    await node.write()
    node.engines.retire(P1)

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        node.engines.age_retired(60, 60.0)
    assert os.listdir(node.home.parent) == ["p1.removed-1"]
    Node(tmp_path)
    deleted()
    assert os.listdir(node.home.parent) == []


def test_large_state_is_deleted_in_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile the next engine of the same partition is retired."""
    node, release = Node(tmp_path), Event()
    rmtree = shutil.rmtree

    def slow(path: str, ignore_errors: bool = False) -> None:
        release.wait(PATIENCE_S)
        rmtree(path, ignore_errors)

    monkeypatch.setattr(engines.shutil, "rmtree", slow)
    for _ in range(2):
        (tmp_path / "partitions" / "p1").mkdir(parents=True)
        node.engines.retire(P1)
        node.engines.age_retired(60, 60)
    assert sorted(os.listdir(tmp_path / "partitions")) == ["p1.removed-1", "p1.removed-2"]
    release.set()
    deleted()
    assert os.listdir(tmp_path / "partitions") == []


@pytest.mark.parametrize("what", ["engine", "p1.retired-1-3540"])
async def test_partly_removed_state_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Each start would find it damaged beside one that was set aside earlier, and the node would never start again."""
    node = Node(tmp_path)
    await node.write()
    node.engines.set_damaged_aside(P1)
    await node.write()

    def half_of(path: str, ignore_errors: bool = False) -> None:
        next(Path(path).rglob("MANIFEST-*")).unlink()

    with monkeypatch.context() as patch:
        patch.setattr(engines.shutil, "rmtree", half_of)
        if what == "engine":
            node.engines.set_damaged_aside(P1)
        else:
            node.engines.retire(P1)
            for _ in range(60):
                node.engines.age_retired(60, 3600)
        deleted()
    assert (tmp_path / "partitions" / "p1.removed-1").exists()
    assert P1 + ".removed-1" not in node.engines.find()
    later = Node(tmp_path)
    assert contents(later.engines.open(P1)) == []
    deleted()
    assert os.listdir(tmp_path / "partitions") == ["p1"]
