"""Real processes on a real disk: a directory breaks, the process is killed, and the next one continues without the
directory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.proto import bookkeeper as wire
from kvstore.proto.bookkeeper import Status
from kvstore.types import BookieId
from tests.bookie.directories.support import A, B
from tests.bookie.disks.test_kill import connect
from tests.bookie.peer import Peer
from tests.bookie.support import KEY, packet

pytestmark = pytest.mark.cluster

LEDGERS = range(1, 21)


class Running:
    """One process."""

    def __init__(self, process: subprocess.Popen[str], address: str, bookie: str) -> None:
        self.process, self.address = process, address
        self.context = wire.bookie_context(BookieId(bookie))
        self._peer: Peer | None = None
        self._txn = 0

    async def ask(self, frame: bytes) -> Status:
        if self._peer is None:
            self._peer = await connect(self.address)
        return Status((await self._peer.ask(frame)).status)

    async def add(self, ledger: int, entry: int) -> Status:
        self._txn += 1
        body = packet(ledger, entry)
        return await self.ask(wire.encode_add(self._txn, ledger, entry, KEY, body, context=self.context))

    async def read(self, ledger: int, entry: int, *, fence: bool = False) -> Status:
        self._txn += 1
        key = KEY if fence else None
        return await self.ask(wire.encode_read(self._txn, ledger, entry, fence_key=key, context=self.context))

    def breaks(self, path: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "broken\n"


def command(root: Path, lost: str) -> list[str]:
    return [sys.executable, "-m", "tests.bookie.directories.process", str(root), f"{A},{B}", lost]


@contextmanager
def bookie(root: Path, lost: str = "") -> Iterator[Running]:
    """A running bookie, which is killed at the end."""
    with subprocess.Popen(command(root, lost), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address, name = process.stdout.readline().split()
            yield Running(process, address, name)
        finally:
            process.kill()


# docs/protocol.md B23, B24
async def test_process_continues_without_a_broken_directory_after_a_restart(tmp_path: Path) -> None:
    with bookie(tmp_path) as running:
        for ledger in LEDGERS:
            assert await running.add(ledger, 0) is Status.OK
        running.breaks(B)
        there = [ledger for ledger in LEDGERS if await running.add(ledger, 1) is Status.IO_ERROR]
        assert 0 < len(there) < len(LEDGERS)
        for ledger in LEDGERS:
            expected = Status.UNKNOWN_LEDGER_STATE if ledger in there else Status.OK
            assert await running.read(ledger, 0) is expected
            assert await running.read(ledger, 0, fence=True) is expected
        assert running.process.poll() is None
    shutil.rmtree(tmp_path / B)
    refused = subprocess.run(
        command(tmp_path, ""), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    assert f"directory 1 of this bookie, {B}, is missing or empty" in refused.stderr
    for _ in range(2):
        with bookie(tmp_path, B) as running:
            for ledger in LEDGERS:
                is_lost = ledger in there
                assert await running.read(ledger, 0) is (Status.UNKNOWN_LEDGER_STATE if is_lost else Status.OK)
                assert await running.read(ledger, 7) is (Status.UNKNOWN_LEDGER_STATE if is_lost else Status.NO_ENTRY)
                assert is_lost or await running.add(ledger, 2) is Status.FENCED
    with bookie(tmp_path) as running:  # a new disk is mounted there
        assert (tmp_path / B / "PLACE").exists()
        for ledger in there:
            assert await running.read(ledger, 0) is Status.UNKNOWN_LEDGER_STATE
