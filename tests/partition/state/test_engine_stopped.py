"""An engine that has stopped because its disk refused a write, with RocksDB on a real file system (docs/protocol.md,
P46). The leader's and the tail's reactions are tested with an engine in memory."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from kvstore.errors import Unavailable
from kvstore.os_errors import is_passing
from kvstore.partition.election.tail import Tail
from kvstore.partition.state import engine_rocks
from kvstore.partition.state.commands import Put
from kvstore.partition.state.engine import Engine, wait_caught_up
from kvstore.partition.state.engine_rocks import RocksEngine
from tests.partition.one_partition import P1, Partition
from tests.partition.state.engine_memory import MemoryEngine
from tests.partition.state.test_engine_full_disk import Logged
from tests.sim.world.pause import pause
from tests.waiting import wait_until_blocking

PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EMFILE)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limit files of this process to `size` bytes; a write beyond that fails with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def no_inodes(path: Path) -> Iterator[None]:
    """Use up the inodes of the file system at `path`."""
    made = list[Path]()
    with suppress(OSError):
        while True:
            made.append(path / f"ballast-{len(made)}")
            made[-1].touch()
    yield
    for each in made:
        each.unlink(missing_ok=True)


def write(engine: Engine, *keys: bytes) -> None:
    batch = engine.batch()
    for key in keys:
        batch.put(key, Random(key).randbytes(2_000))
    engine.write(batch)


def keys_of(engine: Engine) -> set[bytes]:
    return {key for key, _ in engine.iterate(b"", b"\xff")}


def stop_and_resume(engine: RocksEngine, refused: Any, expected: int) -> None:
    """Make a flush fail while `refused` lasts, and take writes again afterwards."""
    flushed, unflushed = {b"flushed"}, {b"%d" % number for number in range(200)}
    write(engine, *flushed)
    assert engine._flush() is None
    with refused:
        write(engine, *sorted(unflushed))
        error = engine._flush()
        assert error is not None
        assert error.errno == expected
        assert engine.is_behind(), "the leader pauses"
        with pytest.raises(OSError, match="IO error") as again:
            write(engine, b"refused")
        assert again.value.errno == expected
        engine._prepare_to_resume()
        assert not engine.may_resume, "the disk still refuses"
        assert keys_of(engine) == flushed | unflushed, "reads continue"
    wait_until_blocking(lambda: not engine.is_behind() or engine.may_resume, what="a trial that succeeds")
    engine.resume()
    assert engine.stopped is None
    assert not engine.is_behind()
    assert keys_of(engine) >= flushed, "flushed rows are present"
    write(engine, b"later")
    assert engine._flush() is None
    engine.close()


# docs/protocol.md P46
def test_engine_resumes_after_a_file_size_limit(tmp_path: Path) -> None:
    """RocksDB itself would take no writes until it is reopened, as after EDQUOT."""
    stop_and_resume(RocksEngine(str(tmp_path)), file_size_limit(100_000), errno.EFBIG)
    assert not any((tmp_path / name).exists() for name in engine_rocks.TRIAL_NAMES)


# docs/protocol.md P46
def test_engine_resumes_after_running_out_of_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_rocks, "RESERVE_INODES", 0)
    mount = ["mount", "-t", "tmpfs", "-o", "size=400m,nr_inodes=64", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("file systems cannot be mounted here")
    try:
        stop_and_resume(RocksEngine(str(tmp_path / "engine")), no_inodes(tmp_path), errno.ENOSPC)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_engine_that_cannot_reopen_is_retried(tmp_path: Path) -> None:
    engine = RocksEngine(str(tmp_path))
    write(engine, b"flushed")
    assert engine._flush() is None
    with file_size_limit(100_000):
        write(engine, *(b"%d" % number for number in range(200)))
        assert engine._flush() is not None
    wait_until_blocking(lambda: engine.is_behind() and engine.may_resume, what="a trial that succeeds")
    with file_size_limit(1), pytest.raises(OSError, match="engine"):
        engine.resume()
    assert engine.stopped is not None
    assert (engine.unflushed_bytes(), engine.index_bytes()) == (0, 0), "the metrics can still be read"
    flushed = engine._flush()
    assert flushed is not None
    assert is_passing(flushed), "otherwise the next flush ends the process"
    for use in (
        lambda: engine.get(b"flushed"),
        lambda: engine.multi_get([b"flushed"]),
        lambda: keys_of(engine),
        lambda: list(engine.iterate_back(b"", b"\xff")),
        lambda: engine.view([(b"", b"\xff")]),
        lambda: write(engine, b"refused"),
    ):
        with pytest.raises(OSError, match="engine") as refused:
            use()
        assert is_passing(refused.value), "otherwise the next read ends the process"
    wait_until_blocking(lambda: engine.is_behind() and engine.may_resume, what="another trial")
    engine.resume()
    assert keys_of(engine) == {b"flushed"}
    engine.close()


def test_engine_on_a_full_disk_can_be_cleared(tmp_path: Path) -> None:
    """It is cleared for the state of another replica. RocksDB flushes what it is about to remove, and fails."""
    engine = RocksEngine(str(tmp_path))
    with file_size_limit(100_000):
        write(engine, *(b"%d" % number for number in range(200)))
        engine.clear()
        assert keys_of(engine) == set()
        write(engine, b"later")
    engine.close()


def test_engine_that_cannot_be_cleared_stops_until_it_is_reopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was closed and seemed to take writes. The next one ended the process."""

    def refuse(*_: Any) -> None:
        raise Exception("IO error: While open directory: Too many open files")  # as rocksdict does

    engine = RocksEngine(str(tmp_path))
    write(engine, b"old")
    with monkeypatch.context() as patched:
        patched.setattr(engine_rocks, "Rdict", type("Refusing", (), {"destroy": refuse}))
        with pytest.raises(OSError, match="Too many open files"):
            engine.clear()
    assert engine.stopped is not None
    assert is_passing(engine.stopped)
    wait_until_blocking(lambda: engine.is_behind() and engine.may_resume, what="a trial that succeeds")
    engine.resume()
    write(engine, b"later")
    assert b"later" in keys_of(engine)
    engine.close()


# docs/protocol.md P46
@pytest.mark.parametrize("number", PASSING)
def test_leader_with_a_stopped_engine_loses_the_lead_and_recovers(number: int) -> None:
    engine = MemoryEngine()
    p = Partition(engine=engine).start()
    for key in (b"a", b"b"):
        p.do(Put(key, b"1"))
    flushed = engine._written
    engine._mark(flushed, engine._life, lambda _: None)
    p.do(Put(b"c", b"1"))
    (late,) = p.submit(Put(b"d", b"1"))
    engine.stopped = OSError(number, os.strerror(number))
    p.acknowledge()
    assert p.fatal == []
    assert len(p.stopped) == 1
    assert isinstance(p.result(late), Exception), "its outcome is unknown"
    tail = Tail(P1, p.state, cast(Any, Logged(p.log.acknowledged)), cast(Any, None))
    tailing = p.loop.create_task(tail.run())
    p.wait(5)
    assert not tailing.done()
    assert (record := p.state.get(b"c")) is not None
    assert record.value == b"1", "reads continue"
    engine.may_resume = True
    p.wait(5)
    assert engine.stopped is None
    assert [p.state.get(key) is not None for key in (b"a", b"b", b"c", b"d")] == [True] * 4
    again = Partition(engine=engine)
    assert again.state.fingerprint() == p.state.fingerprint()
    tailing.cancel()
    p.settle()


def test_idle_tail_resumes_its_engine_without_another_entry() -> None:
    engine = MemoryEngine()
    p = Partition(engine=engine).start()
    p.do(Put(b"a", b"1"))
    log = Polled(p.log.acknowledged)
    tailing = p.loop.create_task(Tail(P1, p.state, cast(Any, log), cast(Any, None)).run())
    p.wait(1)
    engine.stopped, engine.may_resume = OSError(errno.EDQUOT, "a flush has failed"), True
    p.wait(30)
    assert engine.stopped is None
    assert p.state.get(b"a") is not None
    tailing.cancel()
    p.settle()


class Polled(Logged):
    """A log whose reads end after a while without an entry."""

    async def read(self, timeout_ms: int, taker: object = None) -> Any:
        if self._entries:
            return await super().read(timeout_ms)
        await pause(timeout_ms / 1000)
        return []


async def test_waiting_for_a_stopped_engine_raises() -> None:
    engine = MemoryEngine()
    engine.stopped = OSError(errno.EDQUOT, "the disk quota is exceeded")
    with pytest.raises(OSError, match="quota"):
        await wait_caught_up(engine)
    p = cast(Any, type("Whole", (), {"engine": engine, "seq": 5}))
    with pytest.raises(Unavailable, match="quota"):
        await Tail(P1, p, cast(Any, None), cast(Any, None)).wait_seq(cast(Any, 5))
