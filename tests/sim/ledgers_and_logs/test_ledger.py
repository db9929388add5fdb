"""Single ledgers in detail: a writer whose bookies fail and are replaced, and two recoveries that start while it
writes, on five nodes with real bookies, all within fractions of a second.

Checked: confirmed entries are in the closed ledger with their payloads; two recoveries agree; a tailer sees nothing
that is dropped later; the metadata rules; at the end, the disks that the metadata names have an ack quorum of copies of
every entry.
"""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from kvstore.errors import StoreError
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, Position, Quorum
from kvstore.wal.entry_reader import EntryReader
from kvstore.wal.handle import LedgerHandle
from kvstore.wal.opener import LedgerTakeover
from tests.sim.ledgers_and_logs.ledgers import LedgerCluster, Writer, make_root

pytestmark = pytest.mark.sim

ROUNDS = 6
QUORUMS = (Quorum(3, 3, 2), Quorum(3, 3, 2), Quorum(2, 2, 2), Quorum(4, 3, 2), Quorum(3, 2, 2), Quorum(3, 3, 3))


class Round:
    """One ledger from its creation to its end."""

    def __init__(self, cluster: LedgerCluster, number: int) -> None:
        self.cluster = cluster
        self.ledger = LedgerId(number)
        self.payloads: dict[EntryId, bytes] = {}
        """The payloads that the writer sent."""
        self.confirmed: list[EntryId] = []
        self.ends: list[EntryId] = []
        """The end found by each completed recovery."""
        self.seen: dict[EntryId, bytes] = {}
        self.random = Random(f"{cluster.world.seed}/round {number}")

    async def run(self) -> None:
        cluster, random = self.cluster, self.random
        names = random.sample(cluster.names, len(cluster.names))
        writing = cluster.writers[names[0]]
        metadata = await self._create(writing, names)
        chaos = cluster.world.loop.create_task(self._chaos(names))
        # As tasks of their nodes, so that a crash ends them without a result.
        works = [
            (names[0], self._write(writing, metadata)),
            (names[3], self._tail(cluster.writers[names[3]], metadata)),
        ]
        works += [(name, self._recover(cluster.writers[name])) for name in names[1 : random.choice((2, 3))]]
        for name, work in works:
            env = cluster.node(name).env
            env.nursery.spawn(work, name=f"round {self.ledger}")
        await chaos
        await asyncio.sleep(0.5)
        cluster.heal()
        await cluster.wait_up()
        end = await self._recover_at_last(cluster.writers[names[1]])
        await self._judge(cluster.writers[names[1]], end)

    async def _create(self, writer: Writer, names: list[str]) -> LedgerMetadata:
        quorum = self.random.choice(QUORUMS)
        ensemble = tuple(BookieId(f"{name}-1") for name in names[: quorum.ensemble])
        metadata = LedgerMetadata(self.ledger, quorum, (Fragment(EntryId(0), ensemble),), token=1 + self.ledger)
        await self.cluster.node(writer.name).call(writer.ledgers.create(metadata))
        return metadata

    async def _write(self, writer: Writer, metadata: LedgerMetadata) -> None:
        halted = asyncio.Event()
        handle = LedgerHandle(metadata, writer.ports, writer.env.nursery, on_halt=lambda _: halted.set())

        def done(position: Position | None, sent_at: float, error: StoreError | None) -> None:
            if position is not None:
                self.confirmed.append(position.entry)
                self.cluster.note_confirmed(*position)

        for _ in range(self.random.randint(5, 60)):
            if handle.is_halted:
                return
            if handle.writer.unconfirmed < 4:
                payload = b"%d of %d" % (handle.writer.last_added + 1, self.ledger)
                self.payloads[EntryId(handle.writer.last_added + 1)] = payload
                handle.append(payload, done)
            await asyncio.sleep(self.random.choice((0, 0, 0.001, 0.003, 0.02)))
        handle.release()

    async def _recover(self, writer: Writer) -> None:
        await asyncio.sleep(self.random.uniform(0, 0.15))
        for _ in range(3):
            takeover = LedgerTakeover(self.ledger, writer.ports, writer.env.nursery)
            try:
                await takeover.take_over()
                await asyncio.sleep(self.random.choice((0, 0, 0.01, 0.1)))
                self.ends.append((await takeover.close()).last_entry)
            except StoreError:
                await asyncio.sleep(self.random.uniform(0, 0.2))
            else:
                return

    async def _recover_at_last(self, writer: Writer) -> EntryId:
        """Complete a recovery with all bookies up."""
        for _ in range(30):
            takeover = LedgerTakeover(self.ledger, writer.ports, writer.env.nursery)
            try:
                await self.cluster.node(writer.name).call(takeover.take_over())
                return (await self.cluster.node(writer.name).call(takeover.close())).last_entry
            except StoreError:
                await asyncio.sleep(0.3)
        raise AssertionError(f"ledger {self.ledger} cannot be recovered although all bookies are up")

    async def _tail(self, writer: Writer, metadata: LedgerMetadata) -> None:
        """Read everything that any bookie reports as confirmed."""
        reader = EntryReader(metadata, writer.bookies, writer.env.nursery)
        while True:
            await asyncio.sleep(0.005)
            try:
                reader.metadata, _ = await writer.ledgers.read(self.ledger)
                bookie = self.random.choice(reader.metadata.fragments[-1].ensemble)
                lac = await writer.bookies.read_lac(bookie, self.ledger, reader.digest)
                for entry in range(len(self.seen), lac + 1):
                    self.seen[EntryId(entry)] = (await reader.read(EntryId(entry))).payload
            except StoreError:
                continue

    async def _chaos(self, names: list[str]) -> None:
        """Strike the bookies of this ledger, and sometimes the writer, within milliseconds."""
        cluster, random = self.cluster, self.random
        network = cluster.world.network
        for _ in range(random.randint(1, 8)):
            await asyncio.sleep(random.uniform(0, 0.05))
            one, other = random.sample(names, 2)
            match random.choice(("reset", "cut", "cut", "heal", "crash", "slow", "clog", "unknown", "blind")):
                case "blind":
                    # At first the recovery does not reach one bookie, and neither does the writer, whose adds are in
                    # flight.
                    writing, recovering, bookie = names[0], names[1], random.choice(names[:4])
                    if bookie not in (writing, recovering):
                        network.clog(writing, bookie, random.uniform(0.02, 0.4))
                        network.slow(recovering, random.choice(names), random.uniform(0.02, 0.1))
                        network.cut(recovering, bookie)
                        await asyncio.sleep(random.uniform(0, 0.1))
                        network.heal(recovering, bookie)
                case "reset":
                    network.reset_random()
                case "cut":
                    network.cut_one_way(one, other)
                case "heal":
                    network.heal()
                case "crash":
                    victim = random.choice(names[1:])
                    cluster.crash(victim, power=random.random() < 0.5)
                    await asyncio.sleep(random.uniform(0, 0.05))
                    cluster.start(victim)
                case "slow":
                    network.slow(one, other, random.uniform(0, 0.05))
                case "clog":
                    network.clog(one, other, random.uniform(0, 0.3))
                case "unknown":
                    for writer in cluster.writers.values():
                        writer.store.trouble = 0.3
        await asyncio.sleep(random.uniform(0, 3.0))

    async def _judge(self, writer: Writer, end: EntryId) -> None:
        name = f"seed {self.cluster.world.seed} ledger {self.ledger}"
        assert all(each == end for each in self.ends), f"{name}: recoveries disagree: {self.ends}, {end}"
        assert self.confirmed == list(range(len(self.confirmed))), f"{name}: {self.confirmed}"
        assert end >= len(self.confirmed) - 1, f"{name}: ends at {end}, {self.confirmed[-1]} was confirmed"
        assert all(entry <= end for entry in self.seen), f"{name}: ends at {end}, a tailer saw {max(self.seen)}"
        metadata, _ = await writer.ledgers.read(self.ledger)
        reader = EntryReader(metadata, writer.bookies, writer.env.nursery)
        for entry in map(EntryId, range(end + 1)):
            packet = await self.cluster.node(writer.name).call(reader.read(entry))
            assert packet.payload == self.payloads[entry], f"{name}: entry {entry} is {packet.payload!r}"
            assert self.seen.get(entry, packet.payload) == packet.payload, f"{name}: a tailer saw another {entry}"
            length = sum(len(self.payloads[EntryId(each)]) for each in range(entry + 1))
            assert packet.length == length, f"{name}: entry {entry} has length {packet.length}, expected {length}"
        assert metadata.length == sum(len(self.payloads[EntryId(each)]) for each in range(end + 1)), name


async def scenario(cluster: LedgerCluster, rounds: int) -> None:
    make_root(cluster.tree)
    cluster.start_all()
    await cluster.wait_up()
    for number in range(rounds):
        await Round(cluster, number).run()
    cluster.check_disks()


def run_seed(seed: int, rounds: int = ROUNDS) -> None:
    """Play one run. Raises AssertionError if a promise was broken."""
    with LedgerCluster(seed, nodes=5) as cluster:
        cluster.run(scenario(cluster, rounds), limit_s=600)


@pytest.mark.parametrize("seed", range(25))
def test_ledger_keeps_acknowledged_entries(seed: int) -> None:
    run_seed(seed)
