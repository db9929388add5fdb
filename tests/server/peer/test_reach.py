"""A server reports which other servers it cannot reach."""

from kvstore.server.peer.reach import CHECK_S, STALLED_S, Reach
from kvstore.types import ServerId

A, B = ServerId("a"), ServerId("b")


def checking(reach: Reach, begin: float, end: float) -> None:
    """Call `check` as often as it is due."""
    for step in range(1, round((end - begin) / CHECK_S) + 1):
        reach.check(begin + step * CHECK_S)


def test_silence_counts_from_the_last_byte() -> None:
    reach = Reach()
    assert reach.silent_s(A, 10.0) is None
    assert reach.lost(A, received_at=7.0, now=10.0)
    assert reach.silent_s(A, 10.5) == 3.5
    assert not reach.lost(A, received_at=10.4, now=10.5), "a failed attempt begins no new count"
    assert reach.silent_s(A, 10.5) == 3.5


def test_silence_ends_when_a_link_opens() -> None:
    reach = Reach()
    reach.lost(A, 7.0, 10.0)
    reach.received(A)
    assert reach.silent_s(A, 11.0) is None
    assert reach.check(11.0) == []


# docs/protocol.md P40
def test_silence_restarts_after_a_pause() -> None:
    reach = Reach()
    reach.lost(A, 0.0, 0.0)
    checking(reach, 0.0, 4.0)
    assert reach.silent_s(A, 4.0) == 4.0
    late = 4.0 + STALLED_S + 0.1
    assert reach.silent_s(A, late) is None, "no check has run for too long"
    assert reach.check(late) == [A]
    assert reach.silent_s(A, late + 0.2) is not None
    assert (reach.silent_s(A, late + 0.2) or 0.0) < 1.0


# docs/protocol.md P40
def test_loss_noticed_after_a_pause_counts_from_then() -> None:
    reach = Reach()
    reach.lost(A, 0.0, 0.0)
    reach.lost(B, received_at=0.5, now=9.0)
    assert reach.check(9.0) == [A, B]
    assert reach.silent_s(B, 9.2) is not None
    assert (reach.silent_s(B, 9.2) or 0.0) < 1.0


def test_look_is_due_again_after_rest() -> None:
    reach = Reach()
    assert reach.lost(A, 0.0, 0.0)
    reach.forget(A)
    assert reach.check(0.5) == []
    reach.pause()
    assert reach.lost(A, 9.0, 9.0)
    assert reach.silent_s(A, 9.5) == 0.5
