"""Measure the cost of catching up with a log and of copying it: requests and processor time per entry, with and without
batches.

    python -m loadtest.bench.catch_up [--entries 100000] [--size 100] [--quorum 3/3/2] [--rounds 3]

ZooKeeper and the bookies, one more than the ensemble has, are separate processes. A tail whose node has no bookie reads
a log of one closed ledger from its beginning. Then one bookie's entries are copied to the spare bookie. Both are done
in turn with batched reads and with a client that never requests any. A first uncounted run of each ensures that all
counted runs copy entries that the spare bookie has already. Figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from kvstore.cli.output import as_table
from kvstore.env.ports import Env
from kvstore.env.real import real_env, run
from kvstore.errors import BookieError, StoreError
from kvstore.meta import paths
from kvstore.meta.bookies import BookieView
from kvstore.meta.layout import ClusterIdentity
from kvstore.meta.store import ensure_path
from kvstore.proto.availability import HeldEntries
from kvstore.types import EntryId, LedgerId, LedgerMetadata, PartitionId, Position, Quorum, Seq
from kvstore.wal.bookies import BookieClients
from kvstore.wal.choice import BookieChoice
from kvstore.wal.config import LogConfig
from kvstore.wal.copies.copying import Copying
from kvstore.wal.copies.pace import CopyPace
from kvstore.wal.creator import LedgerCreator
from kvstore.wal.handle import LedgerHandle, LedgerPorts
from kvstore.wal.ledger_list import LedgerList
from kvstore.wal.list_codec import encode
from kvstore.wal.lists import LedgerLists
from kvstore.wal.new_ids import NewLedgerIds
from kvstore.wal.ports import ReadAnswer
from kvstore.wal.tailing.tail import TailReader
from loadtest.bench.processors import spent_s
from loadtest.bench.striping import quorum_of
from tests.interop.processes import Processes

P = PartitionId("p1")
WINDOW = 500
UNBOUND = 1 << 40


class Counting(BookieClients):
    """A bookie client that counts its requests. With `is_batching` False it supports no batched reads."""

    requests = 0
    is_batching = True

    async def read(self, *asked: Any, **how: Any) -> ReadAnswer:
        """Read one entry."""
        self.requests += 1
        return await super().read(*asked, **how)

    async def read_batch(self, *asked: Any, **how: Any) -> Sequence[bytes]:
        """Read several entries in one request."""
        if not self.is_batching:
            raise BookieError("this client asks for no batches")
        self.requests += 1
        return await super().read_batch(*asked, **how)


class Bench(NamedTuple):
    """A closed ledger on real bookies, and the clients that read it."""

    cluster: Processes
    env: Env
    bookies: Counting
    ports: LedgerPorts
    metadata: LedgerMetadata

    @property
    def entries(self) -> int:
        return self.metadata.last_entry + 1


async def filled(cluster: Processes, quorum: Quorum, entries: int, size: int, directory: Path) -> Bench:
    """Write the ledger, and make it the only ledger of a log."""
    env, store = real_env(directory), cluster.store
    view = BookieView(store)
    await view.start(env.nursery)
    bookies = Counting(env, view.address)
    choice = BookieChoice(view, store, clock=env.clock, random=env.random)
    ports = LedgerPorts(env.clock, bookies, cluster.ledgers, choice)
    config = LogConfig(quorum=quorum)
    ids = NewLedgerIds(store, bookies, choice, ClusterIdentity(store), clock=env.clock, nursery=env.nursery)
    creator = LedgerCreator(ids, cluster.ledgers, choice, config, clock=env.clock, random=env.random)
    metadata = await creator.create(P, LedgerId(-1))
    await _write(LedgerHandle(metadata, ports, env.nursery, on_halt=lambda _: None), entries, size)
    written = await cluster.metadata(metadata.ledger)
    if len(written.fragments) > 1:
        raise RuntimeError("a bookie was late and another took its place: the machine is too busy for this")
    path = paths.partition_log(P)
    await ensure_path(store, path)
    listed = LedgerList().with_ledger(metadata.ledger, Seq(1), epoch=1, lease_ms=0)
    await store.set(path, encode(listed), -1)
    return Bench(cluster, env, bookies, ports, written)


async def _write(handle: LedgerHandle, entries: int, size: int) -> None:
    slots, payload = asyncio.Semaphore(WINDOW), os.urandom(size)

    failed: list[StoreError] = []

    def done(_position: Position | None, _sent_at: float, error: StoreError | None) -> None:
        if error is not None:
            failed.append(error)
        slots.release()

    for _ in range(entries):
        await slots.acquire()
        if failed:
            raise failed[0]
        handle.append(payload, done)
    await handle.drained()
    if failed:
        raise failed[0]
    await handle.close()


async def catch_up(bench: Bench) -> None:
    """Read the log to its end."""
    tail = TailReader(
        P,
        None,
        store=bench.cluster.store,
        lists=LedgerLists(bench.cluster.store),
        ports=bench.ports,
        nursery=bench.env.nursery.child("tail"),
    )
    seen = 0
    while seen < bench.entries:
        for entry in await tail.read(1_000):
            assert entry.position.entry == seen, (entry.position, seen)
            seen += 1
    await tail.close()


async def copy(bench: Bench) -> None:
    """Copy one bookie's entries to the spare bookie."""
    metadata = bench.metadata
    ensemble = metadata.fragments[0].ensemble
    spare = next(each.id for each in bench.cluster.bookies if each.id not in ensemble)
    wanted = metadata.with_ensemble(EntryId(0), (spare, *ensemble[1:]))
    copying = Copying(metadata, bench.bookies, bench.env.nursery, CopyPace(bench.env.clock, UNBOUND))
    await copying.fill(wanted, metadata.last_entry, {spare: HeldEntries(())}, {spare})
    assert copying.copied == sum(ensemble[0] in metadata.write_set(EntryId(each)) for each in range(bench.entries))


async def measure(bench: Bench, work: Callable[[Bench], Awaitable[None]], *, is_batching: bool) -> dict[str, float]:
    """Measure each work once, with and without batches."""
    pids = [bookie.process.pid for bookie in bench.cluster.bookies]
    bench.bookies.is_batching, asked = is_batching, bench.bookies.requests
    before, began, spent = sum(map(spent_s, pids)), time.perf_counter(), time.process_time()
    await work(bench)
    took_s, spent, entries = time.perf_counter() - began, time.process_time() - spent, bench.entries
    return {
        "requests": bench.bookies.requests - asked,
        "entries_per_s": entries / took_s,
        "client_us_per_entry": 1e6 * spent / entries,
        "bookies_us_per_entry": 1e6 * (sum(map(spent_s, pids)) - before) / entries,
    }


async def compare(directory: Path, *, quorum: Quorum, entries: int, size: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each work, with and without batches."""
    async with Processes(directory, quorum.ensemble + 1) as cluster:
        bench = await filled(cluster, quorum, entries, size, directory)
        runs: dict[tuple[str, str], list[dict[str, float]]] = {}
        for counted in (False, *(rounds * (True,))):
            for name, work in {"catch up": catch_up, "copy": copy}.items():
                for way in ("one by one", "batches"):
                    found = await measure(bench, work, is_batching=way == "batches")
                    if counted:
                        runs.setdefault((name, way), []).append(found)
        bench.bookies.close()
        await bench.env.nursery.close()
    return [
        {"what": name, "how": way, **{key: round(median(each[key] for each in found), 1) for key in found[0]}}
        for (name, way), found in runs.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--quorum", type=quorum_of, default=Quorum(3, 3, 2))
    parser.add_argument("--rounds", type=int, default=3)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-catch-up-") as directory:
        rows = run(compare(Path(directory), **vars(words)))
    print(as_table(rows))


if __name__ == "__main__":
    main()
