"""The way to the lead and back, rule by rule."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.partition.election import INCUMBENT_GRACE_S, OUT_S, RANK_DELAY_S, YIELD_OUT_S, LeaderRecord
from kvstore.partition.owner import (
    AbandonOpening,
    Claim,
    Claimed,
    Command,
    Ended,
    Event,
    Follow,
    GiveBack,
    LeaderRead,
    NotClaimed,
    Opened,
    OpenFailed,
    OpenLog,
    Owner,
    PeerGone,
    PublishAndRank,
    Ranked,
    ReadLeader,
    RemoveStale,
    Role,
    Stop,
    Tick,
    WakeAt,
    Yielded,
)
from kvstore.types import ServerId

ME, OTHER = ServerId("me"), ServerId("other")
OTHERS = LeaderRecord(OTHER, 1, "theirs")
MINE = LeaderRecord(ME, 1, "mine")


def owner_after(*events: Event, now: float = 0.0) -> Owner:
    owner = Owner(ME, "mine")
    for event in events:
        owner.handle(event, now)
        owner.check()
    return owner


CLAIMING = (LeaderRead(None), Ranked(0, False), Tick())
SERVING = (*CLAIMING, Claimed(), Opened())


def test_without_a_leader_a_replica_publishes_and_ranks_itself() -> None:
    assert owner_after().handle(LeaderRead(None), 0) == [PublishAndRank()]


def test_it_waits_its_rank_and_then_claims() -> None:
    owner = owner_after(LeaderRead(None))
    assert owner.handle(Ranked(2, False), 10) == [WakeAt(10 + 2 * RANK_DELAY_S)]
    assert owner.handle(Tick(), 10 + 2 * RANK_DELAY_S) == [Claim()]


def test_a_timer_that_comes_a_little_early_is_set_again() -> None:
    owner = owner_after(LeaderRead(None), Ranked(2, False))
    at = 2 * RANK_DELAY_S
    assert owner.handle(Tick(), at - 1e-6) == [WakeAt(at)]
    assert owner.handle(Tick(), at) == [Claim()]


def test_it_stands_no_more_once_another_leads() -> None:
    owner = owner_after(LeaderRead(None), Ranked(2, False))
    assert owner.handle(LeaderRead(OTHERS), 0.1) == [Follow(OTHER)]
    assert owner.handle(Tick(), 99) == []


def test_an_incumbent_that_still_serves_gets_its_grace_once() -> None:
    owner = owner_after(LeaderRead(None))
    assert owner.handle(Ranked(0, True), 0) == [WakeAt(INCUMBENT_GRACE_S)]
    assert owner.handle(Tick(), INCUMBENT_GRACE_S) == [Claim()]
    owner.handle(NotClaimed(), 4)
    owner.handle(LeaderRead(None), 4)
    assert owner.handle(Ranked(0, True), 5) == [WakeAt(5)]


def test_the_winner_opens_the_log_and_leads_only_when_it_is_open() -> None:
    owner = owner_after(*CLAIMING)
    assert owner.handle(Claimed(), 0) == [OpenLog()]
    assert owner.leader is None
    assert owner.handle(Opened(), 0) == [Follow(ME)]
    assert owner.role is Role.SERVING


def test_the_loser_reads_who_won() -> None:
    assert owner_after(*CLAIMING).handle(NotClaimed(), 0) == [ReadLeader()]


def test_a_leader_whose_znode_is_gone_claims_it_again_and_goes_on() -> None:
    owner = owner_after(*SERVING)
    assert owner.handle(LeaderRead(None), 1) == [Claim()]
    assert owner.handle(Claimed(), 1) == []
    assert owner.role is Role.SERVING


def test_anothers_znode_does_not_stop_a_leader_that_is_not_fenced() -> None:
    owner = owner_after(*SERVING)
    assert owner.handle(LeaderRead(OTHERS), 1) == []
    assert owner.role is Role.SERVING


def test_a_fenced_leader_follows_and_may_stand_again_at_once() -> None:
    owner = owner_after(*SERVING)
    assert owner.handle(Ended(), 5) == [GiveBack(), Follow(None), WakeAt(5), ReadLeader()]
    assert owner.handle(LeaderRead(None), 5) == [PublishAndRank()]


def test_one_that_yields_leaves_the_lead_to_the_others_for_a_while() -> None:
    owner = owner_after(*SERVING)
    until = 5 + YIELD_OUT_S
    assert owner.handle(Yielded(), 5) == [GiveBack(), Follow(None), WakeAt(until), ReadLeader()]
    assert owner.handle(LeaderRead(None), 5) == [WakeAt(until)]
    assert owner.handle(LeaderRead(None), until) == [PublishAndRank()]


def test_one_that_cannot_open_the_log_gives_the_lead_back_and_stays_out_longer_each_time() -> None:
    owner = owner_after()
    for out in (*OUT_S, OUT_S[-1]):
        for event in (LeaderRead(None), Ranked(0, False), Tick(), Claimed()):
            owner.handle(event, 1000)
        assert GiveBack() in owner.handle(OpenFailed(), 1000)
        assert owner.handle(LeaderRead(None), 1000 + out - 0.1) == [WakeAt(1000 + out)]
        assert owner.handle(LeaderRead(None), 1000 + out) == [PublishAndRank()]
        owner.handle(LeaderRead(OTHERS), 1000)
        owner._out_until = 0


def test_an_opening_is_abandoned_when_another_leads() -> None:
    owner = owner_after(*CLAIMING, Claimed())
    assert owner.handle(LeaderRead(OTHERS), 0) == [AbandonOpening(), Follow(OTHER)]


def test_the_znode_of_a_process_that_is_gone_is_removed_but_not_that_of_its_successor() -> None:
    owner = owner_after(LeaderRead(OTHERS))
    assert owner.handle(PeerGone(OTHER), 0) == [Follow(None), ReadLeader()]
    assert owner.handle(LeaderRead(OTHERS), 0) == [RemoveStale(OTHERS), ReadLeader()]
    reborn = LeaderRecord(OTHER, 2, "reborn")
    assert owner.handle(LeaderRead(reborn), 0) == [Follow(OTHER)]


def test_the_znode_of_this_servers_former_process_is_removed() -> None:
    former = LeaderRecord(ME, 1, "former")
    assert owner_after().handle(LeaderRead(former), 0) == [RemoveStale(former), ReadLeader()]


def test_ones_own_znode_is_given_back_if_one_does_not_lead() -> None:
    assert owner_after().handle(LeaderRead(MINE), 0) == [GiveBack()]
    assert owner_after(LeaderRead(OTHERS)).handle(Claimed(), 0) == [GiveBack()]


def test_a_stopped_replica_does_nothing_more() -> None:
    owner = owner_after(*SERVING)
    assert owner.handle(Stop(), 0) == [GiveBack()]
    assert owner.handle(LeaderRead(None), 0) == []


EVENTS = st.sampled_from(
    [
        LeaderRead(None),
        LeaderRead(OTHERS),
        LeaderRead(MINE),
        Ranked(0, False),
        Ranked(1, True),
        PeerGone(OTHER),
        Claimed(),
        NotClaimed(),
        Opened(),
        OpenFailed(),
        Ended(),
        Yielded(),
        Tick(),
    ]
)


@given(st.lists(EVENTS, max_size=40))
def test_whatever_happens_a_replica_without_a_leader_is_never_left_without_a_next_step(events: list[Event]) -> None:
    owner = Owner(ME, "mine")
    for now, event in enumerate(events):
        owner.handle(event, float(now))
        owner.check()
    seen: list[Command] = []
    for late in range(4):
        now = 10_000.0 + late * 100
        seen += owner.handle(LeaderRead(None), now)
        seen += owner.handle(Ranked(0, False), now)
        seen += owner.handle(Tick(), now + 10)
    assert Claim() in seen
