"""Wall clocks of a cluster jump by up to an hour: nothing goes before its time, nothing stays, nobody is refused for it
(docs/protocol.md, P28 to P31)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from tests.sim.stories.scenarios import P, Stage, knobs, play
from tests.sim.stories.stories_of_dates import (
    HOUR_MS,
    JUMPS_MS,
    MINUTE_MS,
    NOTICED_S,
    clocks_of_most,
    cold_start,
    door_without_a_date,
    doors_of_a_cold_start,
    found,
    jump,
    key_of_ten_minutes,
    leader_whose_date_is_wrong,
    leader_whose_wall_clock_jumps,
    ledgers,
    log_ahead,
    metadata_away,
    nobody_else_can_lead,
    pin_over_a_jump,
    pins_of,
    put_for,
    requests_over_a_jump,
)

pytestmark = pytest.mark.sim

MAJORITY_JUMPS_MS = (-365 * 24 * HOUR_MS, -MINUTE_MS, 3_000, MINUTE_MS, HOUR_MS, 365 * 24 * HOUR_MS)


@pytest.mark.parametrize("by_ms", JUMPS_MS)
def test_a_server_whose_wall_clock_jumps_keeps_its_date(by_ms: int) -> None:
    play(partial(leader_whose_wall_clock_jumps, by_ms=by_ms), knobs())


def test_a_server_whose_date_differs_from_the_others_does_not_lead() -> None:
    play(leader_whose_date_is_wrong, knobs())


@pytest.mark.parametrize("by_ms", MAJORITY_JUMPS_MS)
def test_no_date_steps_when_the_clocks_of_most_do(by_ms: int) -> None:
    """Nor while processes and machines restart one by one."""
    play(partial(clocks_of_most, by_ms=by_ms), knobs())


def test_a_key_of_ten_minutes_is_there_after_a_jump_of_an_hour() -> None:
    play(key_of_ten_minutes, knobs())


@pytest.mark.parametrize("by_ms", JUMPS_MS)
def test_a_second_is_a_second_while_and_after_a_date_jumps(by_ms: int) -> None:
    """A little more where another leads meanwhile."""

    async def story(stage: Stage) -> None:
        node = await jump(stage, by_ms)
        await put_for(stage, node, 1_000)
        await asyncio.sleep(4.5)
        assert await found(stage, node) is None
        node.sim.clock.set_right()
        await put_for(stage, node, 1_000)
        await asyncio.sleep(4.5)
        assert await found(stage, node) is None

    play(story, knobs())


def test_requests_are_not_refused_as_expired() -> None:
    play(requests_over_a_jump, knobs())


@pytest.mark.parametrize("by_ms", [-HOUR_MS, HOUR_MS])
def test_clients_of_a_server_that_starts_with_a_wrong_date_are_told_the_right_one(by_ms: int) -> None:
    play(partial(door_without_a_date, by_ms=by_ms), knobs())


def test_clients_of_a_cold_start_are_told_no_time_of_the_future() -> None:
    play(doors_of_a_cold_start, knobs())


def test_a_pin_is_there_after_a_jump() -> None:
    play(pin_over_a_jump, knobs(roll_entries=3))


def test_a_pin_goes_when_its_time_is_over() -> None:
    async def story(stage: Stage) -> None:
        pins, ledger = await pins_of(stage)
        await pins.hold(P, "mine", ledger, deadline_ms=stage.leader.sim.clock.wall_ms() + 5_000)
        await jump(stage, -HOUR_MS)
        await asyncio.sleep(5.0 + NOTICED_S)
        await asyncio.sleep(NOTICED_S)
        assert "mine" not in await pins.names(P)

    play(story, knobs(roll_entries=3))


@pytest.mark.parametrize("whose", ["the leader's", "the metadata store's"])
def test_a_log_is_kept_for_as_long_as_it_is_to_be(whose: str) -> None:
    async def story(stage: Stage) -> None:
        if whose != "the leader's":
            stage.cluster.metadata.wrong_ms = -HOUR_MS
        for number in range(30):
            await stage.put(stage.leader, b"r%d" % number)
            await asyncio.sleep(0.2)
        before = await ledgers(stage)
        assert len(before) > 4
        if whose == "the leader's":
            await jump(stage, HOUR_MS)
        await asyncio.sleep(NOTICED_S)
        assert (await ledgers(stage))[: len(before)] == before

    play(story, knobs(roll_entries=3, retention_ms=10 * MINUTE_MS))


def test_a_partition_that_only_servers_with_doubtful_dates_can_lead_is_led() -> None:
    play(nobody_else_can_lead, replace(knobs(), nodes=4, partitions=4))


def test_a_jump_while_the_metadata_store_is_away_costs_no_lead_that_nobody_can_take() -> None:
    play(metadata_away, knobs())


def test_a_log_whose_time_is_ahead_comes_back_and_keeps_times_to_live() -> None:
    play(log_ahead, knobs())


def test_a_cold_start_of_all_waits_for_a_majority_that_agrees() -> None:
    play(cold_start, knobs())
