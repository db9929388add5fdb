"""Any sequence of events in a bookie's directories: nothing acknowledged is denied, no fence is lost, and no ledger is
in two places (docs/protocol.md, B23 and B24)."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from kvstore.errors import ConfigError
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.proto.bookkeeper import Status
from kvstore.types import LedgerState
from tests.bookie.directories.support import A, B, C, Naming, Spread, empty, open_spread
from tests.bookie.support import crash, run
from tests.sim.world.disk import SimDisk
from tests.sim.world.env import NodeCrashed, SimWorld

pytestmark = pytest.mark.sim
LIVES = 8
ABSENT = {Status.NO_ENTRY, Status.NO_LEDGER}


class Story:
    """The lives of one bookie, and its promises in them."""

    def __init__(self, world: SimWorld, random: Random) -> None:
        self.world, self.random = world, random
        self.tree, self.meta = MemoryTree(), Naming()
        for ledger in range(1, 400):
            self.meta.create(ledger)
        self.stored: set[tuple[int, int]] = set()
        self.fenced: set[int] = set()
        self.next_ledger = 1
        self.died = ""
        self.bookie = ""

    @property
    def disk(self) -> SimDisk:
        return self.world.node("b1").disk

    async def live(self, dirs: tuple[str, ...], lost: tuple[str, ...]) -> None:
        shelf = await open_spread(self.world, MemoryStore(self.tree), self.meta, dirs, lost)
        if shelf.storage.bookie != self.bookie:  # nothing was left of the former bookie
            self.bookie = shelf.storage.bookie
            self.stored.clear()
            self.fenced.clear()
        await self.judge(shelf)
        for turn in range(self.random.randrange(20, 60)):
            if turn == 15 and self.random.random() < 0.5 and len(dirs) - len(lost) > 1:
                self.died = self.random.choice([each for each in dirs if each not in lost])
                self.disk.die(self.died)
            await self.step(shelf)
        await self.judge(shelf)
        for part in shelf.storage.parts:
            others = [each for each in shelf.storage.parts if each is not part]
            assert not any(set(part.ledgers) & set(each.ledgers) for each in others), "a ledger is in two directories"

    async def step(self, shelf: Spread) -> None:
        ledger = self.random.randrange(max(1, self.next_ledger - 30), self.next_ledger + 3)
        self.next_ledger = max(self.next_ledger, ledger + 1)
        entries = [self.random.randrange(12) for _ in range(self.random.randrange(1, 5))]
        if self.random.random() < 0.15:
            self.meta.create(ledger, LedgerState.IN_RECOVERY)
            status, _, _ = await shelf.read(ledger, 0, fence=True)
            if status in ABSENT | {Status.OK}:
                self.fenced.add(ledger)
            assert status not in ABSENT or (ledger, 0) not in self.stored
            return
        is_recovery = self.random.random() < 0.2
        how = {"recovery": is_recovery}
        statuses = await asyncio.gather(*(shelf.add(ledger, entry, b"x" * 200, **how) for entry in entries))
        for entry, status in zip(entries, statuses, strict=True):
            if status is Status.OK:
                assert is_recovery or ledger not in self.fenced or (ledger, entry) in self.stored, "the fence is lost"
                self.stored.add((ledger, entry))

    async def judge(self, shelf: Spread) -> None:
        for ledger, entry in sorted(self.stored):
            assert await shelf.status(ledger, entry) not in ABSENT, f"ledger {ledger} entry {entry} was acknowledged"
        for ledger in sorted(self.fenced):
            assert await shelf.add(ledger, 99) is not Status.OK, f"ledger {ledger} was fenced"

    def run(self) -> None:
        dirs: tuple[str, ...] = (A, B)
        lost: tuple[str, ...] = ()
        started = 0
        for _ in range(LIVES):
            try:
                run(self.world, self.live(dirs, lost))
                started += 1
            except ConfigError:
                pass
            except NodeCrashed:
                self.world.fatals.clear()
            crash(self.world, power=self.random.random() < 0.5)
            dirs, lost = self.change()
        assert started

    def change(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return an action of the operator between two lives, right or wrong."""
        if self.died:
            died, self.died = self.died, ""
            if self.random.random() < 0.3:
                self.disk._dead.clear()  # the disk is healthy again
                return (A, B, C), ()
            if self.random.random() < 0.6:
                return (A, B, C), (died,)
            empty(self.disk, died)
        elif self.random.random() < 0.2:
            empty(self.disk, self.random.choice([A, B, C]))
        self.disk._dead.clear()
        lost = self.random.choice([(), (), (A,), (B,), (C,), (A, B)])
        return self.random.choice([(A, B), (A, B, C), (A, B, C)]), lost


@pytest.mark.parametrize("number", range(12))
def test_any_sequence_of_directory_events_keeps_all_promises(world: SimWorld, seed: int, number: int) -> None:
    Story(world, Random(f"{seed} {number}")).run()
