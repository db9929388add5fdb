"""Which date a server goes by, as its clocks and what it hears from others change (docs/protocol.md, P28)."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from kvstore.server.control.dates import ALONE_S, APART_MS, BOUND_MS, CALM_MS, CALM_S, SLEW, STOOD_S, Heard, Judge
from kvstore.types import ServerId

A, B, C = map(ServerId, "abc")
THREE = (A, B, C)
DATE_MS = 1_790_000_000_000
HOUR_MS = 3_600_000


class Server:
    """One judge, its clocks, and others that say what the test lets them say. `wrong_ms`: of its wall clock."""

    def __init__(self, servers: Sequence[ServerId] = THREE) -> None:
        self.servers = servers
        self.now, self.wrong_ms = 100.0, 0
        self.others: dict[ServerId, tuple[int, bool]] = {}
        """What others tell: how wrong their dates are, and whether they are sure."""
        self.judge = Judge(A, self.now, self.wall_ms)

    @property
    def wall_ms(self) -> int:
        return DATE_MS + round((self.now - 100.0) * 1000) + self.wrong_ms

    @property
    def wrong(self) -> int:
        """How wrong its date is."""
        return int(self.now * 1000 + self.judge.offset_ms) - (self.wall_ms - self.wrong_ms)

    @property
    def shown(self) -> int:
        """How wrong the date is that it tells clients."""
        return self.judge.shown_ms(self.now) - (self.wall_ms - self.wrong_ms)

    def wait(self, seconds: float) -> Server:
        for _ in range(round(seconds * 5)):
            self.now += 0.2
            for other, (wrong_ms, is_sure) in self.others.items():
                self.judge.hear(other, Heard(DATE_MS - 100_000 + wrong_ms, is_sure, self.now))
            self.judge.look(self.now, self.wall_ms, self.servers)
        return self

    def sure(self) -> Server:
        self.others = {B: (0, True), C: (0, True)}
        self.wait(1.0)
        assert self.judge.is_sure
        return self


def test_a_process_begins_with_the_date_that_a_majority_has() -> None:
    server = Server()
    server.others = {B: (500, True)}
    server.wait(0.2)
    assert server.judge.may_lead
    assert server.judge.may_remove
    assert server.wrong == 0


def test_a_cold_start_of_all_needs_two_of_three_that_agree() -> None:
    server = Server()
    server.wait(1.0)
    assert not server.judge.may_lead
    server.others = {B: (-300, False)}
    assert server.wait(0.2).judge.may_lead


@pytest.mark.parametrize("others", [{B: (HOUR_MS, True)}, {B: (HOUR_MS, False), C: (-HOUR_MS, False)}])
def test_a_process_whose_date_nobody_shares_does_not_lead(others: dict[ServerId, tuple[int, bool]]) -> None:
    server = Server()
    server.others = others
    server.wait(100.0)
    assert not server.judge.may_lead
    assert not server.judge.may_remove


def test_one_that_is_alone_begins_after_a_while_and_removes_nothing() -> None:
    server = Server()
    assert not server.wait(ALONE_S - 1).judge.may_lead
    server.wait(2.0)
    assert server.judge.may_lead
    assert not server.judge.may_remove
    server.others = {B: (0, False)}
    assert server.wait(0.2).judge.may_remove


def test_one_that_has_heard_others_is_alone_only_after_a_while() -> None:
    """However long ago it began: a cut of some seconds, or a pause of its own, must not make its wrong date right."""
    server = Server()
    server.wrong_ms = HOUR_MS
    server.others = {B: (0, True), C: (0, True)}
    server.wait(2 * ALONE_S)
    server.now += 2 * ALONE_S
    server.judge.look(server.now, server.wall_ms, server.servers)
    assert not server.judge.is_known, "it stood still itself"
    server.wait(1.0)
    server.others = {}
    server.wait(ALONE_S - 2)
    assert not server.judge.is_known
    server.wait(10.0)
    assert server.judge.is_known


def test_one_that_agrees_with_all_that_it_hears_begins_although_they_are_few() -> None:
    """The others of a large cluster may be dead for good: what only this server can lead has no other leader."""
    server = Server([A, B, C, ServerId("d"), ServerId("e")])
    server.others = {B: (100, True)}
    assert not server.wait(ALONE_S - 1).judge.may_lead
    server.wait(2.0)
    assert server.judge.may_lead
    assert not server.judge.may_remove


def test_one_that_differs_from_the_only_other_that_is_sure_does_not_begin() -> None:
    server = Server([A, B, C, ServerId("d"), ServerId("e")])
    server.others = {B: (HOUR_MS, True)}
    server.wait(2 * ALONE_S)
    assert not server.judge.is_known


def test_without_a_first_date_a_server_goes_by_that_of_those_who_are_sure() -> None:
    """It tells clients what time it is, and gives deadlines, before it may lead."""
    server = Server()
    server.wrong_ms = HOUR_MS
    server.others = {B: (0, True), C: (200, True)}
    server.wait(1.0)
    assert not server.judge.may_lead
    assert 0 <= server.wrong <= 200
    server.others = {B: (HOUR_MS, False), C: (0, True)}
    server.wait(0.2)
    assert server.judge.may_lead
    assert server.wrong == HOUR_MS


@pytest.mark.parametrize("wrong_ms", [HOUR_MS, -HOUR_MS])
def test_while_nobody_is_sure_clients_are_told_no_time_of_the_future(wrong_ms: int) -> None:
    """A time that is too early is safe for them. Who hears nobody could forward nothing to anybody either."""
    server = Server()
    server.wrong_ms = wrong_ms
    server.wait(0.2)
    assert server.judge.shown_ms(server.now) == 0
    server.others = {B: (60_000, False)}
    server.wait(0.2)
    assert server.shown == min(wrong_ms, 60_000)
    server.others = {B: (60_000, False), C: (0, True)}
    server.wait(0.2)
    assert server.shown == 0
    server.others = {B: (wrong_ms, False), C: (wrong_ms, False)}
    server.wait(0.2)
    assert server.judge.is_known
    assert server.shown == server.wrong == wrong_ms


@pytest.mark.parametrize("jump_ms", [BOUND_MS + 100, 60_000, HOUR_MS, -BOUND_MS - 100, -HOUR_MS])
def test_a_jump_moves_no_date_and_costs_the_lead(jump_ms: int) -> None:
    server = Server().sure()
    server.others = {B: (0, True), C: (jump_ms // 2, True)}
    server.wrong_ms = jump_ms if abs(jump_ms) > 10_000 else 2 * jump_ms  # further than a majority could share
    server.wait(60.0)
    assert server.wrong == 0
    assert not server.judge.may_lead
    assert not server.judge.may_remove
    assert "wall clock" in server.judge.doubt
    server.wrong_ms = 0
    assert server.wait(0.2).judge.may_lead


def test_a_step_below_the_bound_is_followed_slowly() -> None:
    server = Server().sure()
    server.wrong_ms = 1_500
    server.wait(100.0)
    assert server.judge.may_remove
    assert server.wrong == pytest.approx(100_000 * SLEW, abs=2)
    server.wait(2_000.0)
    assert server.wrong == pytest.approx(1_500, abs=2)


def test_a_date_that_a_majority_has_is_taken_over() -> None:
    """All had been wrong, or this machine was suspended and its monotonic clock has not counted it."""
    server = Server().sure()
    server.wrong_ms = HOUR_MS
    assert not server.wait(1.0).judge.may_remove
    server.others = {B: (HOUR_MS, False), C: (0, True)}
    server.wait(0.2)
    assert server.judge.may_lead
    assert server.judge.taken_over == 1
    assert server.wrong == HOUR_MS


def test_one_that_differs_from_both_others_does_not_lead() -> None:
    server = Server().sure()
    server.others = {B: (APART_MS + 100, True), C: (APART_MS + 200, True)}
    assert not server.wait(0.2).judge.may_lead
    assert "2 other servers" in server.judge.doubt
    server.others = {B: (BOUND_MS + 500, True), C: (BOUND_MS + 500, True)}
    assert not server.wait(5.0).judge.may_lead, "it has to come closer than it may be apart"
    server.others = {B: (BOUND_MS - 500, True), C: (BOUND_MS + 500, True)}
    assert server.wait(0.2).judge.may_lead


def test_one_of_two_others_that_differs_changes_nothing() -> None:
    server = Server().sure()
    server.others = {B: (HOUR_MS, True), C: (0, True)}
    assert server.wait(10.0).judge.may_remove
    server.others = {B: (HOUR_MS, True)}
    assert server.wait(20.0).judge.may_lead


def test_a_survivor_goes_on_with_its_monotonic_clock() -> None:
    server = Server().sure()
    server.others = {}
    server.wrong_ms = HOUR_MS
    server.wait(20.0)
    assert server.wrong == 0
    assert server.judge.may_lead
    assert not server.judge.may_remove


def test_while_none_is_sure_monotonic_clocks_have_to_do() -> None:
    server = Server().sure()
    server.wrong_ms = HOUR_MS
    server.others = {B: (-HOUR_MS, False), C: (60_000, False)}
    server.wait(1.0)
    assert server.wrong == 0
    assert server.judge.may_lead


def test_the_only_server_of_a_cluster_takes_a_date_over_that_has_stood() -> None:
    server = Server([A])
    server.wait(0.2)
    assert server.judge.may_remove
    server.wrong_ms = HOUR_MS
    server.wait(STOOD_S - 10)
    assert server.wrong == 0
    assert server.judge.may_lead
    server.wrong_ms = 2 * HOUR_MS
    server.wait(STOOD_S - 10)
    assert server.wrong == 0
    server.wait(20.0)
    assert server.wrong == 2 * HOUR_MS


def test_many_small_steps_are_a_jump_for_the_only_server_too() -> None:
    server = Server([A])
    server.wait(STOOD_S + 100)
    for _ in range(10):
        server.wrong_ms += BOUND_MS - 100
        server.wait(0.2)
    assert server.wrong < 100
    server.wait(STOOD_S + 10)
    assert server.wrong == 10 * (BOUND_MS - 100)


def test_a_server_that_was_suspended_does_not_go_by_the_time_it_has_missed() -> None:
    server = Server().sure()
    server.judge.offset_ms -= 600_000  # its monotonic clock stood for ten minutes
    server.wait(0.2)
    assert server.wrong == 0
    assert server.judge.may_remove


@pytest.mark.parametrize("seed", range(60))
def test_a_look_that_is_left_out_would_have_found_nothing(seed: int) -> None:
    """One judge looks each time, the other only when something may have changed: they say the same."""
    random = Random(seed)
    lazy, eager = Server(), Server()
    for _ in range(400):
        now = lazy.now + random.choice((0.2, 0.2, 0.2, 0.05, 7.0))
        jump_ms = random.choice((0,) * 30 + (-HOUR_MS, -4_000, -1_500, -20, 20, 1_500, 4_000, HOUR_MS))
        heard = random.choice([{}] * 4 + [{B: (0, True), C: (0, True)}] * 4 + [{B: (9_000, True), C: (8_500, False)}])
        for server in (lazy, eager):
            server.now = now
            server.wrong_ms += jump_ms
            for other, (wrong_ms, is_sure) in heard.items():
                server.judge.hear(other, Heard(DATE_MS - 100_000 + wrong_ms, is_sure, now))
        is_calm = lazy.judge.is_calm(now, lazy.wall_ms)
        eager.judge.look(now, eager.wall_ms, THREE)
        if not is_calm:
            lazy.judge.look(now, lazy.wall_ms, THREE)
        assert _said(lazy.judge) == _said(eager.judge)
        assert abs(lazy.judge.offset_ms - eager.judge.offset_ms) <= 2 * CALM_MS


def test_a_server_that_hears_what_it_knows_need_not_judge_anew() -> None:
    server = Server().sure()
    assert server.judge.is_calm(server.now + 0.2, server.wall_ms + 200)
    assert not server.judge.is_calm(server.now + 0.2, server.wall_ms + 200 + CALM_MS)
    assert not server.judge.is_calm(server.now + CALM_S, server.wall_ms + round(CALM_S * 1000))


def _said(judge: Judge) -> tuple[object, ...]:
    return judge.is_known, judge.is_sure, judge.may_lead, judge.may_remove, judge.doubt[:20]
