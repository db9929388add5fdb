"""Owners who contend for one lock in a simulated cluster, stopped, killed and struck, and a judge who sees all of them
at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvstore.client.coordination import AsyncLock, AsyncSession, NotInTime
from kvstore.client.core.batch import Batch
from kvstore.errors import StoreError
from kvstore.types import PartitionId
from tests.sim.cluster import Cluster
from tests.sim.coordination.owners import Owner
from tests.sim.nodes import Node, small_journals
from tests.sim.run import TAIL, UP_S_MAX, all_serve, heal, until_broken
from tests.sim.strikes.faults import Chaos
from tests.sim.strikes.knobs import Knobs
from tests.sim.watching import watching
from tests.sim.world.env import ClockConfig, SimWorld

OWNERS = 5
TAG, NAME = b"jobs", b"nightly"
PARTITION = PartitionId("p1")
TTL_S, GRACE_S = 3.0, 2.0
"""The grace is more than what simulated wall clocks differ by, if nobody moves them: 1.8 s."""
LONG_TTL_S = 10.0
"""A hand-over takes a part of it only."""
JUDGE_S = 0.005
APART_MS = 1_800
"""So much are the dates of leaders apart where that is what matters."""
TAKEOVER_S = 8.0
"""Without a leader nothing ends; this and a sweep."""


@dataclass
class Contest:
    """One lock, those who want it, and what was seen of it."""

    cluster: Cluster
    shared: float = 0.0
    """The share of owners who want the reading side."""
    grace_s: float = GRACE_S
    stops: bool = True
    """Owners are stopped and killed."""
    locks: dict[str, AsyncLock] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    is_over: bool = False
    owners: dict[str, Owner] = field(default_factory=dict)
    _tokens: int = 0
    """The highest that the protected thing has seen."""

    async def judge(self) -> None:
        """At no moment do two hold it, or one who writes and one who reads."""
        while not self.is_over:
            self.look()
            await asyncio.sleep(JUDGE_S)

    def look(self) -> None:
        held = {name: lock._mode for name, lock in self.locks.items() if lock.is_held}
        if len(held) > 1 and b"w" in held.values():
            self.cluster.broken(f"Q4 it is held twice: {held}")

    async def contend(self, number: int) -> None:
        """One process after the other, each with a session of its own."""
        life = 0
        while not self.is_over:
            life += 1
            name = f"owner{number}.{life}"
            owner = self.owners[name] = Owner(self.cluster, name, self.cluster.world.fork(name))
            session = owner.session(TAG, ttl_s=TTL_S, grace_s=self.grace_s)
            lock = self.locks[name] = AsyncLock(session, NAME, shared=owner.random.random() < self.shared)
            try:
                await session.open()
                await self._live(owner, session, lock)
            except StoreError as error:
                self.counts[type(error).__name__] += 1
            if owner.random.random() < 0.5:
                await session.close()
            await owner.nursery.close()  # kill -9: nothing is told to anybody
            del self.locks[name], self.owners[name]

    async def _live(self, owner: Owner, session: AsyncSession, lock: AsyncLock) -> None:
        random = owner.random
        for _ in range(random.randint(1, 6)):
            try:
                token = await lock.acquire(timeout_s=random.choice((0.5, 20.0)))
            except NotInTime:
                self.counts["not in time"] += 1
                continue
            self.counts["held"] += 1
            self.look()
            if lock._mode == b"w" and lock.is_held:
                if token <= self._tokens:
                    self.cluster.broken(f"Q5 token {token} after {self._tokens}")
                self._tokens = token
            if self.stops and random.random() < 0.2:
                self.counts["stopped"] += 1
                owner.stop(with_an_answer=random.random() < 0.5)
                await asyncio.sleep(random.uniform(0.1, 2.5 * TTL_S))
                owner.go_on()
            await asyncio.sleep(random.uniform(0.0, 0.3))
            if self.stops and random.random() < 0.1:
                self.counts["killed"] += 1
                return
            await lock.release()
            await asyncio.sleep(random.uniform(0.0, 0.1))
            if self.is_over:
                return

    async def stop_anybody(self) -> None:
        """Also those who wait, and those whose renewal is on its way."""
        random = self.cluster.world.fork("stops")
        while self.stops:
            await asyncio.sleep(random.expovariate(1 / 0.7))
            if not self.owners:
                continue
            owner = self.owners[random.choice(sorted(self.owners))]
            self.counts["stopped"] += 1
            owner.stop(with_an_answer=random.random() < 0.5)
            await asyncio.sleep(random.uniform(0.1, 3 * TTL_S))
            owner.go_on()


async def play_out(contest: Contest, seconds: float) -> None:
    cluster = contest.cluster
    await cluster.found()
    await all_serve(cluster, UP_S_MAX)
    spawn = cluster.spawn
    tasks = [spawn(contest.contend(number), name="owner") for number in range(OWNERS)]
    tasks.append(spawn(contest.judge(), name="judge"))
    if contest.stops:
        tasks.append(spawn(contest.stop_anybody(), name="stops"))
    chaos = Chaos(cluster, cluster.world.fork("chaos"), list(cluster.knobs.faults), cluster.knobs.pace_s)
    await chaos.run(seconds)
    heal(cluster)
    contest.stops = False
    await all_serve(cluster, UP_S_MAX)
    held = contest.counts["held"]
    last = cluster.world.loop.time() + TTL_S + 2 * contest.grace_s + TAKEOVER_S
    await asyncio.sleep(TTL_S)
    while contest.counts["held"] == held:
        await asyncio.sleep(JUDGE_S)
        if cluster.world.loop.time() > last:
            cluster.broken(f"Q3 nobody gets the lock any more: {contest.counts}")
            break
    contest.is_over = True
    for task in tasks:
        await task


async def hand_over_to_a_later_date(contest: Contest) -> None:
    """The leader of whose date a holder has its lock goes while that one stands still; the next one's date is later,
    and somebody stands in line there."""
    cluster = contest.cluster
    early, *late = cluster.nodes
    for node in late:
        node.sim.clock.step_wall(APART_MS)
    await cluster.found()
    await all_serve(cluster, UP_S_MAX)
    for node in cluster.nodes:
        assert node.served is not None
        judge = node.served.clock_sync.clock.judge
        judge.offset_ms += judge.drift_ms  # it would come there at its rate
    tasks = [cluster.spawn(work, name="beside") for work in (contest.judge(), _write_on(contest))]
    await _lead(cluster, [early])
    await asyncio.sleep(APART_MS / 1000)  # what a late one has logged before is over by the early one's date too
    holder, session = await _holder(contest, "holder")
    holder.stop()
    await _lead(cluster, late)
    assert session.lease.deadline - cluster.world.loop.time() > APART_MS / 1000, "its lock would go too late to see it"
    await _holder(contest, "next")
    contest.look()
    contest.is_over = True
    for task in tasks:
        await task


async def _write_on(contest: Contest) -> None:
    """Each record brings the date on by which keys go: nobody waits for a sweep."""
    owner = Owner(contest.cluster, "writer", contest.cluster.world.fork("writer"))
    while not contest.is_over:
        with suppress(StoreError):
            await owner.batch(Batch().put(b"else", b""), timeout_s=1.0)
        await asyncio.sleep(0.1)


async def _lead(cluster: Cluster, wanted: list[Node]) -> None:
    """Restart whoever leads until one of these does."""
    while True:
        leader = cluster.leader(PARTITION)
        if leader in wanted:
            return
        if leader is not None:
            await leader.stop()
            leader.start()
        await asyncio.sleep(0.05)


async def _holder(contest: Contest, name: str) -> tuple[Owner, AsyncSession]:
    """One who has waited for the lock."""
    owner = Owner(contest.cluster, name, contest.cluster.world.fork(name))
    session = owner.session(TAG, ttl_s=LONG_TTL_S, grace_s=contest.grace_s)
    lock = contest.locks[name] = AsyncLock(session, NAME)
    await session.open()
    await lock.acquire(timeout_s=3 * LONG_TTL_S)
    contest.counts["held"] += 1
    return owner, session


def play(
    seed: int, knobs: Knobs, *, seconds: float = 20.0, shared: float = 0.0, grace_s: float = GRACE_S
) -> Counter[str]:
    """One run; raises RuleBroken if the lock was held twice. Returns what happened how often."""
    with SimWorld(seed) as world:
        contest = Contest(Cluster(world, knobs), shared, grace_s)
        return _played(contest, play_out(contest, seconds))


def play_dates_apart(seed: int) -> Counter[str]:
    """The same of one lock that is handed over to a leader with a later date."""
    with SimWorld(seed, clock=ClockConfig(wall_skew_ms_max=0)) as world:
        contest = Contest(Cluster(world, Knobs()))
        return _played(contest, hand_over_to_a_later_date(contest))


def _played(contest: Contest, story: Coroutine[Any, Any, None]) -> Counter[str]:
    cluster, world = contest.cluster, contest.cluster.world
    try:
        with watching(cluster.logbook, cluster.rules), small_journals(cluster.knobs):
            world.run(until_broken(cluster, story), limit_s=300.0)
    except BaseException as error:
        error.add_note(f"seed {world.seed}\n{world.trace.tail(TAIL)}")
        raise
    return contest.counts
