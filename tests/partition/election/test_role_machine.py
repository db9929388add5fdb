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
    Command,
    Dated,
    EndLead,
    Event,
    FollowLeader,
    GiveBack,
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
    StopReplica,
    Succeed,
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


def owner_after(*events: Event, now: float = 0.0) -> RoleMachine:
    owner = RoleMachine(ME, "mine")
    for event in events:
        owner.handle(event, now)
        owner.check()
    return owner


CLAIMING = (LeaderRead(None), Ranked(0, GONE), Tick())
SERVING = (*CLAIMING, Claimed(), Opened())


def test_replica_publishes_and_ranks_itself_without_a_leader() -> None:
    assert owner_after().handle(LeaderRead(None), 0) == [PublishAndRank()]


def test_candidate_waits_its_rank_and_then_claims() -> None:
    owner = owner_after(LeaderRead(None))
    assert owner.handle(Ranked(2, GONE), 10) == [WakeAt(10 + 2 * RANK_DELAY_S)]
    assert owner.handle(Tick(), 10 + 2 * RANK_DELAY_S) == [Claim()]


def test_early_timer_is_set_again() -> None:
    owner = owner_after(LeaderRead(None), Ranked(2, GONE))
    at = 2 * RANK_DELAY_S
    assert owner.handle(Tick(), at - 1e-6) == [WakeAt(at)]
    assert owner.handle(Tick(), at) == [Claim()]


def test_candidacy_ends_when_another_leads() -> None:
    owner = owner_after(LeaderRead(None), Ranked(2, GONE))
    assert owner.handle(LeaderRead(OTHERS), 0.1) == [FollowLeader(OTHER)]
    assert owner.handle(Tick(), 99) == []


def asked_for(owner: RoleMachine, incumbent: Incumbent, rank: int = 0) -> float:
    """How long a replica that finds no leader at 0 asks an incumbent that always says the same; it claims then."""
    assert owner.handle(LeaderRead(None), 0) == [PublishAndRank()]
    now = 0.0
    while True:
        (wake,) = owner.handle(Ranked(rank, incumbent), now)
        assert isinstance(wake, WakeAt)
        now = wake.at
        match owner.handle(Tick(), now):
            case [Claim()]:
                return now
            case commands:
                assert commands == [PublishAndRank()]


# docs/protocol.md P25
def test_serving_incumbent_is_asked_again_during_its_grace() -> None:
    assert INCUMBENT_GRACE_S <= asked_for(owner_after(), SERVES) <= INCUMBENT_GRACE_S + ASK_AGAIN_S


def test_silent_incumbent_has_a_short_grace() -> None:
    assert SILENT_GRACE_S <= asked_for(owner_after(), SILENT) <= SILENT_GRACE_S + ASK_AGAIN_S


def test_gone_incumbent_delays_only_by_rank() -> None:
    assert asked_for(owner_after(), GONE, rank=1) == RANK_DELAY_S


def test_incumbent_that_stops_serving_loses_its_grace() -> None:
    owner = owner_after(LeaderRead(None))
    assert owner.handle(Ranked(0, SERVES), 1) == [WakeAt(1 + ASK_AGAIN_S)]
    assert owner.handle(Tick(), 1 + ASK_AGAIN_S) == [PublishAndRank()]
    assert owner.handle(Tick(), 1 + ASK_AGAIN_S) == [], "what was asked is not answered yet"
    assert owner.handle(Ranked(0, GONE), 2) == [WakeAt(2)]
    assert owner.handle(Tick(), 2) == [Claim()]


def test_grace_restarts_only_after_the_znode_was_back() -> None:
    owner = owner_after()
    until = asked_for(owner, SERVES)
    owner.handle(NotClaimed(), until)
    owner.handle(LeaderRead(None), until)
    assert owner.handle(Ranked(0, SERVES), until + 1) == [WakeAt(until + 1)]
    owner.handle(LeaderRead(OTHERS), until + 1)
    owner.handle(LeaderRead(None), until + 2)
    assert owner.handle(Ranked(0, SERVES), until + 2) == [WakeAt(until + 2 + ASK_AGAIN_S)]


def test_former_leader_grants_its_successor_the_whole_grace() -> None:
    owner = owner_after(*SERVING, Yielded(OTHER), LeaderRead(None), now=100)
    assert owner.handle(Ranked(0, SERVES), 100 + INCUMBENT_GRACE_S) == [WakeAt(100 + INCUMBENT_GRACE_S + ASK_AGAIN_S)]


def test_winner_leads_only_once_the_log_is_open() -> None:
    owner = owner_after(*CLAIMING)
    assert owner.handle(Claimed(), 0) == [OpenAsLeader()]
    assert owner.leader is None
    assert owner.handle(Opened(), 0) == [FollowLeader(ME)]
    assert owner.role is ReplicaRole.SERVING


def test_loser_reads_the_winner() -> None:
    assert owner_after(*CLAIMING).handle(NotClaimed(), 0) == [ReadLeaderZnode()]


def test_leader_claims_its_missing_znode_again() -> None:
    owner = owner_after(*SERVING)
    assert owner.handle(LeaderRead(None), 1) == [Claim()]
    assert owner.handle(Claimed(), 1) == []
    assert owner.role is ReplicaRole.SERVING


def test_leader_recreates_znode_before_its_lost_session_ends() -> None:
    owner = owner_after(*SERVING)
    assert owner.handle(LeaderRead(MINE, is_passing=True), 1) == [Claim()]
    assert owner.handle(LeaderRead(MINE), 1) == []
    assert owner.role is ReplicaRole.SERVING


# docs/protocol.md P23
def test_anothers_znode_does_not_stop_an_unfenced_leader() -> None:
    owner = owner_after(*SERVING)
    assert owner.handle(LeaderRead(OTHERS), 1) == [Prove()], "whether it is fenced, an append will tell"
    assert owner.role is ReplicaRole.SERVING


def test_fenced_leader_follows_and_may_be_candidate_at_once() -> None:
    owner = owner_after(*SERVING)
    assert owner.handle(LeadEnded(), 5) == [GiveBack(), FollowLeader(None), WakeAt(5), ReadLeaderZnode()]
    assert owner.handle(LeaderRead(None), 5) == [PublishAndRank()]


def test_yielding_leader_sends_clients_to_successor_and_follows_it() -> None:
    owner = owner_after(*SERVING)
    assert owner.handle(Yielded(OTHER), 5) == [FollowLeader(OTHER)]
    assert owner.handle(LeaderRead(MINE), 5) == [], "its own znode stands until the successor replaces it"
    assert owner.handle(LeaderRead(OTHERS), 5) == []  # clients are sent there already
    assert (owner.role, owner.leader) == (ReplicaRole.FOLLOWING, OTHER)
    assert owner.handle(NotTaken(), 6) == []


def test_yielding_leader_claims_again_when_successor_does_not_lead() -> None:
    owner = owner_after(*SERVING, Yielded(OTHER))
    assert owner.handle(NotTaken(), 5) == [FollowLeader(None), Claim()]
    assert owner.handle(Claimed(), 5) == [OpenAsLeader()]
    assert owner.handle(Opened(), 5) == [FollowLeader(ME)]


def test_yielded_leader_joins_election_when_there_is_no_leader() -> None:
    owner = owner_after(*SERVING, Yielded(OTHER))
    assert owner.handle(LeaderRead(None), 5) == [FollowLeader(None), PublishAndRank()]


def test_successor_lets_clients_wait_while_it_takes_over() -> None:
    owner = owner_after(LeaderRead(OTHERS))
    assert owner.handle(Offered(OTHERS, 7), 5) == [FollowLeader(ME), Succeed(OTHERS, 7)]
    assert owner.handle(LeaderRead(OTHERS), 5) == [], "that is the znode that is being replaced"
    assert owner.handle(LeaderRead(LeaderRecord(OTHER, 2, "reborn")), 5) == [FollowLeader(OTHER)]


def test_successor_leads_like_any_winner() -> None:
    owner = owner_after(LeaderRead(OTHERS), Offered(OTHERS, 7))
    assert owner.handle(Claimed(), 5) == [OpenAsLeader()]
    assert owner.handle(LeaderRead(MINE), 5) == []
    assert owner.handle(Opened(), 5) == [FollowLeader(ME)]


def test_late_successor_reads_the_leader() -> None:
    owner = owner_after(LeaderRead(OTHERS), Offered(OTHERS, 7))
    assert owner.handle(NotClaimed(), 5) == [FollowLeader(None), ReadLeaderZnode()]
    assert owner.handle(LeaderRead(OTHERS), 5) == [FollowLeader(OTHER)]


def test_offer_is_ignored_by_leaders_and_stopped_replicas() -> None:
    for before in (SERVING, (*SERVING, Yielded(OTHER)), CLAIMING, (StopReplica(),)):
        assert owner_after(*before).handle(Offered(OTHERS, 7), 5) == []


def test_failed_opening_gives_lead_back_and_stays_out_longer() -> None:
    owner = owner_after()
    for out in (*OUT_S, OUT_S[-1]):
        for event in (LeaderRead(None), Ranked(0, GONE), Tick(), Claimed()):
            owner.handle(event, 1000)
        assert GiveBack() in owner.handle(OpenFailed(), 1000)
        assert owner.handle(LeaderRead(None), 1000 + out - 0.1) == [WakeAt(1000 + out)]
        assert owner.handle(LeaderRead(None), 1000 + out) == [PublishAndRank()]
        owner.handle(LeaderRead(OTHERS), 1000)
        owner._out_until = 0


def test_opening_is_abandoned_when_another_leads() -> None:
    owner = owner_after(*CLAIMING, Claimed())
    assert owner.handle(LeaderRead(OTHERS), 0) == [AbandonOpening(), FollowLeader(OTHER)]


# docs/protocol.md P40
def test_lost_leader_is_replaced_in_this_replicas_turn() -> None:
    owner = owner_after(LeaderRead(OTHERS))
    assert owner.handle(LeaderLost(OTHERS, 7), 5) == [FollowLeader(None), PublishAndRank(asks=False)]
    assert owner.handle(LeaderRead(OTHERS), 5) == [], "that is the znode that is to be replaced"
    assert owner.handle(Ranked(1, GONE), 5) == [WakeAt(5 + RANK_DELAY_S)]
    assert owner.handle(Tick(), 5 + RANK_DELAY_S) == [Succeed(OTHERS, 7)]
    assert owner.handle(LeaderRead(OTHERS), 6) == []
    assert owner.handle(Claimed(), 6) == [OpenAsLeader()]


def test_lost_leader_stays_when_its_znode_has_changed() -> None:
    reborn = LeaderRecord(OTHER, 2, "reborn")
    assert owner_after(LeaderRead(reborn)).handle(LeaderLost(OTHERS, 7), 5) == []
    owner = owner_after(LeaderRead(OTHERS), LeaderLost(OTHERS, 7))
    assert owner.handle(LeaderRead(reborn), 5) == [FollowLeader(OTHER)]
    assert owner.handle(Tick(), 99) == []


@pytest.mark.parametrize("before", [SERVING, CLAIMING, (StopReplica(),), (LeaderRead(OTHERS), Barred(True))])
def test_lost_leader_is_not_replaced_by_a_replica_that_cannot_lead(before: tuple[Event, ...]) -> None:
    assert owner_after(*before).handle(LeaderLost(OTHERS, 7), 5) == []


# docs/protocol.md P40
def test_deposing_leader_is_replaced_only_after_confirmation() -> None:
    refused, confirmed = LeaderLost(OTHERS, 7, is_confirmed=False), LeaderLost(OTHERS, 7)
    owner = owner_after(*SERVING, LeaderRead(OTHERS), LeadEnded(True), LeaderRead(OTHERS), LeaderRead(OTHERS))
    owner._out_until = 0
    assert owner.handle(refused, 5) == []
    assert owner.handle(confirmed, 5) == [FollowLeader(None), PublishAndRank(asks=False)]


# docs/protocol.md P40
@pytest.mark.parametrize("before", [(), (*SERVING, LeadEnded(True), LeaderRead(None)), (*SERVING, Yielded(OTHER))])
def test_leader_that_deposed_another_is_replaced_after_a_refusal(before: tuple[Event, ...]) -> None:
    owner = owner_after(*before, LeaderRead(OTHERS))
    owner._out_until = 0
    assert owner.handle(LeaderLost(OTHERS, 7, is_confirmed=False), 5) == [
        FollowLeader(None),
        PublishAndRank(asks=False),
    ]


# docs/protocol.md P41
def test_lost_leader_is_followed_again_by_an_unfit_replica() -> None:
    owner = owner_after(LeaderRead(OTHERS), LeaderLost(OTHERS, 7))
    assert owner.handle(Ranked(0, GONE, is_fit=False), 5) == [ReadLeaderZnode()]
    assert owner.handle(LeaderRead(OTHERS), 5) == [FollowLeader(OTHER)]


# docs/protocol.md P41
def test_unfit_candidate_claims_only_after_a_while_without_leader() -> None:
    owner = owner_after(LeaderRead(None))
    now = 0.0
    while True:
        (wake,) = owner.handle(Ranked(0, GONE, is_fit=False), now)
        assert isinstance(wake, WakeAt)
        now = wake.at
        if owner.handle(Tick(), now) == [Claim()]:
            break
    assert UNFIT_GRACE_S <= now <= UNFIT_GRACE_S + ASK_AGAIN_S


# docs/protocol.md P41
def test_failed_leader_stays_out_longer_until_a_lead_has_lasted() -> None:
    owner = owner_after()
    for out in OUT_S[:3]:
        for event in (LeaderRead(None), Ranked(0, GONE), Tick(), Claimed(), Opened()):
            owner.handle(event, 1000)
        assert WakeAt(1001 + out) in owner.handle(LeadEnded(has_failed=True), 1001)
        assert owner.handle(LeaderRead(None), 1001) == [WakeAt(1001 + out)]
        owner._out_until = 0
    for event in (LeaderRead(None), Ranked(0, GONE), Tick(), Claimed(), Opened()):
        owner.handle(event, 2000)
    late = 2000 + SETTLED_S
    assert WakeAt(late + OUT_S[0]) in owner.handle(LeadEnded(has_failed=True), late)


def test_znode_of_this_servers_former_process_is_removed() -> None:
    former = LeaderRecord(ME, 1, "former")
    assert owner_after().handle(LeaderRead(former), 0) == [RemoveStale(former)]


def test_own_znode_is_given_back_when_not_leading() -> None:
    assert owner_after().handle(LeaderRead(MINE), 0) == [GiveBack()]
    assert owner_after(LeaderRead(OTHERS)).handle(Claimed(), 0) == [GiveBack()]


def test_stopped_replica_does_nothing() -> None:
    owner = owner_after(*SERVING)
    assert owner.handle(StopReplica(), 0) == [GiveBack()]
    assert owner.handle(LeaderRead(None), 0) == []


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
    owner = RoleMachine(ME, "mine")
    for now, event in enumerate(events):
        owner.handle(event, float(now))
        owner.check()
    owner.handle(NotClaimed(), 9_000.0)  # every claim is answered
    seen: list[Command] = []
    for late in range(4):
        now = 10_000.0 + late * 100
        seen += owner.handle(LeaderRead(None), now)
        seen += owner.handle(Ranked(0, GONE), now)
        claims = owner.handle(Tick(), now + 10)
        seen += claims
        if Succeed(OTHERS, 3) in claims:  # of a znode that is gone by now
            owner.handle(NotClaimed(), now + 10)
    assert Claim() in seen


# docs/protocol.md P35
@pytest.mark.parametrize("events", [(), (LeaderRead(None),), CLAIMING, (*CLAIMING, Claimed()), SERVING])
def test_barred_replica_neither_leads_nor_runs(events: tuple[Event, ...]) -> None:
    owner = owner_after(*events)
    was = owner.role
    commands = owner.handle(Barred(True), 5)
    assert (EndLead() in commands) is (was is ReplicaRole.SERVING)
    assert (GiveBack() in commands) is (was in (ReplicaRole.SERVING, ReplicaRole.OPENING))
    for event in (LeaderRead(None), Tick(), Ranked(0, GONE), Offered(OTHERS, 1), Opened(), LeaderRead(None)):
        commands = owner.handle(event, 6)
        owner.check()
        assert not {Claim, OpenAsLeader, PublishAndRank} & {type(command) for command in commands}
    assert owner.handle(Claimed(), 6) == [GiveBack()], "a claim that was under way"
    assert owner.handle(Barred(False), 7) == [ReadLeaderZnode()]
    assert PublishAndRank() in owner.handle(LeaderRead(None), 1_000)


# docs/protocol.md P29
@pytest.mark.parametrize("events", [(), (LeaderRead(None),)])
def test_replica_with_a_doubtful_clock_does_not_run(events: tuple[Event, ...]) -> None:
    owner = owner_after(*events)
    assert owner.handle(Dated(False), 5) == []
    for event in (LeaderRead(None), Tick(), Ranked(0, GONE), Offered(OTHERS, 1), LeaderRead(None)):
        commands = owner.handle(event, 6)
        assert not {Claim, OpenAsLeader, PublishAndRank, Succeed} & {type(command) for command in commands}
    assert owner.handle(Dated(True), 7) == [ReadLeaderZnode()]
    assert PublishAndRank() in owner.handle(LeaderRead(None), 1_000)


# docs/protocol.md P29
def test_lead_is_not_taken_back_with_a_doubtful_clock() -> None:
    owner = owner_after(*SERVING, Dated(False), Yielded(OTHER))
    assert GiveBack() in owner.handle(NotTaken(), 6)
    assert owner.role is ReplicaRole.FOLLOWING
