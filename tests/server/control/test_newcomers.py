"""Newcomers that get no further, and servers that are chosen last."""

from __future__ import annotations

from kvstore.server.control.newcomers import NOTHING, REST_S, RESTS_S_MAX, STUCK_S, Newcomers, Stand
from kvstore.types import PartitionId, ServerId

PAIR = PartitionId("p1"), ServerId("n4")


# docs/protocol.md H6
def test_a_newcomer_is_stuck_once_it_has_got_no_further_for_long() -> None:
    newcomers = Newcomers()
    for at, stand in enumerate((NOTHING, Stand(0), Stand(0, 5), Stand(0, 9), Stand(7), Stand(8))):
        newcomers.note({PAIR: stand}, at * (STUCK_S - 1))
        assert not newcomers.stuck(at * (STUCK_S - 1)), "each of these is further than the one before"
    since = 5 * (STUCK_S - 1)
    newcomers.note({PAIR: Stand(8)}, since + STUCK_S - 1)
    assert not newcomers.stuck(since + STUCK_S - 1)
    newcomers.note({PAIR: Stand(0)}, since + STUCK_S)
    assert newcomers.stuck(since + STUCK_S) == {PAIR}, "to begin anew is not to get further"


def test_one_that_cannot_be_judged_in_between_begins_anew() -> None:
    for forget in (lambda newcomers: newcomers.forget(), lambda newcomers: newcomers.note({}, STUCK_S - 1)):
        newcomers = Newcomers()
        newcomers.note({PAIR: NOTHING}, 0)
        forget(newcomers)
        newcomers.note({PAIR: NOTHING}, STUCK_S)
        assert not newcomers.stuck(STUCK_S)


def test_a_server_rests_twice_as_long_each_time_until_one_of_its_newcomers_takes_its_place() -> None:
    newcomers, server = Newcomers(), PAIR[1]
    for rest_s in (REST_S, 2 * REST_S, 4 * REST_S, 8 * REST_S, 16 * REST_S, RESTS_S_MAX, RESTS_S_MAX):
        newcomers.given_up(server, 0)
        assert newcomers.resting(rest_s - 1) == {server}
        assert not newcomers.resting(rest_s)
    newcomers.caught_up(server)
    assert not newcomers.resting(0)
