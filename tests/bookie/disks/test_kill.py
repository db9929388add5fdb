"""A real process on a real disk, killed with kill -9 repeatedly."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from kvstore.proto import bookkeeper as wire
from kvstore.proto.bookkeeper import Status
from tests.bookie.peer import Peer
from tests.bookie.support import KEY, ME, packet

pytestmark = pytest.mark.cluster

CONTEXT = wire.bookie_context(ME)
WINDOW = 32


@contextmanager
def bookie(directory: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running bookie and its address; killed at the end."""
    command = [sys.executable, "-m", "tests.bookie.process", str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address, damaged = process.stdout.readline().split()
            assert damaged == "0"
            yield process, address
        finally:
            process.kill()


async def connect(address: str) -> Peer:
    host, _, port = address.rpartition(":")
    peer = Peer()
    await asyncio.get_running_loop().create_connection(lambda: peer, host, int(port))  # type: ignore[arg-type]
    return peer


def payload_of(ledger: int, entry: int) -> bytes:
    return bytes([ledger, entry % 251]) * (entry * 37 % 2000)


async def write_until_killed(address: str, process: subprocess.Popen[str], ledger: int, kill_at: int) -> int:
    """Keep WINDOW adds in flight, and kill -9 in the middle. Return the last acknowledged entry."""
    peer, sent = await connect(address), 0
    acknowledged = -1

    def add() -> bytes:
        nonlocal sent
        body = packet(ledger, sent, payload_of(ledger, sent))
        frame = wire.encode_add(sent, ledger, sent, KEY, body, context=b"" if sent else CONTEXT)
        sent += 1
        return frame

    peer.send(*(add() for _ in range(WINDOW)))
    while not peer.closed.done():
        answers = asyncio.ensure_future(peer.answers(1))
        done, _ = await asyncio.wait([answers, peer.closed], return_when=asyncio.FIRST_COMPLETED)
        if answers in done:
            for answer in [*answers.result(), *peer.frames]:
                assert wire.stored_txn(answer) == acknowledged + 1
                acknowledged += 1
                if not peer.closed.done():
                    peer.send(add())
            peer.frames.clear()
        if acknowledged >= kill_at:
            process.kill()
            await peer.closed
    return acknowledged


async def check(address: str, ledger: int, last: int) -> None:
    peer = await connect(address)
    peer.send(*(wire.encode_read(e, ledger, e, context=b"" if e else CONTEXT) for e in range(last + 1)))
    for entry, answer in enumerate(await peer.answers(last + 1)):
        assert wire.decode_response(answer).body == packet(ledger, entry, payload_of(ledger, entry))
    peer.transport.close()


async def fence_and_kill(address: str, process: subprocess.Popen[str], ledger: int) -> None:
    peer = await connect(address)
    answer = await peer.ask(wire.encode_read(1, ledger, wire.LAST_ENTRY, fence_key=KEY, context=CONTEXT))
    process.kill()
    assert answer.status == Status.OK
    await peer.closed


async def refuses(address: str, ledger: int) -> None:
    peer = await connect(address)
    frame = wire.encode_add(1, ledger, 10_000, KEY, packet(ledger, 10_000), context=CONTEXT)
    assert (await peer.ask(frame)).status == Status.FENCED
    peer.transport.close()


async def test_acknowledged_entries_and_fences_survive_every_kill(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    written: dict[int, int] = {}
    for round in range(6):
        with bookie(tmp_path) as (process, address):
            for ledger, last in written.items():
                await check(address, ledger, last)
                await refuses(address, ledger)
            written[round] = await write_until_killed(address, process, round, random.randint(50, 1500))
        with bookie(tmp_path) as (process, address):
            await fence_and_kill(address, process, round)
    assert sum(written.values()) > 1000
