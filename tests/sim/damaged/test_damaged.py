"""A replica whose state differs from the others, the leader included, is detected and rebuilt (docs/protocol.md,
P35)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvstore.partition.state.commands import Level
from tests.sim.judges.operations import Status
from tests.sim.stories.scenarios import KEY, P, Stage, play
from tests.sim.stories.stories_of_damage import (
    CALM,
    all_differ,
    barred_leader_starts_again,
    busy,
    declare,
    good_leader_starts_again,
    is_well,
    leader_is_damaged,
)
from tests.sim.strikes.damage import damage

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("seed", range(1, 8))
def test_leader_that_differs_from_both_others_steps_down_and_is_rebuilt(seed: int) -> None:
    play(leader_is_damaged, CALM, seed)


def test_wrong_value_is_gone_after_damaged_copy_is_rebuilt() -> None:
    async def story(stage: Stage) -> None:
        written = await stage.put_until_done(stage.leader)
        await asyncio.sleep(1.0)
        bad = stage.others(stage.leader)[0]
        damage(bad, P, value=(KEY, b"nobody wrote this"))
        replica = bad.replica(P)
        await busy(stage)
        await stage.until(lambda: bad.replica(P) is not replica and is_well(bad))
        await asyncio.sleep(4.0)
        read = await stage.get(bad, level=Level.STALE)
        assert read.status is Status.OK
        assert read.result.value == written.op.value

    play(story, CALM)


def test_healthy_replica_follows_leader_that_died_damaged() -> None:
    """The followers have applied its check and stopped. The leader can no longer be asked."""

    async def story(stage: Stage) -> None:
        await busy(stage)
        bad = stage.leader
        damage(bad, P)
        for _ in range(8):
            await stage.put(bad, b"other")
        bad.crash()
        good = await stage.until_led_by_another(bad)
        assert (await stage.put(good, attempts=5)).status is Status.OK
        bad.start()
        await busy(stage)
        await stage.until(lambda: all(map(is_well, stage.cluster.nodes)))

    play(story, CALM)


def test_no_replica_leads_when_all_differ_until_operator_chooses_one() -> None:
    async def story(stage: Stage) -> None:
        trusted = await all_differ(stage)
        await stage.cluster.spawn(declare(trusted), name="operator")
        await stage.until(lambda: all(map(is_well, stage.cluster.nodes)))
        assert (await stage.put_until_done(trusted)).status is Status.OK

    play(story, CALM)


FIVE = replace(CALM, nodes=5)
"""Two of the nodes hold no replica, so that entries can be stored while replicas are down."""


def test_leader_barred_because_another_differs_stays_barred_after_restart() -> None:
    play(barred_leader_starts_again, FIVE)


def test_healthy_leader_is_unbarred_when_another_replica_confirms_it() -> None:
    play(good_leader_starts_again, FIVE, seed=1)
