"""How far the log may be trimmed."""

from kvstore.partition.retention import FORGET_S, Retention
from kvstore.types import Seq, ServerId

A, B, C = ServerId("a"), ServerId("b"), ServerId("c")
ALL = (A, B, C)


def seen(now: float = 0.0, **durable: int) -> Retention:
    retention = Retention(0.0)
    retention.observe({ServerId(name): Seq(seq) for name, seq in durable.items()}, now)
    return retention


def test_the_slowest_replica_holds_the_log() -> None:
    assert seen(a=9, b=5, c=7).floor(ALL, 2, 0) == 5


def test_a_replica_that_was_never_seen_holds_all_of_it() -> None:
    assert seen(a=9, b=5).floor(ALL, 2, 0) == 0


def test_a_replica_that_is_away_counts_with_what_it_had() -> None:
    retention = seen(a=9, b=5, c=7)
    retention.observe({A: Seq(20), B: Seq(20)}, 100)
    assert retention.floor(ALL, 2, 100) == 7


def test_after_a_day_it_no_longer_counts_if_two_others_are_past_it() -> None:
    retention = seen(a=9, b=5, c=7)
    late = FORGET_S + 1
    retention.observe({A: Seq(20), B: Seq(30)}, late)
    assert retention.floor(ALL, 2, late) == 20


def test_but_it_still_counts_if_only_one_other_is_past_it() -> None:
    retention = seen(a=9, b=5, c=5)
    late = FORGET_S + 1
    retention.observe({A: Seq(20)}, late)
    assert retention.floor(ALL, 2, late) == 5


def test_a_wiped_replica_holds_the_log_again_from_the_start() -> None:
    retention = seen(a=9, b=5, c=7)
    retention.observe({B: Seq(0)}, 1)
    assert retention.floor(ALL, 2, 1) == 0


def test_fewer_replicas_than_copies_wanted_hold_everything() -> None:
    assert seen(a=9).floor((A,), 2, 0) == 0
    assert seen(a=9).floor((A,), 1, 0) == 9
