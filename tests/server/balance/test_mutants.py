"""Each rule of the balancer (docs/protocol.md H13) is broken once, and the test beside it notices."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from typing import Any

import pytest

from kvstore.env import Env
from kvstore.env.real import real_env
from kvstore.server.balance import leads, ranges, replicas, survey
from kvstore.server.balance.balancer import Balancer
from kvstore.server.balance.judge import Judge
from kvstore.server.balance.planner import Patience, Plan
from kvstore.server.balance.record import BalanceRecord
from kvstore.server.balance_config import BalanceConfig
from kvstore.types import ServerId
from tests.server.balance import test_balancer, test_planner, test_record
from tests.server.balance.test_balancer import World

Patch = pytest.MonkeyPatch


def have_no_budget(patch: Patch) -> None:
    patch.setattr(BalanceRecord, "budget_left", lambda self, config, now_ms: config.moves_per_hour)


def rest_after_no_step(patch: Patch) -> None:
    patch.setattr(BalanceRecord, "rests_s", lambda self, config, now_ms: 0.0)


def ignore_steps_of_servers_whose_clock_is_ahead(patch: Patch) -> None:
    patch.setattr(
        BalanceRecord,
        "within",
        lambda self, now_ms, period_ms: (made for made in self.steps if abs(now_ms - made.at_ms) < period_ms),
    )


def let_partitions_take_part_in_step_after_step(patch: Patch) -> None:
    patch.setattr(Judge, "rests", lambda self, *partitions: False)


def reverse_recent_steps(patch: Patch) -> None:
    patch.setattr(BalanceRecord, "ways_back", lambda self, config, now_ms: frozenset())


def move_leads_that_gain_nothing(patch: Patch) -> None:
    patch.setattr(leads, "GAIN", -1.0)


def overload_servers_for_even_numbers_of_leads(patch: Patch) -> None:
    patch.setattr(leads, "_overloads", lambda seen, partition, target: False)


def refill_full_disks_for_even_numbers_of_replicas(patch: Patch) -> None:
    def before_the_move(seen: Any, sizes: object, move: Any) -> bool:
        used = {server: seen.servers[ServerId(server)].used for server in (move.leaving, move.newcomer)}
        return bool(used[move.newcomer] <= used[move.leaving] + replicas.DISK_VETO)

    patch.setattr(replicas, "_keeps_disk", before_the_move)


def chase_hot_keys(patch: Patch) -> None:
    patch.setattr(ranges, "ONE_KEY", inf)


def count_tiny_differences(patch: Patch) -> None:
    patch.setattr(leads, "WORK_MIN", 0.0)
    patch.setattr(leads, "threshold", lambda mean: 1.25 * mean)


def remember_one_imbalance(patch: Patch) -> None:
    lasts_s = Patience.lasts_s

    def of_the_step_alone(self: Patience, planned: Plan, now: float) -> float:
        due = planned.due
        self._since = {} if due is None else {due.cause: self._since.get(due.cause, now)}
        return lasts_s(self, Plan(**{**fields_of(planned), "causes": frozenset(self._since)}), now)

    patch.setattr(Patience, "lasts_s", of_the_step_alone)


def fields_of(planned: Plan) -> dict[str, Any]:
    return {name: getattr(planned, name) for name in ("step", "waits", "notes", "budget_left")}


def make_steps_outside_the_window(patch: Patch) -> None:
    patch.setattr(BalanceConfig, "is_within_window", lambda self, date_ms: True)


MUTANTS: dict[Callable[[Patch], None], Callable[[], object]] = {
    have_no_budget: test_record.test_step_is_refused_without_budget_or_rest,
    rest_after_no_step: test_record.test_step_is_refused_without_budget_or_rest,
    ignore_steps_of_servers_whose_clock_is_ahead: lambda: test_record.test_step_of_server_whose_clock_is_ahead_counts(
        90
    ),
    let_partitions_take_part_in_step_after_step: lambda: test_planner.test_skewed_load_converges_and_then_nothing_moves(
        0
    ),
    reverse_recent_steps: test_record.test_recent_step_is_not_reversed,
    move_leads_that_gain_nothing: lambda: test_planner.test_skewed_load_converges_and_then_nothing_moves(0),
    overload_servers_for_even_numbers_of_leads: test_planner.test_numbers_of_leads_do_not_overload_a_server,
    refill_full_disks_for_even_numbers_of_replicas: (
        test_planner.test_moves_for_disks_and_for_numbers_do_not_undo_each_other
    ),
    chase_hot_keys: test_planner.test_one_hot_key_is_explained_and_not_chased,
    count_tiny_differences: test_planner.test_small_differences_among_idle_partitions_move_nothing,
    remember_one_imbalance: test_planner.test_imbalance_lasts_while_another_side_is_sometimes_worse,
    make_steps_outside_the_window: test_planner.test_steps_begin_only_within_window,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_broken_plan_is_noticed(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        MUTANTS[mutant]()


def act_at_once(patch: Patch) -> None:
    patch.setattr(Patience, "lasts_s", lambda self, planned, now: inf)


def act_on_every_server(patch: Patch) -> None:
    patch.setattr(Balancer, "_balancing", property(lambda self: self._node.id))


def act_on_an_unhealthy_cluster(patch: Patch) -> None:
    patch.setattr(survey, "_obstacles", lambda report, ring, loads: ())


def act_on_a_ring_that_has_changed(patch: Patch) -> None:
    call_of = Balancer._call_of
    patch.setattr(Balancer, "_call_of", lambda self, step, ring_version: call_of(self, step, 0))


def act_before_the_record_is_written(patch: Patch) -> None:
    make = Balancer._make

    async def unrecorded(self: Balancer, step: Any, ring_version: int, now_ms: int) -> None:
        self._records, records = _Unwritten(), self._records  # type: ignore[assignment]
        try:
            await make(self, step, ring_version, now_ms)
        finally:
            self._records = records

    patch.setattr(Balancer, "_make", unrecorded)


class _Unwritten:
    async def change(self, intent: object) -> None:
        """Do nothing."""


DRIVERS: dict[Callable[[Patch], None], Callable[[World], Awaitable[object]]] = {
    act_at_once: test_balancer.test_step_is_made_once_imbalance_has_lasted,
    act_on_every_server: test_balancer.test_only_first_server_balances,
    act_on_an_unhealthy_cluster: test_balancer.test_unhealthy_cluster_stops_balancer,
    act_on_a_ring_that_has_changed: test_balancer.test_ring_that_has_changed_refuses_step_and_costs_budget_only,
    act_before_the_record_is_written: test_balancer.test_two_servers_that_both_balance_make_one_step,
}


@pytest.mark.parametrize("mutant", DRIVERS, ids=lambda mutant: mutant.__name__)
async def test_broken_driver_is_noticed(mutant: Callable[[Patch], None], monkeypatch: Patch, tmp_path: Any) -> None:
    mutant(monkeypatch)
    env: Env = real_env(tmp_path)
    try:
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            await DRIVERS[mutant](World(env))
    finally:
        await env.nursery.close()
