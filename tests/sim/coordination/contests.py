"""Owners that contend for one lock in a simulated cluster, and are paused, killed and struck, and a judge that sees
all of them at once."""

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
"""The grace period exceeds the maximum difference of simulated wall clocks without faults: 1.8 s."""
LONG_TTL_S = 10.0
"""A handover takes only a part of it."""
JUDGE_S = 0.005
APART_MS = 1_800
"""Difference between the dates of leaders in the runs about dates."""
TAKEOVER_S = 8.0
"""Seconds for a takeover and a sweep. Without a leader nothing ends."""


@dataclass
class Contest:
    """One lock, its contenders, and what was observed."""

    cluster: Cluster
    shared: float = 0.0
    """The share of owners that want the read lock."""
    grace_s: float = GRACE_S
    stops: bool = True
    """True if owners are paused and killed."""
    locks: dict[str, AsyncLock] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    is_over: bool = False
    owners: dict[str, Owner] = field(default_factory=dict)
    _tokens: int = 0
    """The highest token that the protected resource has seen."""

    async def judge(self) -> None:
        """Check that at no moment two owners hold the lock, or a writer and a reader."""
        while not self.is_over:
            self.look()
            await asyncio.sleep(JUDGE_S)

    def look(self) -> None:
        held = {name: lock._mode for name, lock in self.locks.items() if lock.is_held}
        if len(held) > 1 and b"w" in held.values():
            self.cluster.broken(f"Q4 the lock is held twice: {held}")

    async def contend(self, number: int) -> None:
        """Run one process after the other, each with its own session."""
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
            await owner.nursery.close()  # kill -9: no peer is notified
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
                owner.resume()
            await asyncio.sleep(random.uniform(0.0, 0.3))
            if self.stops and random.random() < 0.1:
                self.counts["killed"] += 1
                return
            await lock.release()
            await asyncio.sleep(random.uniform(0.0, 0.1))
            if self.is_over:
                return

    async def stop_anybody(self) -> None:
        """Pause owners, including waiting owners and owners whose renewal is in flight."""
        random = self.cluster.world.fork("stops")
        while self.stops:
            await asyncio.sleep(random.expovariate(1 / 0.7))
            if not self.owners:
                continue
            owner = self.owners[random.choice(sorted(self.owners))]
            self.counts["stopped"] += 1
            owner.stop(with_an_answer=random.random() < 0.5)
            await asyncio.sleep(random.uniform(0.1, 3 * TTL_S))
            owner.resume()


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
            cluster.broken(f"Q3 no owner gets the lock any more: {contest.counts}")
            break
    contest.is_over = True
    for task in tasks:
        await task


async def hand_over_to_a_later_date(contest: Contest) -> None:
    """The leader by whose date a holder has its lock dies while the holder is paused. The next leader's date is
    later, and another owner waits for the lock there."""
    cluster = contest.cluster
    early, *late = cluster.nodes
    for node in late:
        node.sim.clock.step_wall(APART_MS)
    await cluster.found()
    await all_serve(cluster, UP_S_MAX)
    for node in cluster.nodes:
        assert node.served is not None
        judge = node.served.clock_sync.clock.judge
        judge.offset_ms += judge.drift_ms  # it would get there at its rate
    tasks = [cluster.spawn(work, name="beside") for work in (contest.judge(), _write_on(contest))]
    await _lead(cluster, [early])
    await asyncio.sleep(APART_MS / 1000)  # records by the late date are over by the early date, too
    holder, session = await _holder(contest, "holder")
    holder.stop()
    await _lead(cluster, late)
    assert session.lease.deadline - cluster.world.loop.time() > APART_MS / 1000, "the lock would expire too late"
    await _holder(contest, "next")
    contest.look()
    contest.is_over = True
    for task in tasks:
        await task


async def _write_on(contest: Contest) -> None:
    """Write continuously: each record advances the date by which keys expire, so that no sweep is necessary."""
    owner = Owner(contest.cluster, "writer", contest.cluster.world.fork("writer"))
    while not contest.is_over:
        with suppress(StoreError):
            await owner.batch(Batch().put(b"else", b""), timeout_s=1.0)
        await asyncio.sleep(0.1)


async def _lead(cluster: Cluster, wanted: list[Node]) -> None:
    """Restart the leader until one of `wanted` leads."""
    while True:
        leader = cluster.leader(PARTITION)
        if leader in wanted:
            return
        if leader is not None:
            await leader.stop()
            leader.start()
        await asyncio.sleep(0.05)


async def _holder(contest: Contest, name: str) -> tuple[Owner, AsyncSession]:
    """Return an owner that has waited for the lock."""
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
    """Play one run. Raises RuleBroken if the lock was held twice. Returns the number of events by kind."""
    with SimWorld(seed) as world:
        contest = Contest(Cluster(world, knobs), shared, grace_s)
        return _played(contest, play_out(contest, seconds))


def play_dates_apart(seed: int) -> Counter[str]:
    """Play a run in which the lock is handed over to a leader with a later date."""
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
