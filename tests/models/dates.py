"""A model of the dates by which three servers lead one partition, while wall clocks jump, processes start again, a
monotonic clock misses a suspension, and servers are cut off: rules P28 to P30 of docs/protocol.md, each a rule that can
be taken away.

All dates are offsets from the true time, which goes in steps of one; bounds are 0, and a jump is JUMP. One key has a
time to live of TTL, and one pin a deadline of as much, both granted at a moment that the search chooses.

Promised: neither goes before its time, and the key is not shown after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.models.search import Broken

SERVERS = range(3)
MAJORITY = 2
JUMP, TTL, TIME_MAX = 10, 1, 2


@dataclass(frozen=True)
class Rules:
    """What is done right; False takes the rule away."""

    monotonic_since: bool = True
    """P28: the date goes on with the monotonic clock, whatever the wall clock says meanwhile."""
    majority_bears_out: bool = True
    """P28: another date is taken over where a majority has it, not one server."""
    start_is_borne_out: bool = True
    """P28: the first date of a process is too, unless it is alone."""
    doubtful_does_not_lead: bool = True
    """P29: a server whose two clocks differ does not lead while another could."""
    alone_removes_nothing: bool = True
    """P31: one whose date nobody has borne out removes nothing by it."""
    goes_on_ahead: bool = True
    """P30: record time that is ahead of the date goes on."""


class Server(NamedTuple):
    wall: int = 0
    judged: int | None = 0
    """None: this process has taken over no date."""
    is_sure: bool = True
    is_borne_out: bool = True


class State(NamedTuple):
    """All of it. The last ones bound the search."""

    servers: tuple[Server, ...] = (Server(), Server(), Server())
    now: int = 0
    is_alone: bool = False
    """The first server hears no other."""
    only: int | None = None
    """The one server that can lead the partition: the others are sure of their dates, and have no replica, or a damaged
    one."""
    leader: int | None = 0
    record: int = 0
    """Record time of the last entry, as a date."""
    recorded_at: int = 0
    """When the leader made that, or began to lead."""
    key: tuple[int, int] | None = None
    """When it was written, and its expiry."""
    pin: tuple[int, int] | None = None
    """When it was made, and its deadline."""
    is_misled: bool = False
    """A server that was alone at its start has believed its wall clock, which was wrong: what it grants is not
    promised."""
    jumps: int = 2
    starts: int = 1
    cuts: int = 1


Step = tuple[str, "State | Broken"]


class Model:
    """The steps under some rules."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def steps(self, state: State) -> Iterator[Step]:
        """Everything that may happen next."""
        if state.now < TIME_MAX:
            yield "time", state._replace(now=state.now + 1)
        if state.cuts:
            yield "the first server is alone", state._replace(is_alone=True, cuts=0)
        if state.cuts and state.leader is not None:
            yield "only the leader can lead", state._replace(only=state.leader, cuts=0)
        if state.is_alone:
            yield "it is not any more", state._replace(is_alone=False)
        for number in SERVERS:
            yield from self._accident(state, number)
            yield from self._judge(state, number)
        if state.leader is None:
            for number in SERVERS:
                if self._may_stand(state, number) and not any(self._judge(state, number)):  # it looks first
                    yield f"{number} leads", state._replace(leader=number, recorded_at=state.now)
        elif not self._may_lead(state, state.leader) and state.only is None:  # somebody takes it
            yield "stands down", state._replace(leader=None)
        else:
            yield from self._lead(state, state.leader)

    # ── clocks ──

    def _accident(self, state: State, number: int) -> Iterator[Step]:
        server = state.servers[number]
        others = [each for other, each in enumerate(state.servers) if other != number]
        is_second = any(each.wall or each.judged for each in others)  # a majority that is wrong is believed
        if state.jumps and not is_second and not server.wall and not (number == 0 and server.judged):
            for jump in {JUMP, -JUMP} - {server.judged}:  # two clocks that are wrong alike are believed by a tie
                yield f"{number} jumps", _put(state, number, server._replace(wall=jump))._replace(jumps=state.jumps - 1)
            if (
                number and server.judged == 0 and state.only != number
            ):  # not of one that leads alone: keys that it takes live by a clock that misses time
                asleep = server._replace(judged=-JUMP)
                leader = None if state.leader == number else state.leader  # for longer than a lead lasts
                yield f"{number} sleeps", _put(state, number, asleep)._replace(jumps=state.jumps - 1, leader=leader)
        if server.wall:
            yield f"{number} is set right", _put(state, number, server._replace(wall=0))
        if state.starts:
            begun = Server(server.wall, None, is_sure=False, is_borne_out=False)
            leader = None if state.leader == number else state.leader
            yield f"{number} starts", _put(state, number, begun)._replace(leader=leader, starts=state.starts - 1)

    def _heard(self, state: State, number: int) -> list[Server]:
        return [
            each
            for other, each in enumerate(state.servers)
            if other != number and not (state.is_alone and 0 in (number, other))
        ]

    def _judge(self, state: State, number: int) -> Iterator[Step]:
        server, heard = state.servers[number], self._heard(state, number)
        dates = [each.judged if each.is_sure else each.wall for each in heard]
        agree = 1 + dates.count(server.wall)
        has_majority = agree >= (MAJORITY if self.rules.majority_bears_out else 1 + bool(heard))
        if server.judged is None:
            is_alone = len(heard) + 1 < MAJORITY
            if agree >= MAJORITY:
                after = Server(server.wall, server.wall)
            elif is_alone or not self.rules.start_is_borne_out:
                after = server._replace(judged=server.wall, is_sure=True, is_borne_out=False)
            else:
                return
        else:
            apart = sum(date != server.judged for date in dates)
            if server.wall != server.judged and has_majority:
                after = Server(server.wall, server.wall)
            else:
                is_sure = server.wall == server.judged and apart < MAJORITY
                is_borne_out = server.is_borne_out or 1 + dates.count(server.judged) >= MAJORITY
                after = server._replace(is_sure=is_sure, is_borne_out=is_borne_out)
        if after != server:
            is_misled = state.is_misled or (len(heard) + 1 < MAJORITY and not server.is_sure and bool(after.judged))
            yield f"{number} judges", _put(state, number, after)._replace(is_misled=is_misled)

    def _may_lead(self, state: State, number: int) -> bool:
        server = state.servers[number]
        if server.judged is None:
            return False
        others_could = any(each.is_sure for each in self._heard(state, number))
        return server.is_sure or not others_could or not self.rules.doubtful_does_not_lead

    def _may_stand(self, state: State, number: int) -> bool:
        """Where nobody leads for long, one that is not sure does."""
        if state.only is None:
            return self._may_lead(state, number)
        return state.only == number and state.servers[number].judged is not None

    # ── leading ──

    def _lead(self, state: State, number: int) -> Iterator[Step]:
        time = self._time(state, number)
        acted = state._replace(record=time, recorded_at=state.now)
        if state.key is None:
            yield "writes", acted._replace(key=(state.now, time + TTL))
        else:
            written, expiry = state.key
            if state.is_misled:
                yield "reads", acted
            elif time >= expiry and state.now < written + TTL:
                yield "reads", Broken(f"gone at {state.now}, written at {written}")
            elif time < expiry and state.now > written + TTL and self._is_settled(state, number):
                yield "reads", Broken(f"there at {state.now}, written at {written}")
            else:
                yield "reads", acted
        server = state.servers[number]
        if state.pin is None and not state.is_misled:
            yield "pins", state._replace(pin=(state.now, max(time, self._date(state, number)) + TTL))
        may_remove = (server.is_borne_out and server.is_sure) or not self.rules.alone_removes_nothing
        if state.pin and may_remove and self._date(state, number) >= state.pin[1] and state.now < state.pin[0] + TTL:
            yield "removes the pin", Broken(f"at {state.now}, of {state.pin[0]}")

    def _is_settled(self, state: State, number: int) -> bool:
        """Nobody who goes on alone, or with a clock that missed time, can know better; nor one that has not looked
        yet."""
        server = state.servers[number]
        is_judged = not any(self._judge(state, number))
        return is_judged and server.is_borne_out and (server.is_sure or not self.rules.doubtful_does_not_lead)

    def _date(self, state: State, number: int) -> int:
        server = state.servers[number]
        assert server.judged is not None
        return state.now + (server.judged if self.rules.monotonic_since else server.wall)

    def _time(self, state: State, number: int) -> int:
        """Record time of an entry that is made now."""
        date = self._date(state, number)
        gone_on = state.record + state.now - state.recorded_at
        return max(date, gone_on if self.rules.goes_on_ahead else state.record)


def _put(state: State, number: int, server: Server) -> State:
    servers = state.servers
    return state._replace(servers=(*servers[:number], server, *servers[number + 1 :]))


AHEAD = State(record=JUMP, jumps=0, starts=0, cuts=0)
"""A log whose record time is ahead: of an older version, or of a majority that was wrong. How long ago its last entry
was made a new leader does not know; so there is only one."""
