"""Compare our log client with Apache's Java client: the rate of writing one ledger to three of our or Apache's bookies.

    python -m loadtest.bench.log_client [--rounds 3] [--seconds 4] [--size 1024] [--in-flight 1 100 1000]

ZooKeeper, three of our bookies and three of Apache's are separate processes with default settings: each bookie syncs
before it answers. Each client is another process and writes 3/3/2 with the given number of adds in flight. The pairs of
client and bookies take turns. Each line is the median of the rounds: adds confirmed per second, the time from the call
of an add to its confirmation, and the processor time per add of the client and of the three bookies together. A run in
which an add fails is reported and left out; the first column counts the remaining runs. Apache's client and bookies
take part if their jars are installed (`python -m tests.interop.apache --install`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

from kvstore.env.real import run
from kvstore.errors import StoreError
from kvstore.types import LedgerId, PartitionId, Position
from kvstore.wal.handle import LedgerHandle
from loadtest.bench.processors import spent_s
from tests.interop import java
from tests.interop.processes import Processes
from tests.interop.python_client import client

WRITE = "write"
"""First word of the command line of a process that is one client."""
LATE_S = 120.0
WARM_S = 8.0
"""Duration of the warm-up, which is not counted because Java compiles meanwhile."""
HEAD = (
    "| runs | in flight | client | bookies | adds/s | MB/s | p50 ms | p99 ms | us of the client | us of the bookies |\n"
    + 10 * "|---"
    + "|"
)
LINE = (
    "| {count} | {window} | {client} | {bookies} | {per_s:,.0f} | {mb_per_s:.2f} | {p50_ms:.2f} | {p99_ms:.2f} "
    "| {client_us:.1f} | {bookies_us:.1f} |"
)


class RunEnded(Exception):
    """A client ended without printing its figures. The message has the last output of the client."""


class Load:
    """Keeps a fixed number of adds in flight on one ledger."""

    def __init__(self, handle: LedgerHandle, window: int, size: int) -> None:
        self.confirmed = 0
        self.took_s: list[float] = []
        """Time from the call of each add to its confirmation, since the list was last cleared."""
        self._sent: deque[float] = deque()
        self._handle = handle
        self._window = window
        self._payload = os.urandom(size)
        self._is_over = False

    def start(self) -> None:
        for _ in range(self._window):
            self._append()

    def _append(self) -> None:
        self._sent.append(time.perf_counter())
        self._handle.append(self._payload, self._done)

    def _done(self, position: Position | None, sent_at: float, error: StoreError | None) -> None:
        assert error is None, error
        self.confirmed += 1
        self.took_s.append(time.perf_counter() - self._sent.popleft())  # they are confirmed in the order of the calls
        if not self._is_over:
            self._append()

    async def stop(self) -> None:
        self._is_over = True
        await self._handle.drained()


async def write(zookeeper: str, window: int, size: int, seconds: float, warm_s: float) -> None:
    """Run as the client, and print its figures."""
    async with client(zookeeper) as (env, ports, creator):
        metadata = await creator.create(PartitionId("p1"), LedgerId(-1))
        halted: list[StoreError] = []
        handle = LedgerHandle(metadata, ports, env.nursery, on_halt=halted.append)
        load = Load(handle, window, size)
        load.start()
        await asyncio.sleep(warm_s)
        load.took_s.clear()
        began, spent, confirmed = time.perf_counter(), time.process_time(), load.confirmed
        sys.stdout.write("begun\n")
        sys.stdout.flush()
        for _ in range(100):  # a disk may hang for longer than a short run lasts
            await asyncio.sleep(seconds)
            if load.took_s or halted:
                break
        figures = {
            "adds": load.confirmed - confirmed,
            "took_s": time.perf_counter() - began,
            "cpu_s": time.process_time() - spent,
        }
        took_s = sorted(load.took_s)
        for share in (50, 99):
            figures[f"p{share}_us"] = took_s[len(took_s) * share // 100] * 1e6
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()
        await load.stop()
        await handle.close()
        last = (await ports.ledgers.read(metadata.ledger))[0].last_entry
        assert not halted, halted
        assert last == load.confirmed - 1, (last, load.confirmed)


class Kind(NamedTuple):
    """Three bookies of one kind, and the clients' command lines."""

    bookies: list[int]
    commands: dict[str, list[str]]
    """Command lines, by the owner of the client."""


async def one_run(servers: Mapping[str, Sequence[int]], command: Sequence[str], size: int) -> dict[str, float]:
    """Run a client. Reads from it when it has begun and what it did. Raises RunEnded.

    `servers`: process ids by name. The processor time of each name is returned as `<name>_us` per add. `per_entry` is
    1 unless the client reports a number of entries that differs from that of its adds.
    """
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(LATE_S):
            await _line(process.stdout, b"begun")
            before = {name: sum(map(spent_s, pids)) for name, pids in servers.items()}
            figures = json.loads(await _line(process.stdout, b"{"))
            after = {name: sum(map(spent_s, pids)) for name, pids in servers.items()}
            await process.communicate()
        if process.returncode != 0:
            raise RunEnded(f"it ended with {process.returncode}")
    except BaseException:
        if process.returncode is None:
            process.kill()
        raise
    adds = figures["adds"]
    return {
        "per_s": adds / figures["took_s"],
        "mb_per_s": adds * size / figures["took_s"] / 1e6,
        "p50_ms": figures["p50_us"] / 1000,
        "p99_ms": figures["p99_us"] / 1000,
        "per_entry": adds / figures.get("entries", adds),
        "client_us": figures["cpu_s"] / adds * 1e6,
        **{f"{name}_us": (after[name] - before[name]) / adds * 1e6 for name in servers},
    }


async def _line(output: asyncio.StreamReader, start: bytes) -> bytes:
    """Return the first line that begins with these words."""
    last = b""
    while not (line := await output.readline()).startswith(start):
        if not line:
            raise RunEnded(last.decode(errors="replace").strip() or "it said nothing")
        last = line
    return line


async def kinds(directory: Path, stack: AsyncExitStack) -> dict[str, Kind]:
    """Yield the bookies, by their owner. Each kind is its own cluster, because all bookies of a ledger must be
    of one kind."""
    ours = await stack.enter_async_context(Processes(directory / "ours", 3))
    found = {"ours": (ours, [bookie.process.pid for bookie in ours.bookies])}
    if java.is_installed():
        theirs = await stack.enter_async_context(Processes(directory / "theirs", 0))
        for _ in range(3):
            await theirs.add_their_bookie(quick=False)
        found["Apache's"] = theirs, [process.pid for process in theirs.theirs.values()]
    return {name: Kind(pids, clients(cluster)) for name, (cluster, pids) in found.items()}


def clients(cluster: Processes) -> dict[str, list[str]]:
    """Return the command lines that write to a cluster, without their numbers."""
    commands = {"ours": [sys.executable, "-m", __spec__.name, WRITE, cluster.zookeeper.address]}
    if java.is_installed():
        commands["Apache's"] = [word for word in cluster.session("Load") if word != java.QUICK]
    return commands


async def compare(
    directory: Path, *, in_flight: Sequence[int], size: int, seconds: float, rounds: int, warm_s: float = WARM_S
) -> None:
    async with AsyncExitStack() as stack:
        there = await kinds(directory, stack)
        pairs = [(client, bookies) for bookies, kind in there.items() for client in kind.commands]
        print(HEAD, flush=True)
        for window in in_flight:
            numbers = [str(each) for each in (window, size, seconds, warm_s)]
            runs: dict[tuple[str, str], list[dict[str, float]]] = {pair: [] for pair in pairs}
            for _ in range(rounds):
                for client, bookies in pairs:
                    kind = there[bookies]
                    try:
                        figures = await one_run({"bookies": kind.bookies}, [*kind.commands[client], *numbers], size)
                    except RunEnded as error:
                        print(f"{client} on {bookies}, {window} in flight: {error}", file=sys.stderr, flush=True)
                    else:
                        runs[client, bookies].append(figures)
            for (client, bookies), found in runs.items():
                if found:
                    middle = {key: median(each[key] for each in found) for key in found[0]}
                    row = {"count": len(found), "window": window, "client": client, "bookies": bookies}
                    print(LINE.format(**row, **middle), flush=True)


def run_bench(*, in_flight: Sequence[int], size: int, seconds: float, rounds: int) -> None:
    """Measure, and print the figures."""
    if java.is_installed():
        java.compile_sessions()
    with tempfile.TemporaryDirectory(prefix="bench-log-client-") as directory:
        asyncio.run(compare(Path(directory), in_flight=in_flight, size=size, seconds=seconds, rounds=rounds))


def main() -> None:
    if sys.argv[1:2] == [WRITE]:  # the process of our client
        zookeeper, window, size, seconds, warm_s = sys.argv[2:]
        run(write(zookeeper, int(window), int(size), float(seconds), float(warm_s)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 100, 1_000])
    parser.add_argument("--size", type=int, default=1_024)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    run_bench(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
