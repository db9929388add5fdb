"""Partitions' logs with leaders that compete, crash, pause and lose the metadata store, on real bookies that do the
same.

Each node repeatedly tries to lead the one partition for a while. A leader replays the log, continues with the next
sequence, and answers reads for as long as its lease lasts. Every node tails the log all the time. Checked: the rules of
the list and of ledgers at each write to the metadata store; no acknowledged entry is lost, changed or reordered;
sequences have no gap; no tailer sees an entry that is not in the log at the end; no read under a lease misses an
acknowledged write.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from kvstore.errors import StoreError
from kvstore.types import PartitionId, Position, Quorum, Seq
from kvstore.wal.config import LogConfig
from kvstore.wal.leading.leader_log import LeaderLog
from kvstore.wal.ledger_list import BEGINNING
from kvstore.wal.ports import LogEntry
from tests.sim.ledgers_and_logs.ledgers import FAULTS, RELEASE, LedgerCluster, Writer, make_root

pytestmark = pytest.mark.sim

P = PartitionId("p1")
LEASE_MS = 500
CHAOS_S = 8.0


@dataclass
class History:
    """The promises made to clients, in order."""

    floor: int = 0
    """The highest sequence in any answer to a client."""
    acked: dict[Position, bytes] = field(default_factory=dict)
    seen: dict[Position, bytes] = field(default_factory=dict)
    """The entries that tailers received."""
    reads: int = 0
    leads: int = 0
    releases: int = 0
    pause_s: float = 2.0
    """Maximum seconds between two attempts of a node to lead."""
    faults: list[str] = field(default_factory=list)

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.faults.append(what)


class Replay:
    """The state that a log builds: the last sequence. Refuses a gap."""

    def __init__(self, history: History) -> None:
        self.seq = 0
        self.position = BEGINNING
        self.is_released = False
        self._history = history

    def apply(self, entry: LogEntry) -> None:
        history = self._history
        history.expect(entry.position > self.position, f"{entry.position} after {self.position}")
        self.position = entry.position
        seq, _, _ = entry.payload.partition(b" ")
        if entry.payload != RELEASE:
            history.expect(int(seq) == self.seq + 1, f"G4 {entry.position} has {entry.payload!r} after {self.seq}")
            self.seq = int(seq)
        before = history.seen.setdefault(entry.position, entry.payload)
        history.expect(before == entry.payload, f"L15 {entry.position} was {before!r}, is {entry.payload!r}")


class Candidate:
    """One node's attempts to lead."""

    def __init__(self, writer: Writer, history: History) -> None:
        self._writer = writer
        self._history = history
        self._random = writer.env.random

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._random.uniform(0, self._history.pause_s))
            try:
                async with asyncio.timeout(30):
                    log = await self._writer.logs.open_as_leader(P, LEASE_MS, lambda: Seq(1))
            except (StoreError, TimeoutError):
                continue
            try:
                await Lead(self._writer, self._history, log).run()
            finally:
                log.close_for_good()


class Lead:
    """One epoch of one leader."""

    def __init__(self, writer: Writer, history: History, log: LeaderLog) -> None:
        self._writer = writer
        self._history = history
        self._log = log
        self._clock = writer.env.clock
        self._random = writer.env.random
        self._state = Replay(history)
        self._acked = 0
        self._sent = 0
        self._lease_until = 0.0
        self._is_released = False
        self._lost = asyncio.Event()
        self._progress = asyncio.Event()
        log.on_lost(lambda _: self._lost.set())

    async def run(self) -> None:
        reader = self._writer.logs.reader(P, None)
        try:
            async with asyncio.timeout(20):
                while self._state.position < self._log.recovered_end:
                    for entry in await reader.read(500):
                        self._state.apply(entry)
        except (StoreError, TimeoutError):
            return
        finally:
            await reader.close()
        self._sent = self._acked = self._state.seq
        self._history.leads += 1
        reads = self._writer.env.nursery.spawn(self._answer_reads(), name="reads")
        try:
            self._append()  # the epoch-start record
            await self._serve(self._clock.now() + self._random.uniform(0.2, 4.0))
        finally:
            reads.cancel()

    async def _serve(self, until: float) -> None:
        while not self._lost.is_set() and self._clock.now() < until:
            while self._sent - self._acked < self._random.randint(1, 4):
                self._append()
            await asyncio.sleep(self._random.choice((0.001, 0.005, 0.02, 0.1)))
        if self._random.random() < 0.7 and not self._lost.is_set():
            await self._release()
        elif self._random.random() < 0.5:
            await asyncio.sleep(1.0)  # idle: it continues to answer under its lease

    async def _answer_reads(self) -> None:
        while not self._lost.is_set():
            self._read()
            await asyncio.sleep(self._random.uniform(0.001, 0.01))

    def _append(self) -> None:
        self._sent += 1
        payload = b"%d %d %s" % (self._sent, self._log.epoch, b"x" * self._random.choice((1, 30, 800)))
        seq = self._sent

        def done(position: Position | None, sent_at: float, error: StoreError | None) -> None:
            if error is not None or position is None:
                return
            history = self._history
            history.expect(seq == self._acked + 1, f"G5 {seq} acknowledged after {self._acked}")
            cluster = self._writer.cluster
            history.expect(position.ledger in cluster.rules.partition_of, f"G2 {position} acknowledged, never listed")
            cluster.note_confirmed(position.ledger, position.entry)
            self._acked = seq
            history.acked[position] = payload
            history.floor = max(history.floor, seq)
            if not self._is_released:
                self._lease_until = max(self._lease_until, sent_at + LEASE_MS / 1000)
                self._read()

        self._log.append(payload, Seq(seq), done)

    def _read(self) -> None:
        """Perform a linearizable read: allowed only under the lease, and only of acknowledged state."""
        if self._is_released or self._clock.now() >= self._lease_until:
            return
        self._history.reads += 1
        epoch, floor = self._log.epoch, self._history.floor
        self._history.expect(self._acked >= floor, f"stale read in epoch {epoch}: {self._acked}, {floor} was acked")

    async def _release(self) -> None:
        """Stop answering permanently, then record that in the log."""
        for _ in range(500):
            if self._acked == self._sent or self._lost.is_set():
                break
            await asyncio.sleep(0.01)
        else:
            return
        self._is_released = True
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def released(position: Position | None, sent_at: float, error: StoreError | None) -> None:
            if position is not None:
                self._writer.cluster.note_confirmed(position.ledger, position.entry)
                self._history.acked[position] = RELEASE
                self._history.releases += 1
            if not done.done():
                done.set_result(error is None)

        self._log.append(RELEASE, Seq(self._sent + 1), released)
        if await done and self._random.random() < 0.5:
            try:
                await self._log.seal()
            except StoreError:
                return


async def tail(writer: Writer, history: History) -> None:
    """Tail from the beginning, sometimes with a new reader from the current position."""
    state = Replay(history)
    while True:
        reader = writer.logs.reader(P, None if state.position == BEGINNING else state.position)
        try:
            for _ in range(writer.env.random.randint(1, 40)):
                for entry in await reader.read(1000):
                    state.apply(entry)
        except StoreError:
            await asyncio.sleep(0.1)
        finally:
            await reader.close()


async def scenario(cluster: LedgerCluster, history: History, faults: list[str]) -> None:
    make_root(cluster.tree)

    async def work(writer: Writer) -> None:
        writer.env.nursery.spawn(tail(writer, history), name="tail")
        await Candidate(writer, history).run()

    cluster.work = work
    cluster.start_all()
    await cluster.wait_up()
    await cluster.chaos(CHAOS_S, faults)
    # All nodes are healthy again: one can lead, and everything promised is there.
    cluster.work = None
    for name in cluster.names:
        cluster.crash(name)
        cluster.start(name)
    await cluster.wait_up()
    final = cluster.writers[cluster.names[0]]
    await cluster.node(final.name).call(judge(final, history))
    cluster.check_disks()


async def judge(writer: Writer, history: History) -> None:
    log = await open_at_last(writer)
    state, found = Replay(history), {}
    reader = writer.logs.reader(P, None)
    while state.position < log.recovered_end:
        for entry in await reader.read(1000):
            state.apply(entry)
            found[entry.position] = entry.payload
    await reader.close()
    for position, payload in history.acked.items():
        history.expect(found.get(position) == payload, f"acknowledged and lost or changed: {position} {payload!r}")
    for position, payload in history.seen.items():
        history.expect(found.get(position) == payload, f"L10 a tailer saw {position} {payload!r}")
    log.close_for_good()


async def open_at_last(writer: Writer) -> LeaderLog:
    """Check P8: with all nodes up a leader appears."""
    for _ in range(20):
        try:
            return await writer.logs.open_as_leader(P, 0, lambda: Seq(1))
        except StoreError:
            await asyncio.sleep(0.5)
    raise AssertionError("no node can open the log although all bookies are up")


def run_seed(seed: int, faults: tuple[str, ...] = FAULTS) -> History:
    """Play one run. Raises AssertionError if a promise was broken."""
    cluster = LedgerCluster(seed)
    random = cluster.random
    cluster.names = cluster.names if random.random() < 0.5 else [f"n{i}" for i in range(1, 6)]
    cluster.log_config = LogConfig(
        quorum=random.choice((Quorum(3, 3, 2), Quorum(3, 3, 2), Quorum(len(cluster.names), 3, 2))),
        roll_entries=random.choice((5, 20, 100, 100_000)),
        check_every_s=random.choice((0.2, 2.0)),
        roll_age_s=random.choice((0.5, 900.0)),
    )
    history = History(pause_s=random.choice((1.0, 4.0, 10.0)))
    chosen = random.sample(faults, random.randint(1, min(4, len(faults))))
    with cluster:
        cluster.run(scenario(cluster, history, chosen), limit_s=400)
    assert not history.faults, f"seed {seed}: {history.faults[0]}"
    return history


@pytest.mark.parametrize("seed", range(25))
def test_log_keeps_its_promises_under_any_faults_of_leaders_and_bookies(seed: int) -> None:
    run_seed(seed)
