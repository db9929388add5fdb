"""A full disk under the engine costs the lead and time, but neither the process nor an entry."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from kvstore.errors import OutcomeUnknown
from kvstore.partition.election.tail import Tail
from kvstore.partition.state import engine_rocks
from kvstore.partition.state.commands import Put
from kvstore.partition.state.engine import EngineBatch
from kvstore.partition.state.engine_rocks import RocksEngine
from kvstore.types import Position
from kvstore.wal.ports import LogEntry
from tests.partition.leading.test_leader_retries import request
from tests.partition.one_partition import P1, Partition
from tests.partition.state.engine_memory import MemoryEngine
from tests.waiting import wait_until_blocking


class SmallDisk(MemoryEngine):
    """An engine that finds no space while `is_full`; `error` is what it raises then."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False
        self.error = errno.ENOSPC

    def write(self, batch: EngineBatch) -> None:
        if self.is_full:
            raise OSError(self.error, "no room")
        super().write(batch)


class Logged:
    """A partition's log as its tail reads it: these entries, and nothing more."""

    def __init__(self, entries: list[LogEntry]) -> None:
        self._entries = entries

    def reader(self, _partition: str, after: Position | None) -> Logged:
        return type(self)([entry for entry in self._entries if after is None or entry.position > after])

    async def read(self, _timeout_ms: int, taker: object = None) -> Sequence[LogEntry]:
        if not self._entries:
            await asyncio.get_running_loop().create_future()
        entries, self._entries = self._entries, []
        return entries

    async def close(self) -> None: ...


class Given(Logged):
    """The same log, delivered to the waiting reader (docs/protocol.md, T11)."""

    async def read(self, timeout_ms: int, taker: Any = None) -> Sequence[LogEntry]:
        taker.take(await super().read(timeout_ms))
        return []


def full_under_way() -> tuple[Partition, SmallDisk, int]:
    """Return a leader whose entry is acknowledged while its disk is full."""
    engine = SmallDisk()
    p = Partition(engine=engine).start()
    p.do(Put(b"a", b"1", request=request(1)))
    (late,) = p.submit(Put(b"a", b"2", request=request(2)))
    engine.is_full = True
    p.acknowledge()
    return p, engine, late


def test_leader_without_disk_space_loses_lead_and_process_continues() -> None:
    p, _, late = full_under_way()
    assert p.fatal == []
    assert len(p.stopped) == 1
    assert isinstance(p.result(late), OutcomeUnknown)
    record = p.state.get(b"a")
    assert record is not None
    assert record.value == b"1"


def test_other_disk_failure_ends_the_process() -> None:
    engine = SmallDisk()
    p = Partition(engine=engine).start()
    p.submit(Put(b"a", b"1"))
    engine.is_full, engine.error = True, errno.EIO
    p.acknowledge()
    assert len(p.fatal) == 1


@pytest.mark.parametrize("log", [Logged, Given])
def test_replica_continues_from_its_log_when_space_returns(log: type[Logged]) -> None:
    p, engine, _ = full_under_way()
    durable = p.state.durable_seq
    tail = Tail(P1, p.state, cast(Any, log(p.log.acknowledged)), cast(Any, None))
    tailing = p.loop.create_task(tail.run())
    p.wait(5)
    assert not tailing.done()
    assert p.state.seq == 1
    engine.is_full = False
    p.wait(5)
    assert p.state.seq == 2
    assert p.state.durable_seq == durable, "writes that were only in memory are not durable"
    again = Partition(engine=engine)
    assert again.state.fingerprint() == p.state.fingerprint()
    assert again.state.retries.rows() == p.state.retries.rows()
    tailing.cancel()
    p.settle()


@pytest.mark.parametrize("log", [Logged, Given])
@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS])
def test_tail_ends_on_another_disk_failure(error: int, log: type[Logged]) -> None:
    p, engine, _ = full_under_way()
    engine.error = error
    tail = Tail(P1, p.state, cast(Any, log(p.log.acknowledged)), cast(Any, None))
    with pytest.raises(OSError, match="no room"):
        p.run(tail.run())


@pytest.fixture
def small_directory(tmp_path: Path) -> Iterator[Path]:
    """Make a file system of 64 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("file systems cannot be mounted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(1 << 16))


@pytest.mark.slow
def test_engine_takes_writes_again_after_a_flush_without_space(
    small_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB recovers by itself, about 5 s later; the leader and the tail rely on it."""
    monkeypatch.setattr(engine_rocks, "RESERVE_BYTES", 0)
    engine = RocksEngine(str(small_directory / "engine"), write_buffer_bytes=1 << 20)

    def write(number: int) -> None:
        batch = engine.batch()
        batch.put(b"%d" % number, Random(number).randbytes(10_000))
        engine.write(batch)

    def is_taken(number: int) -> bool:
        try:
            write(number)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return False
        return True

    write(0)
    fill(small_directory / "ballast")
    wait_until_blocking(lambda: not all(map(is_taken, range(1, 50))), what="a flush that finds no room")
    (small_directory / "ballast").unlink()
    wait_until_blocking(lambda: is_taken(60), what="a write that is taken")
    assert all(engine.get(b"%d" % number) for number in (0, 1, 60))
    engine.close()
