"""A bench for single cases of the ledger client: one virtual process, model bookies, a metadata store that can be
frozen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from kvstore.autorecovery.config import AutorecoveryConfig
from kvstore.autorecovery.worker import Worker
from kvstore.env.death.port import UNPROVEN, DeathWatch
from kvstore.errors import StoreError
from kvstore.meta import paths
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.meta.recovery_settings import RecoverySettings
from kvstore.meta.store import Change, ensure_path
from kvstore.meta.underreplication import Underreplication
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, PartitionId, Position, Quorum, Seq
from kvstore.wal.choice import BookieChoice
from kvstore.wal.config import LogConfig
from kvstore.wal.copies.pace import CopyPace
from kvstore.wal.deaths import ProvenDeaths
from kvstore.wal.handle import LedgerHandle, LedgerPorts
from kvstore.wal.ledger_list import LedgerList
from kvstore.wal.lists import LedgerLists
from kvstore.wal.log import PartitionLogs
from kvstore.wal.opener import LedgerTakeover
from tests.sim.ledgers_and_logs.ledgers import RELEASE, make_root
from tests.sim.ledgers_and_logs.model_bookies import ModelBookies
from tests.sim.world.env import SimWorld

P = PartitionId("p1")
LEDGER = LedgerId(100)
NAMES = tuple(BookieId(f"b{i}-1") for i in range(1, 7))
B1, B2, B3, B4, B5, B6 = NAMES


class FrozenStore(MemoryStore):
    """A session whose writes wait while it is frozen."""

    def __init__(self, tree: MemoryTree) -> None:
        super().__init__(tree)
        self.writes: list[str] = []
        """Paths of all writes, in order."""
        self._thawed = asyncio.Event()
        self._thawed.set()
        self.fail_next: list[StoreError] = []
        """Errors raised by the next writes after they have been done."""

    def freeze(self) -> None:
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    async def set(self, path: str, data: bytes, version: int) -> int:
        await self._thawed.wait()
        new = await super().set(path, data, version)
        self.writes.append(path)
        self._fail()
        return new

    async def multi(self, changes: Sequence[Change]) -> None:
        await self._thawed.wait()
        await super().multi(changes)
        self.writes += [change.path for change in changes]
        self._fail()

    def _fail(self) -> None:
        if self.fail_next:
            raise self.fail_next.pop(0)


class Appended:
    """The results of appends, in order."""

    def __init__(self) -> None:
        self.confirmed: list[Position] = []
        self.errors: list[StoreError] = []
        self.sent_at: list[float] = []

    def done(self, position: Position | None, sent_at: float, error: StoreError | None) -> None:
        if error is not None:
            self.errors.append(error)
        elif position is not None:
            self.confirmed.append(position)
            self.sent_at.append(sent_at)


class Bench:
    """The client of one process, with `bookies` model bookies."""

    def __init__(self, world: SimWorld, bookies: int = 3, config: LogConfig | None = None) -> None:
        self.world = world
        self.env = world.env("client")
        self.tree = MemoryTree(lambda: 1_790_000_000_000 + int(world.loop.time() * 1000))
        make_root(self.tree)
        self.bookies = ModelBookies(*NAMES[:bookies])
        self.store = FrozenStore(self.tree)
        self.ports = self.ports_on(self.store)
        self.ledgers = self.ports.ledgers
        self.config = config or LogConfig()
        self.halted: list[StoreError] = []
        self.returned: list[BookieId] = []

    def ports_on(self, store: MemoryStore) -> LedgerPorts:
        choice = BookieChoice(self.bookies.view, store, clock=self.env.clock, random=self.env.random)
        return LedgerPorts(self.env.clock, self.bookies, LedgerStore(store), choice)

    async def ledger(self, *ensemble: BookieId, write: int = 0, ack: int = 2) -> LedgerMetadata:
        """Create an open ledger, by default on B1, B2, B3."""
        bookies = ensemble or NAMES[:3]
        quorum = Quorum(len(bookies), write or len(bookies), ack)
        metadata = LedgerMetadata(LEDGER, quorum, (Fragment(EntryId(0), bookies),), token=1)
        await self.ledgers.create(metadata)
        return metadata

    def handle(self, metadata: LedgerMetadata, ports: LedgerPorts | None = None) -> LedgerHandle:
        return LedgerHandle(
            metadata,
            ports or self.ports,
            self.env.nursery,
            on_halt=self.halted.append,
            on_return=self.returned.append,
        )

    def takeover(self, ports: LedgerPorts | None = None) -> LedgerTakeover:
        return LedgerTakeover(LEDGER, ports or self.ports, self.env.nursery)

    def worker(
        self, name: str = "w1", *, store: MemoryStore | None = None, bytes_per_s: int = 1 << 20, grace_s: float = 30.0
    ) -> Worker:
        """Start a worker on its own session."""
        store = store or MemoryStore(self.tree)
        config, pace = AutorecoveryConfig(open_ledger_grace_s=grace_s), CopyPace(self.env.clock, bytes_per_s)
        worker = Worker(self.env, store, self.ports_on(store), config, pace, name=name)
        worker.start()
        return worker

    @property
    def marks(self) -> Underreplication:
        return Underreplication(MemoryStore(self.tree))

    @property
    def settings(self) -> RecoverySettings:
        return RecoverySettings(MemoryStore(self.tree))

    async def mark(self, *missing: BookieId, ledger: LedgerId = LEDGER) -> None:
        """Mark the ledger as lacking copies on these bookies."""
        await self.marks.mark(ledger, missing, 1, rewrite=True)

    async def is_marked(self, ledger: LedgerId = LEDGER) -> bool:
        return await self.marks.get(ledger) is not None

    async def set_up(self, *bookies: BookieId) -> None:
        """Give bookies cookies: from now on they may report that an entry is missing."""
        store = MemoryStore(self.tree)
        await ensure_path(store, paths.COOKIES)
        for bookie in bookies:
            await store.create(paths.cookie(bookie))

    async def recover(self) -> LedgerMetadata:
        """Recover the ledger to its end, as another process would."""
        takeover = self.takeover(self.ports_on(MemoryStore(self.tree)))
        await takeover.take_over()
        return await takeover.close()

    async def recorded(self) -> LedgerMetadata:
        metadata, _ = await LedgerStore(MemoryStore(self.tree)).read(LEDGER)
        return metadata

    def logs(
        self,
        config: LogConfig | None = None,
        store: MemoryStore | None = None,
        *,
        death: DeathWatch = UNPROVEN,
        deaths: ProvenDeaths | None = None,
    ) -> PartitionLogs:
        """Return logs on their own session, as on another node. `death` is the death watch of the node's process, and
        `deaths` are the ends that were proven to it."""
        store, env = store or FrozenStore(self.tree), replace(self.env, death=death)
        choice = self.ports_on(store).choice
        return PartitionLogs(
            env,
            store,
            self.bookies,
            choice,
            is_release=RELEASE.__eq__,
            config=config or self.config,
            deaths=deaths,
        )

    async def listed(self) -> LedgerList:
        return (await LedgerLists(MemoryStore(self.tree)).read(P))[0]

    @staticmethod
    async def pass_time(seconds: float = 0.1) -> None:
        await asyncio.sleep(seconds)


def first_seq() -> Seq:
    return Seq(1)


def run(
    case: Callable[[Bench], Coroutine[Any, Any, None]],
    bookies: int = 3,
    config: LogConfig | None = None,
    *,
    limit_s: float = 600.0,
) -> None:
    """Run one case in virtual time."""
    with SimWorld(1) as world:

        async def main() -> None:
            await case(Bench(world, bookies, config))

        world.run(main(), limit_s=limit_s)


async def appended(bench: Bench, handle: LedgerHandle, count: int) -> Appended:
    """Append `count` entries and wait until they are confirmed."""
    entries = Appended()
    for number in range(count):
        handle.append(b"entry %d" % number, entries.done)
    await bench.pass_time()
    assert len(entries.confirmed) == count
    return entries


def holders(bench: Bench, entry: int) -> list[str]:
    return [bookie for bookie, model in bench.bookies.at.items() if (LEDGER, entry) in model.entries]
