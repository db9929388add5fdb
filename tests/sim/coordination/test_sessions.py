"""Sessions in simulated clusters end in time: not before their TTL by the true time, and within their bound
(docs/protocol.md, Q1 and Q3)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstore.client.coordination import SessionEnded
from kvstore.client.coordination.lease import GRACE_S, SessionLease
from kvstore.client.core.batch import Batch
from kvstore.errors import StoreError
from tests.sim.cluster import Cluster, RuleBroken
from tests.sim.coordination.contests import TAKEOVER_S
from tests.sim.coordination.owners import Owner
from tests.sim.nodes import small_journals
from tests.sim.run import TAIL, UP_S_MAX, all_serve, heal, until_broken
from tests.sim.strikes.faults import Chaos
from tests.sim.strikes.knobs import Knobs
from tests.sim.watching import watching
from tests.sim.world.env import SimWorld

pytestmark = pytest.mark.sim

TTL_S = 3.0
KNOBS = Knobs(faults=("clock_jumps", "clocks_of_a_majority", "kill_leader", "hand_over", "pause"), pace_s=2.0)
CALM = Knobs(faults=("hand_over",), pace_s=10.0)
OWNERS, CHAOS_S = 4, 30.0


class Lives:
    """Owners with a session and a key, killed repeatedly. An observer records when the key has gone."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.ended, self.is_over = cluster, 0, False

    async def live(self, number: int) -> None:
        fork, life = self.cluster.world.fork, 0
        looker = Owner(self.cluster, f"looker{number}", fork(f"looker{number}"))
        while not self.is_over:
            life += 1
            owner = Owner(self.cluster, f"owner{number}.{life}", fork(f"owner{number}.{life}"))
            session = owner.session(b"s%d" % number, ttl_s=TTL_S, grace_s=GRACE_S)
            try:
                await session.open()
                await session.put(b"k", b"%d" % life)
                await asyncio.sleep(owner.random.uniform(0.0, 3 * TTL_S))
            except StoreError:
                await owner.nursery.close()
                continue
            owner.stop()
            last = session.lease.deadline
            await self._gone(looker, session.lease, last)
            owner.resume()
            await self._hears(session)
            await owner.nursery.close()

    async def _gone(self, looker: Owner, lease: SessionLease, last: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                stays = [await looker.meta(key) for key in (lease.path(b"k"), lease.key)]
            except StoreError:
                continue
            if stays == [None, None]:
                break
            if began > last + 2 * GRACE_S + TAKEOVER_S:
                self.cluster.broken(f"Q3 {lease.key!r} exists {began - last:.3f} s after its owner died")
                break
            await asyncio.sleep(0.1)
        if loop.time() < last:
            self.cluster.broken(f"Q3 {lease.key!r} expired {last - loop.time():.3f} s before its TTL")
        self.ended += 1

    async def _hears(self, session: Any) -> None:
        try:
            await session.put(b"late", b"")
        except (SessionEnded, StoreError):
            return
        self.cluster.broken("Q1 a session has come back")


def play(seed: int, knobs: Knobs) -> int:
    """Play one run and return the number of sessions that ended."""

    async def scenario() -> None:
        await cluster.found()
        await all_serve(cluster, UP_S_MAX)
        tasks = [cluster.spawn(lives.live(number), name="owner") for number in range(OWNERS)]
        await Chaos(cluster, cluster.world.fork("chaos"), list(knobs.faults), knobs.pace_s).run(CHAOS_S)
        heal(cluster)
        lives.is_over = True
        for task in tasks:
            await task

    with SimWorld(seed) as world:
        cluster = Cluster(world, knobs)
        lives = Lives(cluster)
        try:
            with watching(cluster.logbook, cluster.rules), small_journals(knobs):
                world.run(until_broken(cluster, scenario()), limit_s=300.0)
        except BaseException as error:
            error.add_note(f"seed {seed}\n{world.trace.tail(TAIL)}")
            raise
    return lives.ended


def test_sessions_end_after_their_ttl_and_within_their_bound(seed: int) -> None:
    assert play(seed, KNOBS) + play(seed + 1, KNOBS) > 8


def test_ended_session_comes_back_without_check_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q1: the clocks of the owners stop, so that they keep asking for more time."""
    monkeypatch.setattr(SessionLease, "is_alive", lambda self, now: True)
    assert play(1, CALM) > 4
    batch = SessionLease.batch

    def unasked(self: SessionLease, write: Any, now: float) -> Batch:
        made = batch(self, write, now)
        made.operations[0] = Batch().put(self.key, b"", ttl_s=1.0).operations[0]
        return made

    monkeypatch.setattr(SessionLease, "batch", unasked)
    with pytest.raises(RuleBroken, match="Q1"):
        play(1, CALM)
