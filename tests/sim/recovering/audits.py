"""A bench for the auditor: candidates with their own sessions, model bookies that register, ledgers of all kinds, in
virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvstore.autorecovery.auditor import Auditor
from kvstore.autorecovery.config import AutorecoveryConfig
from kvstore.meta import paths
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.cookies import Cookie
from kvstore.meta.layout import LayoutStore
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.meta.recovery_settings import RecoverySettings
from kvstore.meta.underreplication import Underreplication
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum
from kvstore.wal.choice import BookieChoice
from tests.meta.drivers import ClosedStore
from tests.sim.ledgers_and_logs.bench import NAMES
from tests.sim.ledgers_and_logs.model_bookies import ModelBookies
from tests.sim.world.env import SimWorld

QUIET = AutorecoveryConfig(check_interval_s=0, placement_interval_s=0)


class Candidate:
    """A node that is a candidate for auditor."""

    def __init__(self, bench: AuditBench, name: str, config: AutorecoveryConfig) -> None:
        self.name = name
        self.store = ClosedStore(bench.tree)
        env = bench.world.env(name)
        choice = BookieChoice(bench.bookies.view, self.store, clock=env.clock, random=env.random)
        self.auditor = Auditor(env, self.store, config, name, bookies=bench.bookies, choice=choice)
        self.auditor.start()

    @property
    def numbers(self) -> dict[str, int]:
        return self.auditor.statistics()


class AuditBench:
    """A cluster of `bookies` bookies, all of them up."""

    def __init__(self, world: SimWorld, bookies: int) -> None:
        self.world = world
        self.tree = MemoryTree(lambda: 1_790_000_000_000 + int(world.loop.time() * 1000))
        self.store = MemoryStore(self.tree)
        self.names = NAMES[:bookies]
        self.bookies = ModelBookies(*self.names)
        self.ledgers = LedgerStore(self.store)
        self.settings = RecoverySettings(self.store)

    async def found(self) -> None:
        await LayoutStore(self.store).initialise("simulated")
        for name in self.names:
            cookie = Cookie(bookie=name, journal_dirs=("/j",), ledger_dirs=("/l",), instance_id="simulated")
            await CookieStore(self.store).write(cookie, None)
        await self.start(*self.names)

    def candidate(self, name: str, config: AutorecoveryConfig = QUIET) -> Candidate:
        return Candidate(self, name, config)

    async def stop(self, *bookies: BookieId) -> None:
        for bookie in bookies:
            await self.store.delete(paths.available(bookie), -1)
        self.bookies.stop(*bookies)

    async def start(self, *bookies: BookieId, readonly: bool = False) -> None:
        for bookie in bookies:
            path = paths.readonly(bookie) if readonly else paths.available(bookie)
            await self.store.create(path, b"", ephemeral=True)
        self.bookies.start(*bookies)

    async def ledger(self, number: int, *ensemble: BookieId, entries: int = 0) -> LedgerMetadata:
        """Create a ledger with `entries` entries, all with complete copies. It is closed if it has entries."""
        fragments = (Fragment(EntryId(0), ensemble),)
        metadata = LedgerMetadata(LedgerId(number), Quorum(len(ensemble), len(ensemble), 2), fragments, token=1)
        if entries:
            metadata = metadata.closed(EntryId(entries - 1), entries)
        await self.ledgers.create(metadata)
        for bookie in ensemble:
            for entry in range(entries):
                self.bookies.at[bookie].entries[metadata.ledger, EntryId(entry)] = b""
        return metadata

    async def marked(self) -> dict[int, list[BookieId]]:
        return {mark.ledger: sorted(mark.replicas) async for mark in Underreplication(self.store).marked()}


Case = Callable[[AuditBench], Coroutine[Any, Any, None]]


def run(case: Case, bookies: int = 4, *, limit_s: float = 200_000.0) -> None:
    """Play one case in virtual time."""
    with SimWorld(1) as world:

        async def main() -> None:
            bench = AuditBench(world, bookies)
            await bench.found()
            await case(bench)

        world.run(main(), limit_s=limit_s)


async def later(seconds: float) -> None:
    await asyncio.sleep(seconds)
