"""Queues in simulated clusters: an item belongs to one session at a time, whatever process is paused or killed, and
no item is lost (docs/protocol.md, Q6)."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from kvstore.client.coordination import AsyncQueue, AsyncSession, NotInTime, Taken
from kvstore.client.coordination.lease import SessionLease
from kvstore.client.core.batch import Batch
from kvstore.client.core.operation import CHECK, PUT
from kvstore.errors import OutcomeUnknown, StoreError
from kvstore.proto import kv_pb2
from tests.sim.cluster import Cluster, RuleBroken
from tests.sim.coordination.contests import GRACE_S, JUDGE_S, TAKEOVER_S, TTL_S
from tests.sim.coordination.owners import Owner
from tests.sim.nodes import small_journals
from tests.sim.run import TAIL, UP_S_MAX, all_serve, heal, until_broken
from tests.sim.strikes.faults import Chaos
from tests.sim.strikes.knobs import Knobs
from tests.sim.watching import watching
from tests.sim.world.env import SimWorld

pytestmark = pytest.mark.sim

KNOBS = Knobs(faults=("kill_leader", "pause", "hand_over", "cut_a_link", "clocks_of_a_majority"), pace_s=2.0)
TAKERS, CHAOS_S = 4, 20.0
TAG, NAME = b"jobs", b"q"


class Work:
    """One producer, and takers that are paused and killed. A judge sees all of them at once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.put: set[bytes] = set()
        """Acknowledged puts."""
        self.done: Counter[bytes] = Counter()
        """Acknowledged completions."""
        self.doubtful: set[bytes] = set()
        """Values whose end has an unknown outcome."""
        self.held: dict[str, tuple[AsyncSession, Taken]] = {}
        self.counts: Counter[str] = Counter()
        self.is_over = False
        self._tokens: dict[bytes, int] = {}

    async def puts(self) -> None:
        number = 0
        while not self.is_over:
            owner = Owner(self.cluster, f"putter{number}", self.cluster.world.fork(f"putter{number}"))
            session = owner.session(TAG, ttl_s=TTL_S, grace_s=GRACE_S)
            try:
                await session.open()
                queue = AsyncQueue(session, NAME)
                while not self.is_over:
                    number += 1
                    await queue.put(value := b"%d" % number)
                    self.put.add(value)
                    await asyncio.sleep(0.2)
            except StoreError:
                number += 1
            await owner.nursery.close()

    async def judge(self) -> None:
        while not self.is_over:
            self.look()
            await asyncio.sleep(JUDGE_S)

    def look(self) -> None:
        prefix = b"{jobs}/queue/q/claim-"
        held = Counter(
            taken.name
            for session, taken in self.held.values()
            if session.lease.holds(prefix + taken.name, session.now())
        )
        if twice := [name for name, count in held.items() if count > 1]:
            self.cluster.broken(f"Q6 {twice} were taken twice")

    async def takes(self, number: int) -> None:
        life = 0
        while not self.is_over:
            life += 1
            name = f"taker{number}.{life}"
            owner = Owner(self.cluster, name, self.cluster.world.fork(name))
            session = owner.session(TAG, ttl_s=TTL_S, grace_s=GRACE_S)
            try:
                await session.open()
                await self._live(owner, session, name)
            except StoreError as error:
                self.counts[type(error).__name__] += 1
            self.held.pop(name, None)
            await owner.nursery.close()

    async def _live(self, owner: Owner, session: AsyncSession, name: str) -> None:
        queue, random = AsyncQueue(session, NAME), owner.random
        while not self.is_over:
            try:
                taken = await queue.take(timeout_s=2.0)
            except NotInTime:
                continue
            self._taken(session, name, taken)
            await asyncio.sleep(random.uniform(0.0, 0.2))
            if random.random() < 0.15:
                self.counts["stopped"] += 1
                owner.stop(with_an_answer=random.random() < 0.5)
                await asyncio.sleep(random.uniform(0.1, 3 * TTL_S))
                owner.resume()
            if random.random() < 0.1:
                self.counts["killed"] += 1
                return
            await self._end(queue, taken, gives_back=random.random() < 0.2)
            del self.held[name]

    def _taken(self, session: AsyncSession, name: str, taken: Taken) -> None:
        self.counts["taken"] += 1
        self.held[name] = session, taken
        self.look()
        if taken.token <= self._tokens.get(taken.name, 0):
            self.cluster.broken(f"Q6 token {taken.token} of {taken.name!r} after {self._tokens[taken.name]}")
        self._tokens[taken.name] = taken.token
        if self.done[taken.value]:
            self.cluster.broken(f"Q6 {taken.value!r} is handed out again after it was done")

    async def _end(self, queue: AsyncQueue, taken: Taken, *, gives_back: bool) -> None:
        if gives_back:
            self.counts["given back"] += 1
            return await queue.give_back(taken)
        try:
            await queue.done(taken)
        except OutcomeUnknown:
            self.doubtful.add(taken.value)
            raise
        self.done[taken.value] += 1
        if self.done[taken.value] > 1:
            self.cluster.broken(f"Q6 {taken.value!r} was done twice")


async def play_out(work: Work) -> None:
    cluster = work.cluster
    await cluster.found()
    await all_serve(cluster, UP_S_MAX)
    tasks = [cluster.spawn(work.takes(number), name="taker") for number in range(TAKERS)]
    tasks += [cluster.spawn(work.puts(), name="putter"), cluster.spawn(work.judge(), name="judge")]
    await Chaos(cluster, cluster.world.fork("chaos"), list(cluster.knobs.faults), cluster.knobs.pace_s).run(CHAOS_S)
    heal(cluster)
    work.is_over = True
    for task in tasks:
        await task
    await all_serve(cluster, UP_S_MAX)
    await the_rest(work)


async def the_rest(work: Work) -> None:
    """Check that every item that was put and not done is still there, and is handed out when no session is left."""
    owner, loop = Owner(work.cluster, "last", work.cluster.world.fork("last")), asyncio.get_running_loop()
    last = loop.time()
    async with owner.session(TAG, ttl_s=60.0, grace_s=GRACE_S) as session:
        queue = AsyncQueue(session, NAME)
        while True:
            try:
                taken = await queue.take(timeout_s=1.0)  # a simulated watch does not report an expired claim
            except NotInTime:
                if loop.time() > last + TTL_S + 2 * GRACE_S + TAKEOVER_S:
                    break
                continue
            last = loop.time()
            work.done[taken.value] += 1
            await queue.done(taken)
    if lost := work.put - set(work.done) - work.doubtful:
        work.cluster.broken(f"Q6 lost: {sorted(lost)}")
    if twice := {value for value, count in work.done.items() if count > 1}:
        work.cluster.broken(f"Q6 done twice: {sorted(twice)}")


def play(seed: int) -> Counter[str]:
    with SimWorld(seed) as world:
        cluster = Cluster(world, KNOBS)
        work = Work(cluster)
        try:
            with watching(cluster.logbook, cluster.rules), small_journals(KNOBS):
                world.run(until_broken(cluster, play_out(work)), limit_s=300.0)
        except BaseException as error:
            error.add_note(f"seed {seed}\n{world.trace.tail(TAIL)}")
            raise
    return work.counts


def played(seeds: range) -> Counter[str]:
    return sum(map(play, seeds), Counter())


def test_item_belongs_to_one_session_at_a_time_and_none_is_lost(seed: int) -> None:
    counts = played(range(seed, seed + 2))
    assert counts["taken"] > 40, counts
    assert counts["stopped"] + counts["killed"] > 5, counts


def test_item_is_taken_twice_without_condition_that_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = SessionLease.batch

    def unasked(self: SessionLease, write: Any, now: float) -> Batch:
        """Write a claim whether or not one exists."""
        made = batch(self, write, now)
        for place, each in enumerate(made.operations):
            if b"/claim-" in each.key and each.code == CHECK:
                made.operations[place] = made.operations[0]
            elif b"/claim-" in each.key and each.code == PUT and each.options is not None:
                each.options.flags &= ~kv_pb2.IF_ABSENT
        return made

    monkeypatch.setattr(SessionLease, "batch", unasked)
    with pytest.raises(RuleBroken, match="Q6"):
        played(range(8))
