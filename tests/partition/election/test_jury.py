"""Which replica is right if replicas differ, over every case of up to five replicas (docs/protocol.md, P35)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

from kvstore.partition.election.jury import PATIENCE_S, Investigation, StateVerdict, Trusted, is_copy_confirmed, judge
from kvstore.types import Seq, ServerId

SINCE = Seq(100)
MINDS = (1, 2, 3)


def names(count: int) -> list[ServerId]:
    return [ServerId(f"n{number + 1}") for number in range(count)]


def cases() -> Iterator[tuple[list[ServerId], dict[ServerId, int], set[ServerId]]]:
    """Yield the replicas, what each has, and which of them have reported."""
    for count in range(1, 6):
        replicas = names(count)
        for minds in product(MINDS, repeat=count):
            has = dict(zip(replicas, minds, strict=True))
            for bits in product((True, False), repeat=count):
                yield replicas, has, {server for server, is_heard in zip(replicas, bits, strict=True) if is_heard}


def verdict_on(me: ServerId, replicas: list[ServerId], has: dict[ServerId, int], heard: set[ServerId]) -> StateVerdict:
    checks = {server: {SINCE: has[server]} if server in heard or server == me else {} for server in replicas}
    return judge(me, SINCE, replicas, checks)


def test_two_different_states_are_never_both_right() -> None:
    right: dict[tuple[int, tuple[int, ...]], set[int]] = {}
    for replicas, has, heard in cases():
        for me in replicas:
            if verdict_on(me, replicas, has, heard) is StateVerdict.RIGHT:
                right.setdefault((len(replicas), tuple(has.values())), set()).add(has[me])
    assert right
    assert all(len(minds) == 1 for minds in right.values())


def test_replica_is_outvoted_only_by_a_majority_with_one_other_state() -> None:
    for replicas, has, heard in cases():
        for me in replicas:
            if verdict_on(me, replicas, has, heard) is StateVerdict.OUTVOTED:
                minds = [has[server] for server in replicas if server in heard and has[server] != has[me]]
                assert max(map(minds.count, minds)) >= max(2, len(replicas) // 2 + 1)


def test_verdict_is_never_open_when_all_have_reported() -> None:
    for replicas, has, heard in cases():
        if len(heard) == len(replicas):
            assert StateVerdict.OPEN not in {verdict_on(me, replicas, has, heard) for me in replicas}


def test_single_replica_is_never_right() -> None:
    for count in (1, 2):
        has = dict(zip(names(count), MINDS, strict=False))
        for me in names(count):
            assert verdict_on(me, names(count), has, set(names(count))) is StateVerdict.SPLIT


def test_checks_before_the_difference_prove_nothing() -> None:
    a, b, c = replicas = names(3)
    before = Seq(90)
    checks = {a: {before: 7, SINCE: 1}, b: {before: 7, SINCE: 2}, c: {before: 7}}
    assert judge(a, SINCE, replicas, checks) is StateVerdict.OPEN


def test_later_checks_decide_like_the_first() -> None:
    a, b, c = replicas = names(3)
    checks = {a: {SINCE: 1, Seq(120): 11}, b: {Seq(120): 22}, c: {SINCE: 2, Seq(120): 22, Seq(140): 33}}
    assert [judge(each, SINCE, replicas, checks) for each in replicas] == [
        StateVerdict.OUTVOTED, StateVerdict.RIGHT, StateVerdict.RIGHT,
    ]  # fmt: skip


def test_operators_declaration_counts_for_this_difference_only() -> None:
    a, b = replicas = names(2)
    checks = {a: {SINCE: 1}, b: {SINCE: 2}}
    trusted = Trusted(b, SINCE, 2)
    assert [judge(each, SINCE, replicas, checks, trusted) for each in replicas] == [
        StateVerdict.OUTVOTED,
        StateVerdict.RIGHT,
    ]
    later = Seq(SINCE + 1)
    again = {a: {later: 1}, b: {later: 2}}
    assert judge(a, later, replicas, again, trusted) is StateVerdict.SPLIT
    had_it = {a: {SINCE: 2, later: 1}, b: {SINCE: 2, later: 2}}
    assert judge(a, later, replicas, had_it, trusted) is StateVerdict.SPLIT, "both had what was declared"


def test_replica_is_barred_at_once_for_own_doubt_and_later_for_anothers() -> None:
    mine, others = Investigation(), Investigation()
    mine.doubt(SINCE, 5.0)
    others.note_report(SINCE, 5.0)
    assert (mine.is_barred, others.is_barred) == (True, False)
    others.decide(StateVerdict.OPEN, 5.0 + PATIENCE_S / 2, differs=False, has_met=True)
    assert not others.is_barred
    others.decide(StateVerdict.OPEN, 5.0 + PATIENCE_S, differs=False, has_met=True)
    assert others.is_barred, "it may be the damaged one, and no one can tell"
    for trial in (mine, others):
        trial.decide(StateVerdict.RIGHT, 20.0, differs=trial is mine, has_met=True)
        trial.check()
        assert (trial.is_barred, trial.since) == (False, 0)


# docs/protocol.md P35
def test_replica_before_the_differing_check_is_not_barred_by_a_report() -> None:
    """Regression: both replicas that could read the log to its end were barred. No replica ever read the check of
    the difference (seed 30 with another order of messages), and the partition had no leader until an operator
    intervened."""
    trial = Investigation()
    trial.note_report(SINCE, 5.0)
    trial.decide(StateVerdict.OPEN, 100.0, differs=False, has_met=False)
    assert not trial.is_barred
    trial.decide(StateVerdict.OPEN, 100.0, differs=False, has_met=True)
    assert trial.is_barred
    trial.resume(SINCE, 110.0, is_barred=True)
    trial.decide(StateVerdict.OPEN, 111.0, differs=False, has_met=False)
    assert not trial.is_barred, "also if it was barred before a restart"
    trial.decide(StateVerdict.OPEN, 112.0, differs=True, has_met=False)
    assert trial.is_barred


def test_no_replica_leads_without_a_majority() -> None:
    trial = Investigation()
    trial.note_report(SINCE, 5.0)
    trial.decide(StateVerdict.SPLIT, 5.0, differs=False, has_met=True)
    assert trial.is_barred


def test_restart_keeps_bars() -> None:
    """For any history before the restart. A replica that differs from its log stores that in another row."""
    events: list[Callable[[Investigation], None]] = [
        lambda trial: trial.note_report(SINCE, 5.0),
        lambda trial: trial.note_report(Seq(SINCE + 1), 20.0),
        *(partial(_decide, verdict=verdict, now=now) for verdict in StateVerdict for now in (5.0, 40.0)),
    ]
    for length in range(1, 5):
        for chosen in product(events, repeat=length):
            trial = Investigation()
            for event in chosen:
                event(trial)
            again = Investigation()
            again.resume(trial.since, 50.0, is_barred=trial.is_barred)
            again.check()
            assert (again.since, again.is_barred) == (trial.since, trial.is_barred)


def _decide(trial: Investigation, verdict: StateVerdict, now: float) -> None:
    if trial.since:
        trial.decide(verdict, now, differs=False, has_met=True)


def test_copy_and_donor_count_once_until_all_have_agreed() -> None:
    a, b, c = replicas = names(3)
    before, origins = Seq(90), {b: frozenset({a})}
    checks = {a: {SINCE: 1}, b: {SINCE: 1}, c: {before: 7, SINCE: 2}}
    assert {judge(each, SINCE, replicas, checks, None, origins) for each in replicas} == {StateVerdict.SPLIT}
    checks = {server: {before: 7, **had} for server, had in checks.items()}
    verdicts = [judge(each, SINCE, replicas, checks, None, origins) for each in replicas]
    assert verdicts == [StateVerdict.RIGHT, StateVerdict.RIGHT, StateVerdict.OUTVOTED]


def test_copies_of_a_trusted_replica_are_not_in_doubt() -> None:
    """One of them, just replaced, may receive the other's report right before that one is replaced too."""
    a, b, c = replicas = (ServerId("a"), ServerId("b"), ServerId("c"))
    origins = {b: frozenset({a}), c: frozenset({a})}
    checks: dict[ServerId, dict[Seq, int]] = {a: {SINCE: 7}, b: {SINCE: 7}, c: {SINCE: 8}}
    assert judge(b, SINCE, replicas, checks, None, origins) is StateVerdict.SPLIT
    checks[c] = {SINCE: 7}
    assert {judge(each, SINCE, replicas, checks, None, origins) for each in replicas} == {StateVerdict.RIGHT}


def test_copy_is_confirmed_only_by_a_replica_of_another_origin() -> None:
    a, b, c = replicas = names(3)
    checks = {each: {SINCE: 1} for each in replicas}
    assert is_copy_confirmed(b, replicas, checks, {b: frozenset({a})})
    assert not is_copy_confirmed(b, replicas, checks, {b: frozenset({a}), c: frozenset({a})})
    assert not is_copy_confirmed(b, replicas, checks | {c: {}}, {b: frozenset({a})})
    assert not is_copy_confirmed(b, replicas, checks | {a: {SINCE: 2}}, {b: frozenset({a})})


def test_copies_through_one_replica_count_once() -> None:
    a, b, c, d, e = replicas = names(5)
    checks = {each: {SINCE: 1 if each in (a, b, c) else 2} for each in replicas}
    assert judge(e, SINCE, replicas, checks) is StateVerdict.OUTVOTED
    through_d = {b: frozenset({d, a}), c: frozenset({d, a})}
    assert judge(e, SINCE, replicas, checks, None, through_d) is StateVerdict.SPLIT
    donor_borne_out_since = {b: frozenset({a, d}), c: frozenset({b, a, d})}
    assert judge(e, SINCE, replicas, checks, None, donor_borne_out_since) is StateVerdict.SPLIT
