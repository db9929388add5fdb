"""Which bookies count as lost (docs/protocol.md, A5, A6)."""

from kvstore.autorecovery.absences import BookieAbsences
from kvstore.types import BookieId

B1, B2, B3 = BookieId("b1-1"), BookieId("b2-1"), BookieId("b3-1")
ALL = (B1, B2, B3)


def test_bookie_is_lost_after_the_delay() -> None:
    absences = BookieAbsences()
    absences.seen(ALL, ALL, 0.0)
    assert absences.lost(60, 0.0) == frozenset()
    absences.seen(ALL, (B1, B2), 10.0)
    assert absences.next_in_s(60, 30.0) == 40.0
    assert absences.lost(60, 69.9) == frozenset()
    assert absences.lost(60, 70.0) == {B3}
    assert absences.next_in_s(60, 70.0) is None


def test_returning_bookie_gets_the_full_delay_again() -> None:
    absences = BookieAbsences()
    absences.seen(ALL, (B1, B2), 0.0)
    absences.seen(ALL, ALL, 59.0)
    absences.seen(ALL, (B1, B2), 59.5)
    assert absences.lost(60, 119.0) == frozenset()
    assert absences.lost(60, 119.5) == {B3}


def test_several_absent_bookies_wait_as_long_as_one() -> None:
    absences = BookieAbsences()
    absences.seen(ALL, (B1, B2), 0.0)
    absences.seen(ALL, (B1,), 30.0)
    assert absences.lost(60, 59.0) == frozenset()
    assert absences.lost(60, 60.0) == {B3}
    assert absences.lost(60, 90.0) == {B2, B3}


def test_bookie_never_seen_is_known_by_cookie_or_ensemble() -> None:
    absences = BookieAbsences()
    absences.seen({B1, B2}, (B1,), 0.0)
    assert absences.lost(0, 0.0) == {B2}
    absences.seen({B1}, (B1,), 1.0)
    assert absences.lost(0, 1.0) == frozenset(), "nothing names it any more"


def test_no_bookie_is_lost_while_none_is_registered() -> None:
    absences = BookieAbsences()
    absences.seen(ALL, (), 0.0)
    absences.seen(ALL, (), 30.0)
    absences.seen(ALL, (), 60.0)
    assert absences.lost(60, 60.0) == frozenset()
    absences.seen(ALL, (B1,), 61.0)
    assert absences.lost(60, 61.0) == {B2, B3}


def test_absences_do_not_count_across_a_gap_without_views() -> None:
    absences = BookieAbsences()
    absences.seen(ALL, (B1,), 100.0)
    absences.seen(ALL, (B1,), 130.5)
    assert absences.lost(60, 190.0) == frozenset()
    assert absences.lost(60, 190.5) == {B2, B3}


def test_forgotten_absences_start_again() -> None:
    absences = BookieAbsences()
    absences.seen(ALL, (B1,), 0.0)
    absences.forget()
    absences.seen(ALL, (B1,), 59.0)
    assert absences.lost(60, 118.0) == frozenset()
    assert absences.lost(60, 119.0) == {B2, B3}
