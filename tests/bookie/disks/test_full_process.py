"""A real bookie on a real disk of 16 MiB: filled, freed, and written to again by the same process (docs/protocol.md,
B9, B10 and B20)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.proto import bookkeeper as wire
from kvstore.proto.bookkeeper import Status
from tests.bookie.peer import Peer
from tests.bookie.support import KEY, ME, packet
from tests.waiting import wait_until

SIZE = 100_000
IN_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
"""A private file system without root rights, if the kernel allows that."""
MOUNT = 'mount -t tmpfs -o size=16m tmpfs "$0"'


def may_mount(directory: Path) -> bool:
    try:
        command = [*IN_NAMESPACE, MOUNT, str(directory)]
        return subprocess.run(command, capture_output=True, check=False, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@contextmanager
def bookie(directory: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running bookie and its address; killed at the end."""
    run = f'{MOUNT} && exec "$1" -m tests.bookie.full_process "$0"'
    command = [*IN_NAMESPACE, run, str(directory), sys.executable]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


class Writer:
    """Adds entries one after the other."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._context = wire.bookie_context(ME)

    async def add(self, ledger: int, entry: int, size: int = SIZE, *, recovery: bool = False) -> Status:
        body = packet(ledger, entry, b"x" * size)
        context, self._context = self._context, b""
        answer = await self.peer.ask(wire.encode_add(1, ledger, entry, KEY, body, recovery, context=context))
        return Status(answer.status)

    async def fill(self, ledger: int, size: int = SIZE, *, recovery: bool = False) -> int:
        """Add entries until one is refused. Return the number of stored entries."""
        entry = 0
        while (status := await self.add(ledger, entry, size, recovery=recovery)) is Status.OK:
            entry += 1
        assert status is Status.READ_ONLY
        return entry


@pytest.mark.cluster
async def test_filled_and_freed_disk_is_written_again_by_the_same_process(tmp_path: Path) -> None:
    if not may_mount(tmp_path):
        pytest.skip("this kernel lets nobody but root mount a file system")
    with bookie(tmp_path) as (process, address):
        host, _, port = address.rpartition(":")
        peer = Peer()
        await asyncio.get_running_loop().create_connection(lambda: peer, host, int(port))  # type: ignore[arg-type]
        writer = Writer(peer)
        assert await writer.fill(7) > 50
        kept = await writer.fill(8, recovery=True)
        assert kept, "copies have more space than adds"
        await writer.fill(10, 100, recovery=True)
        for ledger in range(100, 200):
            answer = await peer.ask(wire.encode_read(1, ledger, wire.LAST_ENTRY, fence_key=KEY))
            assert answer.status == Status.NO_ENTRY, "fences have more than copies"
        assert process.stdin is not None
        process.stdin.write("7\n")
        process.stdin.flush()

        async def takes_adds() -> bool:
            return await writer.add(9, 0) is Status.OK

        await wait_until(takes_adds, what="the bookie is writable again")
        for entry in range(kept):
            answer = await peer.ask(wire.encode_read(1, 8, entry))
            assert answer.body == packet(8, entry, b"x" * SIZE)
        assert process.poll() is None
        peer.transport.close()
