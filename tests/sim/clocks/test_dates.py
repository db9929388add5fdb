"""Wall clocks of a cluster jump by up to an hour: nothing expires early, nothing stays, no request is refused
because of it (docs/protocol.md, P28 to P31)."""

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
    endpoint_without_a_date,
    endpoints_of_a_cold_start,
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
def test_server_with_jumping_wall_clock_keeps_its_date(by_ms: int) -> None:
    play(partial(leader_whose_wall_clock_jumps, by_ms=by_ms), knobs())


def test_server_with_deviating_date_does_not_lead() -> None:
    play(leader_whose_date_is_wrong, knobs())


@pytest.mark.parametrize("by_ms", MAJORITY_JUMPS_MS)
def test_no_date_steps_when_most_clocks_do(by_ms: int) -> None:
    """Dates do not step while processes and machines restart one by one, either."""
    play(partial(clocks_of_most, by_ms=by_ms), knobs())


def test_key_with_ttl_of_ten_minutes_survives_clock_jump_of_an_hour() -> None:
    play(key_of_ten_minutes, knobs())


@pytest.mark.parametrize("by_ms", JUMPS_MS)
def test_second_lasts_a_second_while_and_after_a_date_jumps(by_ms: int) -> None:
    """The error is a little larger if another server leads meanwhile."""

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
def test_clients_of_server_started_with_wrong_date_get_right_date(by_ms: int) -> None:
    play(partial(endpoint_without_a_date, by_ms=by_ms), knobs())


def test_clients_of_cold_start_get_no_future_date() -> None:
    play(endpoints_of_a_cold_start, knobs())


def test_pin_survives_clock_jump() -> None:
    play(pin_over_a_jump, knobs(roll_entries=3))


def test_pin_is_removed_after_its_deadline() -> None:
    async def story(stage: Stage) -> None:
        pins, ledger = await pins_of(stage)
        await pins.hold(P, "mine", ledger, deadline_ms=stage.leader.sim.clock.wall_ms() + 5_000)
        await jump(stage, -HOUR_MS)
        await asyncio.sleep(5.0 + NOTICED_S)
        await asyncio.sleep(NOTICED_S)
        assert "mine" not in await pins.names(P)

    play(story, knobs(roll_entries=3))


@pytest.mark.parametrize("whose", ["the leader's", "the metadata store's"])
def test_log_is_kept_for_its_retention(whose: str) -> None:
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


def test_partition_is_led_when_only_servers_with_doubtful_dates_can_lead() -> None:
    play(nobody_else_can_lead, replace(knobs(), nodes=4, partitions=4))


def test_clock_jump_in_metadata_outage_keeps_leader_without_successor() -> None:
    play(metadata_away, knobs())


def test_log_with_time_ahead_comes_back_and_keeps_ttls() -> None:
    play(log_ahead, knobs())


def test_cold_start_of_all_waits_for_majority_that_agrees() -> None:
    play(cold_start, knobs())
