"""The cluster time of a server while its clocks and the other servers' answers change (docs/protocol.md, P28, P29)."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import pytest

from kvstore.client.coordination.lease import CLOCK_RATE
from kvstore.server.clock.clock_judge import (
    ALONE_S,
    APART_MS,
    ARRIVED_MS,
    BOUND_MS,
    CALM_MS,
    CALM_S,
    RATE,
    SILENT_MS,
    ClockJudge,
    PeerClock,
)
from kvstore.types import ServerId

A, B, C, D, E = map(ServerId, "abcde")
THREE = (A, B, C)
DATE_MS = 1_790_000_000_000
MINUTE_MS, HOUR_MS = 60_000, 3_600_000


class Other(NamedTuple):
    """Another server's report: the errors of its cluster time (None: it has none) and of its wall clock."""

    date: float | None = 0
    wall: int = 0
    is_sure: bool = True


SURE, NEW = Other(), Other(None, 0, is_sure=False)


class Server:
    """One judge, its clocks, and other servers with given answers. `wrong_ms`: the error of its wall clock."""

    def __init__(self, servers: Sequence[ServerId] = THREE, kept_ms: float | None = None) -> None:
        """`kept_ms`: the error of the time that the previous process saved."""
        self.servers = servers
        self.now, self.wrong_ms = 100.0, 0
        self.others: dict[ServerId, Other] = {}
        kept = None if kept_ms is None else DATE_MS - 100_000 + kept_ms
        self.judge = ClockJudge(A, self.now, self.wall_ms, kept)

    @property
    def wall_ms(self) -> int:
        return DATE_MS + round((self.now - 100.0) * 1000) + self.wrong_ms

    @property
    def wrong(self) -> int:
        """Return the error of its cluster time."""
        return int(self.now * 1000 + self.judge.offset_ms) - (self.wall_ms - self.wrong_ms)

    @property
    def shown(self) -> int:
        """Return the error of the time that it gives to clients."""
        return self.judge.shown_ms(self.now) - (self.wall_ms - self.wrong_ms)

    def wait(self, seconds: float) -> Server:
        for _ in range(round(seconds * 5)):
            self.now += 0.2
            for other, said in self.others.items():
                self.judge.note_answer(other, heard(said, self.now))
            self.poll()
        return self

    def poll(self) -> None:
        self.judge.poll(self.now, self.wall_ms, self.servers)

    def sure(self) -> Server:
        self.others = {B: SURE, C: SURE}
        self.wait(1.0)
        assert self.judge.is_sure
        return self


def heard(said: Other, now: float) -> PeerClock:
    offset_ms = DATE_MS - 100_000
    return PeerClock(None if said.date is None else offset_ms + said.date, offset_ms + said.wall, said.is_sure, now)


# ── the first cluster time ────────────────────────────────────────────────────────────────────────────────────────────


def test_first_date_comes_from_another_server_not_wall_clocks() -> None:
    """Servers restart one by one after the clocks of a majority have jumped."""
    server = Server()
    server.wrong_ms = HOUR_MS
    server.others = {B: Other(0, HOUR_MS), C: SURE}
    server.wait(0.4)
    assert server.judge.is_sure
    assert -1 <= server.wrong <= RATE * 1000


@pytest.mark.parametrize("wrong_ms", [0, MINUTE_MS, -HOUR_MS])
def test_first_date_comes_from_the_previous_process(wrong_ms: int) -> None:
    server = Server(kept_ms=0)
    server.wrong_ms = wrong_ms
    server.poll()
    assert server.judge.may_lead, "it hears nobody who is sure"
    assert not server.judge.may_remove, "its machine may have stood still unseen"
    server.others = {B: SURE, C: Other(None, wrong_ms, is_sure=False)}
    server.wait(0.4)
    assert server.judge.is_sure
    assert abs(server.wrong) <= RATE * 1000


def test_first_date_is_latest_that_majority_supports() -> None:
    server = Server()
    server.others = {B: Other(-HOUR_MS), C: SURE}
    assert server.wait(0.2).wrong == 0
    server = Server([A, B, C, D, E])
    server.others = {B: SURE, C: SURE, D: Other(HOUR_MS)}
    assert server.wait(0.2).wrong == 0


def test_cold_start_needs_two_agreeing_servers_of_three() -> None:
    server = Server()
    server.others = {B: Other(None, HOUR_MS, is_sure=False), C: Other(None, -HOUR_MS, is_sure=False)}
    assert not server.wait(2 * ALONE_S).judge.is_known
    server.others[B] = Other(None, -300, is_sure=False)
    assert server.wait(0.2).judge.has_date
    assert server.wrong == 0


def test_cold_start_waits_for_silent_server() -> None:
    """That server may be the one that has the cluster time."""
    server = Server()
    server.wrong_ms = HOUR_MS
    server.others = {B: Other(None, HOUR_MS, is_sure=False)}
    assert not server.wait(ALONE_S - 1).judge.is_known
    server.others[C] = SURE
    assert server.wait(0.2).judge.has_date
    assert abs(server.wrong) <= RATE * 1000
    server = Server()
    server.others = {B: NEW}
    assert server.wait(ALONE_S + 1).judge.has_date, "nobody can have it"


def test_isolated_server_leads_after_a_while_and_removes_nothing() -> None:
    server = Server()
    assert not server.wait(ALONE_S - 1).judge.may_lead
    server.wait(2.0)
    assert server.judge.may_lead
    assert not server.judge.has_date
    assert not server.judge.may_remove
    server.others = {B: NEW}
    assert server.wait(0.4).judge.has_date


def test_server_starts_when_all_few_reachable_servers_agree() -> None:
    """The others of a large cluster may be lost for good: some partitions can then be led only by this server."""
    server = Server([A, B, C, D, E])
    server.others = {B: Other(None, 100, is_sure=False)}
    assert not server.wait(ALONE_S - 1).judge.may_lead
    server.wait(2.0)
    assert server.judge.may_lead
    assert not server.judge.may_remove


def test_isolated_server_takes_date_of_another_server() -> None:
    server = Server()
    server.wrong_ms = HOUR_MS
    server.wait(ALONE_S + 1)
    assert server.wrong == HOUR_MS
    server.others = {B: SURE}
    server.wait(0.2)
    assert abs(server.wrong) <= RATE * 1000


def test_server_counts_as_isolated_only_after_a_while() -> None:
    """A network cut of some seconds, or a pause of the server, does not make its wrong wall clock the cluster time."""
    server = Server()
    server.wrong_ms = HOUR_MS
    server.others = {B: Other(None, 0, is_sure=False), C: Other(None, -HOUR_MS, is_sure=False)}
    server.wait(2 * ALONE_S)
    server.now += 2 * ALONE_S
    server.poll()
    assert not server.judge.is_known, "it stood still itself"
    server.wait(1.0)
    server.others = {}
    server.wait(ALONE_S - 2)
    assert not server.judge.is_known
    server.wait(10.0)
    assert server.judge.is_known


@pytest.mark.parametrize("wrong_ms", [HOUR_MS, -HOUR_MS])
def test_clients_get_no_future_time_while_no_server_is_sure(wrong_ms: int) -> None:
    """A time that is too early is safe for them. A server without contact to others could forward nothing anyway."""
    server = Server()
    server.wrong_ms = wrong_ms
    server.wait(0.2)
    assert server.judge.shown_ms(server.now) == 0
    server.others = {B: Other(None, 60_000, is_sure=False)}
    server.wait(0.2)
    assert server.shown == min(wrong_ms, 60_000)
    server.others[C] = SURE
    server.wait(0.2)
    assert server.shown == server.wrong
    assert abs(server.wrong) <= RATE * 1000


def test_server_judges_nothing_before_it_knows_the_ring() -> None:
    server = Server([])
    assert not server.wait(2 * ALONE_S).judge.is_known


# ── clocks that jump ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("jump_ms", [BOUND_MS + 100, 60_000, HOUR_MS, -BOUND_MS - 100, -HOUR_MS])
def test_jump_of_one_wall_clock_moves_no_date(jump_ms: int) -> None:
    server = Server().sure()
    server.wrong_ms = jump_ms
    server.poll()
    assert not server.judge.is_sure, "its monotonic clock may have missed time"
    assert not server.judge.may_lead
    server.wait(60.0)
    assert server.wrong == 0
    assert server.judge.may_remove, "a majority has its date"


@pytest.mark.parametrize("jump_ms", [3_000, MINUTE_MS, HOUR_MS, 365 * 24 * HOUR_MS, -MINUTE_MS, -365 * 24 * HOUR_MS])
def test_jump_of_majority_of_wall_clocks_moves_date_slowly(jump_ms: int) -> None:
    """The servers are one whose clock jumped together with another one's, and the third."""
    for own, others in ((jump_ms, {B: jump_ms, C: 0}), (0, {B: jump_ms, C: jump_ms})):
        server = Server().sure()
        server.wrong_ms = own
        moved = 0
        for _ in range(50):
            server.others = {other: Other(server.wrong, wall) for other, wall in others.items()}
            server.wait(2.0)
            assert server.judge.is_sure
            assert 0 <= abs(server.wrong - moved) <= 2_000 * RATE + 2
            moved = server.wrong
        assert moved == pytest.approx(100_000 * RATE * (1 if jump_ms > 0 else -1), abs=30)
        assert server.judge.behind_ms == pytest.approx(jump_ms - moved, abs=2)
        assert server.judge.taken_over == 0


# docs/protocol.md P28
@pytest.mark.parametrize("jump_ms", [-MINUTE_MS, MINUTE_MS])
def test_date_stays_near_a_silent_server(jump_ms: int) -> None:
    """The silent server may lead by a date that does not move, so sessions would end early once others answer it."""
    server = Server((A, B, C, D, E))
    server.others = dict.fromkeys((B, C, D, E), SURE)
    server.wait(60.0)
    assert server.judge.is_sure
    del server.others[D], server.others[E]
    server.wrong_ms = jump_ms
    for _ in range(100):
        server.others = dict.fromkeys((B, C), Other(server.wrong, jump_ms))
        server.wait(10.0)
    assert abs(server.wrong) <= SILENT_MS + RATE * 10_000
    server.others = dict.fromkeys((B, C, D, E), Other(server.wrong, jump_ms))
    server.wait(100.0)
    assert abs(server.wrong) > SILENT_MS + RATE * 50_000, "all answer again"


# docs/protocol.md P28
@pytest.mark.parametrize("jump_ms", [-MINUTE_MS, MINUTE_MS])
def test_date_stays_near_a_server_that_hears_nobody(jump_ms: int) -> None:
    """It answers, so it is not silent, and it is sure of its date, because no answer contradicts it. So it may lead."""
    server = Server().sure()
    server.wrong_ms = jump_ms
    for _ in range(100):
        server.others = {B: Other(server.wrong, jump_ms), C: Other(0, 0)}
        server.wait(10.0)
    assert server.judge.is_sure
    assert abs(server.wrong) <= BOUND_MS + SILENT_MS + RATE * 10_000
    for _ in range(10):
        server.others = {B: Other(server.wrong, jump_ms), C: Other(0, 0, is_sure=False)}
        server.wait(10.0)
    assert abs(server.wrong) > BOUND_MS + SILENT_MS + RATE * 50_000, "it does not lead by that date"


# docs/protocol.md P28
@pytest.mark.parametrize("kept", [True, False])
def test_date_stays_near_a_silent_server_over_restarts(kept: bool) -> None:
    """A new process has its date from the process before it, or from another server. Either may have moved already."""
    date = 0.0
    for _ in range(10):
        server = Server(kept_ms=date if kept else None)
        server.wrong_ms = MINUTE_MS
        for _ in range(20):
            date = float(server.wrong) if server.judge.has_date else date
            server.others = {B: Other(date, MINUTE_MS)}
            server.wait(10.0)
    assert abs(date) <= SILENT_MS + RATE * 10_000
    server.others[C] = Other(date, MINUTE_MS)
    server.wait(200.0)
    assert server.wrong > SILENT_MS + RATE * 50_000, "all answer"


def test_date_reaches_wall_clocks_of_majority() -> None:
    server = Server().sure()
    server.wrong_ms = MINUTE_MS
    server.others = {B: Other(0, MINUTE_MS), C: SURE}
    for _ in range(70):
        server.others = {B: Other(server.wrong, MINUTE_MS), C: Other(server.wrong)}
        server.wait(100.0)
    assert server.wrong == pytest.approx(MINUTE_MS, abs=ARRIVED_MS)
    assert abs(server.judge.behind_ms) <= ARRIVED_MS


def test_session_owner_counts_less_than_clocks_may_move() -> None:
    """Q3: NTP slews a clock by at most 500 ppm. The owner's clock may be slow, and the leader's fast."""
    ppm = 500e-6
    assert (1 - CLOCK_RATE) * (1 + ppm) * (1 + ppm) * (1 + RATE) < 1


def test_paused_process_moves_its_date_no_further() -> None:
    server = Server().sure()
    server.wrong_ms = MINUTE_MS
    server.others = {B: Other(0, MINUTE_MS), C: Other(0, MINUTE_MS)}
    server.now += 3_600.0
    server.wait(0.2)
    assert server.wrong <= 2 * RATE * 1000


def test_small_step_is_followed_slowly() -> None:
    server = Server().sure()
    server.wrong_ms = 1_500
    server.wait(100.0)
    assert server.judge.may_remove
    assert server.wrong == pytest.approx(100_000 * RATE, abs=2)
    server.wait(200.0)
    assert server.wrong == pytest.approx(1_500, abs=2)


def test_single_server_moves_its_date_slowly() -> None:
    server = Server([A])
    server.wait(0.2)
    assert server.judge.may_remove
    server.wrong_ms = HOUR_MS
    server.wait(1_000.0)
    assert server.judge.may_remove
    assert server.wrong == pytest.approx(1_000_000 * RATE, abs=30)


# ── clocks that miss time ─────────────────────────────────────────────────────────────────────────────────────────────


def test_server_with_missed_time_steps_to_date_of_others() -> None:
    server = Server().sure()
    server.judge.offset_ms -= 600_000  # its monotonic clock was stopped for ten minutes
    server.wait(0.2)
    assert server.wrong == 0
    assert server.judge.may_remove
    assert server.judge.taken_over == 1


def test_server_does_not_step_to_date_without_majority() -> None:
    """One server's clock may be broken."""
    server = Server().sure()
    server.others = {B: Other(HOUR_MS, HOUR_MS), C: SURE}
    server.wrong_ms = -5_000  # its own clocks diverge, so that it is not sure
    server.wait(2.0)
    assert abs(server.wrong) <= 20


def test_server_never_steps_back() -> None:
    server = Server().sure()
    server.others = {B: Other(-HOUR_MS, -HOUR_MS), C: Other(-HOUR_MS, -HOUR_MS)}
    server.wait(10.0)
    assert not server.judge.is_sure
    assert server.wrong == pytest.approx(-10_000 * RATE, abs=5)


def test_server_that_differs_from_both_others_does_not_lead() -> None:
    server = Server().sure()
    server.others = {B: Other(-APART_MS - 100), C: Other(-APART_MS - 200)}
    assert not server.wait(0.2).judge.may_lead
    assert "2 other servers" in server.judge.doubt
    server.others = {B: Other(-BOUND_MS - 500), C: Other(-BOUND_MS - 500)}
    assert not server.wait(5.0).judge.may_lead, "it has to come closer than it may be apart"
    server.others = {B: Other(500 - BOUND_MS), C: Other(-BOUND_MS - 500)}
    assert server.wait(0.2).judge.may_lead


def test_one_differing_server_of_two_changes_nothing() -> None:
    server = Server().sure()
    server.others = {B: Other(HOUR_MS, HOUR_MS), C: SURE}
    assert server.wait(10.0).judge.may_remove
    server.others = {B: Other(HOUR_MS, HOUR_MS)}
    assert server.wait(20.0).judge.may_lead


def test_survivor_continues_with_its_monotonic_clock() -> None:
    server = Server().sure()
    server.others = {}
    server.wrong_ms = HOUR_MS
    server.wait(20.0)
    assert server.wrong == 0
    assert server.judge.may_lead
    assert not server.judge.may_remove


@pytest.mark.parametrize("seed", range(60))
def test_skipped_judgement_would_have_changed_nothing(seed: int) -> None:
    """One judge looks each time, the other only when something may have changed. Both reach the same result."""
    random = Random(seed)
    lazy, eager = Server(), Server()
    for _ in range(400):
        now = lazy.now + random.choice((0.2, 0.2, 0.2, 0.05, 7.0))
        jump_ms = random.choice((0,) * 30 + (-HOUR_MS, -4_000, -1_500, -20, 20, 1_500, 4_000, HOUR_MS))
        said = random.choice([{}] * 4 + [{B: SURE, C: SURE}] * 4 + [{B: Other(9_000, 9_000), C: Other(8_500, 0)}])
        for server in (lazy, eager):
            server.now = now
            server.wrong_ms += jump_ms
            for other, each in said.items():
                server.judge.note_answer(other, heard(each, now))
        is_calm = lazy.judge.is_calm(now, lazy.wall_ms)
        eager.poll()
        if not is_calm:
            lazy.poll()
        assert _said(lazy.judge) == _said(eager.judge)
        assert abs(lazy.judge.offset_ms - eager.judge.offset_ms) <= 10 * ARRIVED_MS, "the rate holds over both's looks"


def test_repeated_answer_needs_no_judgement() -> None:
    server = Server().sure()
    assert server.judge.is_calm(server.now + 0.2, server.wall_ms + 200)
    assert not server.judge.is_calm(server.now + 0.2, server.wall_ms + 200 + CALM_MS)
    assert not server.judge.is_calm(server.now + CALM_S, server.wall_ms + round(CALM_S * 1000))


def _said(judge: ClockJudge) -> tuple[object, ...]:
    return judge.is_known, judge.has_date, judge.is_sure, judge.may_lead, judge.may_remove, judge.doubt[:20]
