"""The way to the lead and back, rule by rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.partition.election.ranking import (
    ASK_AGAIN_S,
    INCUMBENT_GRACE_S,
    OUT_S,
    RANK_DELAY_S,
    SETTLED_S,
    SILENT_GRACE_S,
    UNFIT_GRACE_S,
    Incumbent,
    LeaderRecord,
)
from kvstore.partition.election.role_events import (
    AbandonOpening,
    Barred,
    Claim,
    Claimed,
    ClockJudged,
    Command,
    EndLead,
    Event,
    FollowLeader,
    LeadEnded,
    LeaderLost,
    LeaderRead,
    NotClaimed,
    NotTaken,
    Offered,
    OpenAsLeader,
    Opened,
    OpenFailed,
    Prove,
    PublishAndRank,
    Ranked,
    ReadLeaderZnode,
    RemoveStale,
    ReplaceLeader,
    Resign,
    StopReplica,
    Tick,
    WakeAt,
    Yielded,
)
from kvstore.partition.election.role_machine import ReplicaRole, RoleMachine
from kvstore.types import ServerId

GONE, SILENT, SERVES = Incumbent.GONE, Incumbent.SILENT, Incumbent.SERVES
ME, OTHER = ServerId("me"), ServerId("other")
OTHERS = LeaderRecord(OTHER, 1, "theirs")
MINE = LeaderRecord(ME, 1, "mine")


def machine_after(*events: Event, now: float = 0.0) -> RoleMachine:
    machine = RoleMachine(ME, "mine")
    for event in events:
        machine.handle(event, now)
        machine.check()
    return machine


CLAIMING = (LeaderRead(None), Ranked(0, GONE), Tick())
SERVING = (*CLAIMING, Claimed(), Opened())


def test_replica_publishes_and_ranks_itself_without_a_leader() -> None:
    assert machine_after().handle(LeaderRead(None), 0) == [PublishAndRank()]


def test_candidate_waits_its_rank_and_then_claims() -> None:
    machine = machine_after(LeaderRead(None))
    assert machine.handle(Ranked(2, GONE), 10) == [WakeAt(10 + 2 * RANK_DELAY_S)]
    assert machine.handle(Tick(), 10 + 2 * RANK_DELAY_S) == [Claim()]


def test_early_timer_is_set_again() -> None:
    machine = machine_after(LeaderRead(None), Ranked(2, GONE))
    at = 2 * RANK_DELAY_S
    assert machine.handle(Tick(), at - 1e-6) == [WakeAt(at)]
    assert machine.handle(Tick(), at) == [Claim()]


def test_candidacy_ends_when_another_leads() -> None:
    machine = machine_after(LeaderRead(None), Ranked(2, GONE))
    assert machine.handle(LeaderRead(OTHERS), 0.1) == [FollowLeader(OTHER)]
    assert machine.handle(Tick(), 99) == []


def asked_for(machine: RoleMachine, incumbent: Incumbent, rank: int = 0) -> float:
    """Return for how long a replica without a leader asks an incumbent that always answers alike, before it claims."""
    assert machine.handle(LeaderRead(None), 0) == [PublishAndRank()]
    now = 0.0
    while True:
        (wake,) = machine.handle(Ranked(rank, incumbent), now)
        assert isinstance(wake, WakeAt)
        now = wake.at
        match machine.handle(Tick(), now):
            case [Claim()]:
                return now
            case commands:
                assert commands == [PublishAndRank()]


# docs/protocol.md P25
def test_serving_incumbent_is_asked_again_during_its_grace() -> None:
    assert INCUMBENT_GRACE_S <= asked_for(machine_after(), SERVES) <= INCUMBENT_GRACE_S + ASK_AGAIN_S


def test_silent_incumbent_has_a_short_grace() -> None:
    assert SILENT_GRACE_S <= asked_for(machine_after(), SILENT) <= SILENT_GRACE_S + ASK_AGAIN_S


def test_gone_incumbent_delays_only_by_rank() -> None:
    assert asked_for(machine_after(), GONE, rank=1) == RANK_DELAY_S


def test_incumbent_that_stops_serving_loses_its_grace() -> None:
    machine = machine_after(LeaderRead(None))
    assert machine.handle(Ranked(0, SERVES), 1) == [WakeAt(1 + ASK_AGAIN_S)]
    assert machine.handle(Tick(), 1 + ASK_AGAIN_S) == [PublishAndRank()]
    assert machine.handle(Tick(), 1 + ASK_AGAIN_S) == [], "the request is not answered yet"
    assert machine.handle(Ranked(0, GONE), 2) == [WakeAt(2)]
    assert machine.handle(Tick(), 2) == [Claim()]


def test_grace_restarts_only_after_the_znode_was_back() -> None:
    machine = machine_after()
    until = asked_for(machine, SERVES)
    machine.handle(NotClaimed(), until)
    machine.handle(LeaderRead(None), until)
    assert machine.handle(Ranked(0, SERVES), until + 1) == [WakeAt(until + 1)]
    machine.handle(LeaderRead(OTHERS), until + 1)
    machine.handle(LeaderRead(None), until + 2)
    assert machine.handle(Ranked(0, SERVES), until + 2) == [WakeAt(until + 2 + ASK_AGAIN_S)]


def test_former_leader_grants_its_successor_the_whole_grace() -> None:
    machine = machine_after(*SERVING, Yielded(OTHER), LeaderRead(None), now=100)
    assert machine.handle(Ranked(0, SERVES), 100 + INCUMBENT_GRACE_S) == [WakeAt(100 + INCUMBENT_GRACE_S + ASK_AGAIN_S)]


def test_winner_leads_only_once_the_log_is_open() -> None:
    machine = machine_after(*CLAIMING)
    assert machine.handle(Claimed(), 0) == [OpenAsLeader()]
    assert machine.leader is None
    assert machine.handle(Opened(), 0) == [FollowLeader(ME)]
    assert machine.role is ReplicaRole.SERVING


def test_loser_reads_the_winner() -> None:
    assert machine_after(*CLAIMING).handle(NotClaimed(), 0) == [ReadLeaderZnode()]


def test_leader_claims_its_missing_znode_again() -> None:
    machine = machine_after(*SERVING)
    assert machine.handle(LeaderRead(None), 1) == [Claim()]
    assert machine.handle(Claimed(), 1) == []
    assert machine.role is ReplicaRole.SERVING


def test_leader_recreates_znode_before_its_lost_session_ends() -> None:
    machine = machine_after(*SERVING)
    assert machine.handle(LeaderRead(MINE, is_passing=True), 1) == [Claim()]
    assert machine.handle(LeaderRead(MINE), 1) == []
    assert machine.role is ReplicaRole.SERVING


# docs/protocol.md P23
def test_anothers_znode_does_not_stop_an_unfenced_leader() -> None:
    machine = machine_after(*SERVING)
    assert machine.handle(LeaderRead(OTHERS), 1) == [Prove()], "an append will show whether it is fenced"
    assert machine.role is ReplicaRole.SERVING


def test_fenced_leader_follows_and_may_be_candidate_at_once() -> None:
    machine = machine_after(*SERVING)
    assert machine.handle(LeadEnded(), 5) == [Resign(), FollowLeader(None), WakeAt(5), ReadLeaderZnode()]
    assert machine.handle(LeaderRead(None), 5) == [PublishAndRank()]


def test_yielding_leader_sends_clients_to_successor_and_follows_it() -> None:
    machine = machine_after(*SERVING)
    assert machine.handle(Yielded(OTHER), 5) == [FollowLeader(OTHER)]
    assert machine.handle(LeaderRead(MINE), 5) == [], "its own znode stays until the successor replaces it"
    assert machine.handle(LeaderRead(OTHERS), 5) == []  # clients are sent there already
    assert (machine.role, machine.leader) == (ReplicaRole.FOLLOWING, OTHER)
    assert machine.handle(NotTaken(), 6) == []


def test_yielding_leader_claims_again_when_successor_does_not_lead() -> None:
    machine = machine_after(*SERVING, Yielded(OTHER))
    assert machine.handle(NotTaken(), 5) == [FollowLeader(None), Claim()]
    assert machine.handle(Claimed(), 5) == [OpenAsLeader()]
    assert machine.handle(Opened(), 5) == [FollowLeader(ME)]


def test_yielded_leader_joins_election_when_there_is_no_leader() -> None:
    machine = machine_after(*SERVING, Yielded(OTHER))
    assert machine.handle(LeaderRead(None), 5) == [FollowLeader(None), PublishAndRank()]


def test_successor_lets_clients_wait_while_it_takes_over() -> None:
    machine = machine_after(LeaderRead(OTHERS))
    assert machine.handle(Offered(OTHERS, 7), 5) == [FollowLeader(ME), ReplaceLeader(OTHERS, 7)]
    assert machine.handle(LeaderRead(OTHERS), 5) == [], "that is the znode that is being replaced"
    assert machine.handle(LeaderRead(LeaderRecord(OTHER, 2, "reborn")), 5) == [FollowLeader(OTHER)]


def test_successor_leads_like_any_winner() -> None:
    machine = machine_after(LeaderRead(OTHERS), Offered(OTHERS, 7))
    assert machine.handle(Claimed(), 5) == [OpenAsLeader()]
    assert machine.handle(LeaderRead(MINE), 5) == []
    assert machine.handle(Opened(), 5) == [FollowLeader(ME)]


def test_late_successor_reads_the_leader() -> None:
    machine = machine_after(LeaderRead(OTHERS), Offered(OTHERS, 7))
    assert machine.handle(NotClaimed(), 5) == [FollowLeader(None), ReadLeaderZnode()]
    assert machine.handle(LeaderRead(OTHERS), 5) == [FollowLeader(OTHER)]


def test_offer_is_ignored_by_leaders_and_stopped_replicas() -> None:
    for before in (SERVING, (*SERVING, Yielded(OTHER)), CLAIMING, (StopReplica(),)):
        assert machine_after(*before).handle(Offered(OTHERS, 7), 5) == []


def test_failed_opening_gives_lead_back_and_stays_out_longer() -> None:
    machine = machine_after()
    for out in (*OUT_S, OUT_S[-1]):
        for event in (LeaderRead(None), Ranked(0, GONE), Tick(), Claimed()):
            machine.handle(event, 1000)
        assert Resign() in machine.handle(OpenFailed(), 1000)
        assert machine.handle(LeaderRead(None), 1000 + out - 0.1) == [WakeAt(1000 + out)]
        assert machine.handle(LeaderRead(None), 1000 + out) == [PublishAndRank()]
        machine.handle(LeaderRead(OTHERS), 1000)
        machine._out_until = 0


def test_opening_is_abandoned_when_another_leads() -> None:
    machine = machine_after(*CLAIMING, Claimed())
    assert machine.handle(LeaderRead(OTHERS), 0) == [AbandonOpening(), FollowLeader(OTHER)]


# docs/protocol.md P40
def test_lost_leader_is_replaced_in_this_replicas_turn() -> None:
    machine = machine_after(LeaderRead(OTHERS))
    assert machine.handle(LeaderLost(OTHERS, 7), 5) == [FollowLeader(None), PublishAndRank(asks=False)]
    assert machine.handle(LeaderRead(OTHERS), 5) == [], "that is the znode that is to be replaced"
    assert machine.handle(Ranked(1, GONE), 5) == [WakeAt(5 + RANK_DELAY_S)]
    assert machine.handle(Tick(), 5 + RANK_DELAY_S) == [ReplaceLeader(OTHERS, 7)]
    assert machine.handle(LeaderRead(OTHERS), 6) == []
    assert machine.handle(Claimed(), 6) == [OpenAsLeader()]


def test_lost_leader_stays_when_its_znode_has_changed() -> None:
    reborn = LeaderRecord(OTHER, 2, "reborn")
    assert machine_after(LeaderRead(reborn)).handle(LeaderLost(OTHERS, 7), 5) == []
    machine = machine_after(LeaderRead(OTHERS), LeaderLost(OTHERS, 7))
    assert machine.handle(LeaderRead(reborn), 5) == [FollowLeader(OTHER)]
    assert machine.handle(Tick(), 99) == []


@pytest.mark.parametrize("before", [SERVING, CLAIMING, (StopReplica(),), (LeaderRead(OTHERS), Barred(True))])
def test_lost_leader_is_not_replaced_by_a_replica_that_cannot_lead(before: tuple[Event, ...]) -> None:
    assert machine_after(*before).handle(LeaderLost(OTHERS, 7), 5) == []


# docs/protocol.md P40
def test_deposing_leader_is_replaced_only_after_confirmation() -> None:
    refused, confirmed = LeaderLost(OTHERS, 7, is_confirmed=False), LeaderLost(OTHERS, 7)
    machine = machine_after(*SERVING, LeaderRead(OTHERS), LeadEnded(True), LeaderRead(OTHERS), LeaderRead(OTHERS))
    machine._out_until = 0
    assert machine.handle(refused, 5) == []
    assert machine.handle(confirmed, 5) == [FollowLeader(None), PublishAndRank(asks=False)]


# docs/protocol.md P40
@pytest.mark.parametrize("before", [(), (*SERVING, LeadEnded(True), LeaderRead(None)), (*SERVING, Yielded(OTHER))])
def test_leader_that_deposed_another_is_replaced_after_a_refusal(before: tuple[Event, ...]) -> None:
    machine = machine_after(*before, LeaderRead(OTHERS))
    machine._out_until = 0
    assert machine.handle(LeaderLost(OTHERS, 7, is_confirmed=False), 5) == [
        FollowLeader(None),
        PublishAndRank(asks=False),
    ]


# docs/protocol.md P41
def test_lost_leader_is_followed_again_by_an_unfit_replica() -> None:
    machine = machine_after(LeaderRead(OTHERS), LeaderLost(OTHERS, 7))
    assert machine.handle(Ranked(0, GONE, is_fit=False), 5) == [ReadLeaderZnode()]
    assert machine.handle(LeaderRead(OTHERS), 5) == [FollowLeader(OTHER)]


# docs/protocol.md P41
def test_unfit_candidate_claims_only_after_a_while_without_leader() -> None:
    machine = machine_after(LeaderRead(None))
    now = 0.0
    while True:
        (wake,) = machine.handle(Ranked(0, GONE, is_fit=False), now)
        assert isinstance(wake, WakeAt)
        now = wake.at
        if machine.handle(Tick(), now) == [Claim()]:
            break
    assert UNFIT_GRACE_S <= now <= UNFIT_GRACE_S + ASK_AGAIN_S


# docs/protocol.md P41
def test_failed_leader_stays_out_longer_until_a_lead_has_lasted() -> None:
    machine = machine_after()
    for out in OUT_S[:3]:
        for event in (LeaderRead(None), Ranked(0, GONE), Tick(), Claimed(), Opened()):
            machine.handle(event, 1000)
        assert WakeAt(1001 + out) in machine.handle(LeadEnded(has_failed=True), 1001)
        assert machine.handle(LeaderRead(None), 1001) == [WakeAt(1001 + out)]
        machine._out_until = 0
    for event in (LeaderRead(None), Ranked(0, GONE), Tick(), Claimed(), Opened()):
        machine.handle(event, 2000)
    late = 2000 + SETTLED_S
    assert WakeAt(late + OUT_S[0]) in machine.handle(LeadEnded(has_failed=True), late)


def test_znode_of_this_servers_former_process_is_removed() -> None:
    former = LeaderRecord(ME, 1, "former")
    assert machine_after().handle(LeaderRead(former), 0) == [RemoveStale(former)]


def test_own_znode_is_given_back_when_not_leading() -> None:
    assert machine_after().handle(LeaderRead(MINE), 0) == [Resign()]
    assert machine_after(LeaderRead(OTHERS)).handle(Claimed(), 0) == [Resign()]


def test_stopped_replica_does_nothing() -> None:
    machine = machine_after(*SERVING)
    assert machine.handle(StopReplica(), 0) == [Resign()]
    assert machine.handle(LeaderRead(None), 0) == []


EVENTS = st.sampled_from(
    [
        LeaderRead(None),
        LeaderRead(OTHERS),
        LeaderRead(MINE),
        Ranked(0, GONE),
        Ranked(1, SERVES),
        LeaderLost(OTHERS, 3),
        Ranked(0, GONE, is_fit=False),
        LeadEnded(has_failed=True),
        Claimed(),
        NotClaimed(),
        Opened(),
        OpenFailed(),
        LeadEnded(),
        LeaderRead(MINE, is_passing=True),
        Yielded(OTHER),
        NotTaken(),
        Offered(OTHERS, 7),
        Tick(),
    ]
)


@given(st.lists(EVENTS, max_size=40))
def test_replica_without_leader_always_has_a_next_step(events: list[Event]) -> None:
    machine = RoleMachine(ME, "mine")
    for now, event in enumerate(events):
        machine.handle(event, float(now))
        machine.check()
    machine.handle(NotClaimed(), 9_000.0)  # every claim is answered
    seen: list[Command] = []
    for late in range(4):
        now = 10_000.0 + late * 100
        seen += machine.handle(LeaderRead(None), now)
        seen += machine.handle(Ranked(0, GONE), now)
        claims = machine.handle(Tick(), now + 10)
        seen += claims
        if ReplaceLeader(OTHERS, 3) in claims:  # of a znode that no longer exists
            machine.handle(NotClaimed(), now + 10)
    assert Claim() in seen


# docs/protocol.md P35
@pytest.mark.parametrize("events", [(), (LeaderRead(None),), CLAIMING, (*CLAIMING, Claimed()), SERVING])
def test_barred_replica_neither_leads_nor_runs(events: tuple[Event, ...]) -> None:
    machine = machine_after(*events)
    was = machine.role
    commands = machine.handle(Barred(True), 5)
    assert (EndLead() in commands) is (was is ReplicaRole.SERVING)
    assert (Resign() in commands) is (was in (ReplicaRole.SERVING, ReplicaRole.OPENING))
    for event in (LeaderRead(None), Tick(), Ranked(0, GONE), Offered(OTHERS, 1), Opened(), LeaderRead(None)):
        commands = machine.handle(event, 6)
        machine.check()
        assert not {Claim, OpenAsLeader, PublishAndRank} & {type(command) for command in commands}
    assert machine.handle(Claimed(), 6) == [Resign()], "a claim in progress"
    assert machine.handle(Barred(False), 7) == [ReadLeaderZnode()]
    assert PublishAndRank() in machine.handle(LeaderRead(None), 1_000)


# docs/protocol.md P29
@pytest.mark.parametrize("events", [(), (LeaderRead(None),)])
def test_replica_with_a_doubtful_clock_does_not_run(events: tuple[Event, ...]) -> None:
    machine = machine_after(*events)
    assert machine.handle(ClockJudged(False), 5) == []
    for event in (LeaderRead(None), Tick(), Ranked(0, GONE), Offered(OTHERS, 1), LeaderRead(None)):
        commands = machine.handle(event, 6)
        assert not {Claim, OpenAsLeader, PublishAndRank, ReplaceLeader} & {type(command) for command in commands}
    assert machine.handle(ClockJudged(True), 7) == [ReadLeaderZnode()]
    assert PublishAndRank() in machine.handle(LeaderRead(None), 1_000)


# docs/protocol.md P29
def test_lead_is_not_taken_back_with_a_doubtful_clock() -> None:
    machine = machine_after(*SERVING, ClockJudged(False), Yielded(OTHER))
    assert Resign() in machine.handle(NotTaken(), 6)
    assert machine.role is ReplicaRole.FOLLOWING
