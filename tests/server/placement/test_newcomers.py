"""Newcomers without progress, and servers that are chosen last because of them."""

from __future__ import annotations

from kvstore.server.placement.newcomers import NOTHING, PAUSE_S, PAUSE_S_MAX, QUIET_S, STUCK_S, Newcomers, Progress
from kvstore.types import PartitionId, Seq, ServerId

PAIR = PartitionId("p1"), ServerId("n4")


def taking(*taken: int) -> Progress:
    """Return the state of a newcomer that does not wait for the log."""
    return Progress((taken[0], taken[1]), None)


# docs/protocol.md H6
def test_newcomer_is_stuck_after_a_long_time_without_progress() -> None:
    newcomers = Newcomers()
    for at, stand in enumerate((NOTHING, *(taking(*taken) for taken in ((0, 0), (0, 5), (0, 9), (3, 0), (3, 1))))):
        newcomers.note({PAIR: stand}, at * (STUCK_S - 1))
        assert not newcomers.stuck(at * (STUCK_S - 1)), "each of these is further than the one before"
    since = 5 * (STUCK_S - 1)
    newcomers.note({PAIR: taking(3, 1)}, since + STUCK_S - 1)
    assert not newcomers.stuck(since + STUCK_S - 1)
    newcomers.note({PAIR: taking(0, 99)}, since + STUCK_S)
    assert newcomers.stuck(since + STUCK_S) == {PAIR}, "to begin anew is not to get further"


def test_following_newcomer_is_judged_only_while_others_progress() -> None:
    """Without bookies no newcomer makes progress."""
    newcomers, now, others = Newcomers(), 0.0, Seq(9_000)
    for _ in range(20):
        newcomers.note({PAIR: Progress((3, 7), others)}, now)
        assert not newcomers.stuck(now)
        now += STUCK_S / 10
    while now < 2 * STUCK_S + 0.5 * STUCK_S:
        others, now = Seq(others + 1), now + QUIET_S / 2
        newcomers.note({PAIR: Progress((3, 7), others)}, now)
        assert not newcomers.stuck(now), "the log is read for less than the time"
    for _ in range(int(STUCK_S / QUIET_S) + 1):
        others, now = Seq(others + 1), now + QUIET_S / 2
        newcomers.note({PAIR: Progress((3, 7), others)}, now)
    assert newcomers.stuck(now) == {PAIR}


def test_newcomer_that_was_unjudgeable_starts_again() -> None:
    for forget in (lambda newcomers: newcomers.forget(), lambda newcomers: newcomers.note({}, STUCK_S - 1)):
        newcomers = Newcomers()
        newcomers.note({PAIR: NOTHING}, 0)
        forget(newcomers)
        newcomers.note({PAIR: NOTHING}, STUCK_S)
        assert not newcomers.stuck(STUCK_S)


def test_server_rests_twice_as_long_until_a_newcomer_succeeds() -> None:
    newcomers, server = Newcomers(), PAIR[1]
    for rest_s in (PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S, 8 * PAUSE_S, 16 * PAUSE_S, PAUSE_S_MAX, PAUSE_S_MAX):
        newcomers.given_up(server, 0)
        assert newcomers.resting(rest_s - 1) == {server}
        assert not newcomers.resting(rest_s)
    newcomers.caught_up(server)
    assert not newcomers.resting(0)
