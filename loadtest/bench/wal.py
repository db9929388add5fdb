"""Measure the CPU time per entry in a ledger writer's process, with two remote bookies and the node's own, without the
kernel's and the bookies' time.

    python -m loadtest.bench.wal [--entries 20000] [--size 1024] [--window 4]

The remote bookies are streams in the same process that answer at once; what their answers cost is measured apart and
taken off. The budget is 60 µs for each entry, whatever the number of mutations in it.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from kvstore.env.ports import Stream, StreamHandler, Transport
from kvstore.env.real import real_env, run
from kvstore.errors import StoreError
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore
from kvstore.meta.registration import RegisteredBookies
from kvstore.proto import bookkeeper as wire
from kvstore.proto.bookkeeper import Status
from kvstore.proto.frames import FrameReader
from kvstore.proto.varint import read_varint
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, Position, Quorum
from kvstore.wal.bookies import BookieClients
from kvstore.wal.choice import BookieChoice
from kvstore.wal.handle import LedgerHandle, LedgerPorts
from kvstore.wal.ports import LocalBookie

ENSEMBLE = tuple(BookieId(f"n{i}-1") for i in range(3))
TXN_AT = 7
"""Offset of the transaction number in the payload of an add."""


class Answering:
    """A stream whose other end stores every add at once."""

    def __init__(self, handler: StreamHandler) -> None:
        self.busy_s = 0.0
        self._handler = handler
        self._frames = FrameReader(wire.PAYLOAD_MAX)
        self._waiting: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Ignore the frame: it is the first one of the connection, and nobody needs its answer."""

    def writelines(self, data: Iterable[bytes]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._answer)
        self._waiting += data

    def _answer(self) -> None:
        began = time.process_time()
        data, self._waiting = b"".join(self._waiting), []
        txns = [read_varint(payload, TXN_AT)[0] for payload in self._frames.feed(data)]
        answers = b"".join(wire.encode_add_response(txn, Status.OK, 7, 0) for txn in txns)
        self.busy_s += time.process_time() - began
        self._handler.data_received(answers)

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        """Do nothing, because nothing is open."""


class AtOnce:
    """A Transport to bookies that answer at once."""

    def __init__(self) -> None:
        self.streams: list[Answering] = []

    async def connect(self, address: str, handler: StreamHandler) -> Stream:
        stream = Answering(handler)
        self.streams.append(stream)
        handler.connection_made(stream)
        return cast("Stream", stream)


class Own:
    """The node's own bookie. It stores in the next turn of the event loop what arrives in one turn."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[Status], Any]] = []

    def add(self, ledger: int, entry: int, body: bytes, key: bytes, *, recovery: bool, done: Any) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._stored)
        self._waiting.append(done)

    def _stored(self) -> None:
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done(Status.OK)

    def write_lac(self, ledger: int, body: bytes, key: bytes, *, done: Any) -> None:
        """Do nothing, because nobody reads here."""


class View:
    current = RegisteredBookies(dict.fromkeys(ENSEMBLE, ""), {})

    def on_change(self, listener: Callable[[], None]) -> None:
        """Do nothing, because the registrations never change."""


async def measure(entries: int, size: int, window: int, directory: Path) -> tuple[float, float]:
    """Return the CPU seconds in total, and those of the stubs."""
    transport = AtOnce()
    env = replace(real_env(directory), transport=cast("Transport", transport))
    store = MemoryStore()
    bookies = BookieClients(env, lambda _: "x", own=(ENSEMBLE[0], cast("LocalBookie", Own())))
    choice = BookieChoice(View(), store, clock=env.clock, random=env.random, own=ENSEMBLE[0])
    ports = LedgerPorts(env.clock, bookies, LedgerStore(store), choice)
    metadata = LedgerMetadata(LedgerId(7), Quorum(3, 3, 2), (Fragment(EntryId(0), ENSEMBLE),))
    handle = LedgerHandle(metadata, ports, env.nursery, on_halt=lambda error: None)
    payload = b"x" * size
    finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    sent = confirmed = 0

    def append() -> None:
        nonlocal sent
        sent += 1
        handle.append(payload, done)

    def done(position: Position | None, sent_at: float, error: StoreError | None) -> None:
        nonlocal confirmed
        assert error is None, error
        confirmed += 1
        if sent < entries:
            append()
        elif confirmed == entries:
            finished.set_result(None)

    began = time.process_time()
    for _ in range(window):
        append()
    await finished
    spent = time.process_time() - began
    handle.release()
    return spent, sum(stream.busy_s for stream in transport.streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=1024, help="payload bytes of an entry")
    parser.add_argument("--window", type=int, default=4, help="entries in flight")
    chosen = parser.parse_args()
    with TemporaryDirectory() as directory:
        spent, stubs = run(measure(chosen.entries, chosen.size, chosen.window, Path(directory)))
    print(f"{(spent - stubs) / chosen.entries * 1e6:.1f} us of CPU per entry of {chosen.size} bytes")


if __name__ == "__main__":
    main()
