"""How many entries one bookie stores per second over loopback, beside what the disk's syncs alone would allow.

    python -m loadtest.bench.bookie [--seconds 5] [--size 1024] [--dir DIR] [--wire]

The bookie runs in a process of its own. With --wire it stores nothing and answers at once: what remains is the cost of
the messages themselves. Each line names the adds in flight, adds per second, the wait for an answer,
the CPU time per add at the client and at the bookie, and the plain fdatasyncs per second of a file of the same kind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvstore.bookie.adds import Done
from kvstore.bookie.config import BookieConfig
from kvstore.bookie.connections.service import BookieService
from kvstore.bookie.storage import BookieStorage
from kvstore.env.real import real_env, run
from kvstore.loadtest.generator.options import path_word
from kvstore.proto import bookkeeper as wire
from kvstore.proto.bookkeeper import Status
from kvstore.proto.digest import EntryDigest, master_key
from kvstore.proto.frames import FrameReader
from kvstore.types import BookieId, DigestType, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum

BOOKIE = BookieId("bench-0")
KEY = master_key(b"")


class OpenLedgers:
    """Every ledger is open here."""

    async def metadata(self, ledger: LedgerId) -> LedgerMetadata:
        return LedgerMetadata(ledger, Quorum(1, 1, 1), (Fragment(EntryId(0), (BOOKIE,)),))

    async def ledgers(self) -> list[LedgerId]:
        return []


class Forgetful(BookieStorage):
    """Stores nothing."""

    def add(self, ledger: int, entry: int, body: bytes, key: bytes, *, recovery: bool, done: Done) -> None:
        self.statistics.adds += 1
        done(Status.OK)


async def serve(directory: Path, storage_of: type[BookieStorage]) -> None:
    """Run a bookie until standard input ends."""
    env = real_env(directory)
    config = BookieConfig(name="bench", listen="127.0.0.1:0")
    storage = storage_of(env, config, BOOKIE, OpenLedgers())
    await storage.start()
    service = BookieService(storage, config)
    listener = await env.transport.listen(config.listen, service.handler)
    print(listener.address, flush=True)
    loop = asyncio.get_running_loop()
    line = await loop.run_in_executor(None, sys.stdin.readline)
    while line:
        statistics = storage.refresh_statistics()
        figures = {
            "cpu_s": time.process_time(),
            "syncs": statistics.syncs,
            "sync_s": statistics.sync_s.total,
            "adds": statistics.adds,
        }
        print(json.dumps(figures), flush=True)
        line = await loop.run_in_executor(None, sys.stdin.readline)
    storage.stop()


class Writer:
    """Keeps `window` adds in flight on one connection."""

    def __init__(self, ledger: int, window: int, size: int) -> None:
        self._ledger = LedgerId(ledger)
        self._window = window
        self._payload = os.urandom(size)
        self._digest = EntryDigest(DigestType.CRC32C)
        self._frames = FrameReader(wire.PAYLOAD_MAX)
        self._next = 0
        self._sent: dict[int, float] = {}
        self.waits: list[float] = []
        self.failed = 0
        self.is_over = False
        self._transport: Any

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send(self._window, wire.bookie_context(BOOKIE))

    def _send(self, count: int, context: bytes = b"") -> None:
        frames = []
        now = time.perf_counter()
        for entry in range(self._next, self._next + count):
            packet = self._digest.packet(self._ledger, EntryId(entry), EntryId(entry - 1), 0, self._payload)
            frames.append(wire.encode_add(entry, self._ledger, entry, KEY, packet, context=context))
            self._sent[entry] = now
        self._next += count
        self._transport.write(b"".join(frames))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        answers = self._frames.feed(data)
        for payload in answers:
            txn = wire.stored_txn(payload)
            if txn < 0:
                self.failed += 1
                print(wire.decode_response(payload), file=sys.stderr)
            else:
                self.waits.append(now - self._sent.pop(txn))
        if not self.is_over:
            self._send(len(answers))

    def eof_received(self) -> bool | None:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over = True

    def pause_writing(self) -> None:
        pass

    def resume_writing(self) -> None:
        pass


class Bookie:
    """The other process."""

    def __init__(self, directory: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "loadtest.bench.bookie", *flags, "--serve", str(directory)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def figures(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        figures: dict[str, float] = json.loads(self._line())
        return figures

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


async def measure(bookie: Bookie, ledger: int, window: int, size: int, seconds: float) -> dict[str, float]:
    """Write for so long and say how it went."""
    loop = asyncio.get_running_loop()
    host, _, port = bookie.address.rpartition(":")
    writer = Writer(ledger, window, size)
    before, cpu, began = bookie.figures(), time.process_time(), time.perf_counter()
    await loop.create_connection(lambda: writer, host, int(port))  # type: ignore[arg-type, return-value]
    await asyncio.sleep(seconds)
    writer.is_over = True
    took, cpu, after = time.perf_counter() - began, time.process_time() - cpu, bookie.figures()
    await asyncio.sleep(0.2)
    waits, count = sorted(writer.waits), len(writer.waits)
    syncs = max(1, after["syncs"] - before["syncs"])
    return {
        "adds_per_s": count / took,
        "p50_ms": waits[count // 2] * 1e3,
        "p99_ms": waits[count * 99 // 100] * 1e3,
        "client_us": cpu / count * 1e6,
        "bookie_us": (after["cpu_s"] - before["cpu_s"]) / count * 1e6,
        "per_sync": count / syncs,
        "sync_ms": (after["sync_s"] - before["sync_s"]) / syncs * 1e3,
        "failed": writer.failed,
    }


def raw_syncs(directory: Path, size: int, count: int = 500) -> float:
    """fdatasyncs per second of appends to a file whose blocks are written already."""
    path = directory / "raw"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, bytes(size * count), 0)
    os.fsync(fd)
    began = time.perf_counter()
    for at in range(count):
        os.pwrite(fd, b"x" * size, at * size)
        os.fdatasync(fd)
    took = time.perf_counter() - began
    os.close(fd)
    path.unlink()
    return count / took


async def bench(arguments: argparse.Namespace, directory: Path) -> None:
    bookie = Bookie(directory, *["--wire"] * arguments.wire)
    try:
        for ledger, window in enumerate(arguments.windows):
            figures = await measure(bookie, ledger, window, arguments.size, arguments.seconds)
            line = (
                f"{window:4d} in flight, {arguments.size} B: {figures['adds_per_s']:8,.0f} adds/s, "
                f"p50 {figures['p50_ms']:.2f} ms, p99 {figures['p99_ms']:.2f} ms, "
                f"{figures['client_us']:.1f} + {figures['bookie_us']:.1f} us per add, failed {figures['failed']:.0f}"
            )
            if not arguments.wire:
                syncs = raw_syncs(directory, arguments.size * max(1, round(figures["per_sync"])))
                line += (
                    f", {figures['per_sync']:.1f} per sync of {figures['sync_ms']:.2f} ms; raw fdatasync {syncs:,.0f}/s"
                )
            print(line, flush=True)
    finally:
        bookie.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--dir", type=path_word)
    parser.add_argument("--wire", action="store_true")
    parser.add_argument("--serve", type=path_word, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        run(serve(arguments.serve, Forgetful if arguments.wire else BookieStorage))
        return
    directory = arguments.dir or Path(tempfile.mkdtemp(prefix="bench-bookie-"))
    try:
        run(bench(arguments, directory))
    finally:
        if not arguments.dir:
            shutil.rmtree(directory)


if __name__ == "__main__":
    main()
