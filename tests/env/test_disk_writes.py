"""Writes off the event loop: the contents of the file when they are reported, and the errors of those that fail."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.env import uring
from kvstore.env.disk import DirectoryDisk
from kvstore.env.syncs import NotWritten, Syncs, ThreadSyncs
from tests.env.test_disk import ring


@pytest.mark.parametrize("make", [ring, ThreadSyncs])
def test_submitted_writes_are_in_the_file_when_they_are_reported(make: Callable[[], Syncs], tmp_path: Path) -> None:
    async def work() -> None:
        disk = DirectoryDisk(tmp_path, make())
        file = disk.open("f", create=True)
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        pieces = [bytes([number % 251]) * (number * 37 % 9000 + 1) for number in range(200)]
        reported: list[bytes] = []
        at = 0
        for number, piece in enumerate(pieces):

            def done(error: OSError | None, at: int = at, piece: bytes = piece) -> None:
                assert error is None
                reported.append(file.read(at, len(piece)))
                if len(reported) == len(pieces):
                    over.set_result(None)

            file.submit_write(at, piece, done, is_synced=number % 3 > 0)
            at += len(piece)
        await over
        assert reported == pieces
        disk.close()

    asyncio.run(work())


@pytest.mark.parametrize("make", [ring, ThreadSyncs])
@pytest.mark.parametrize("is_synced", [True, False])
def test_failed_submitted_write_differs_from_a_failed_sync(
    make: Callable[[], Syncs], tmp_path: Path, is_synced: bool
) -> None:
    """The write stops at the limit on the size of a file, after a part."""

    async def work() -> None:
        syncs = make()
        fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
        over: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
        syncs.submit(fd, over.set_result, (100, b"x" * 9_900), is_synced=is_synced)
        error = await over
        assert isinstance(error, NotWritten)
        assert error.errno == errno.EFBIG
        assert os.fstat(fd).st_size == 5_000
        syncs.close()
        os.close(fd)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, before[1]))
    try:
        asyncio.run(work())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# docs/protocol.md L12
def test_write_that_the_kernel_starts_without_its_sync_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel lacks memory for the second request of the pair. A sync that starts later is not linked with the
    write, and may end before it."""

    async def work() -> None:
        syncs = ring()
        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
        reported: list[OSError | None] = []
        call, both = uring._call, syncs._enter_both
        monkeypatch.setattr(uring, "_call", lambda *args: call(*(syncs._enter if args == both else args)))
        with pytest.raises(OSError, match="without its sync"):
            syncs.submit(fd, reported.append, (0, b"x" * 5_000))
        monkeypatch.undo()
        over: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
        syncs.submit(fd, over.set_result, (5_000, b"y"))
        assert await over is None
        assert (reported, faults) == ([], [])
        syncs.close()
        os.close(fd)

    asyncio.run(work())
