"""A model of the dates by which three servers lead one partition. Wall clocks of one server or of a majority jump,
processes and machines restart one by one or all at once, a monotonic clock misses a suspension, and a server is cut
off. Each of the rules P28 to P31, Q2 and Q3 of docs/protocol.md can be removed.

A date is an offset from the true time, which advances in steps of one. JUMP is larger than anything that the rules
allow. One lock is granted at a moment that the search chooses, and one pin is made with a deadline.

Promises: the lock's owner relies on the lock for OWNER, and the store does not give the lock away before. The pin stays
until its deadline. A key does not outlive its time to live where record time is ahead of the date, which one case
checks.

Not promised: anything after servers without a date found no server with a date and believed wrong wall clocks. The
search also does not cut a server off while another server's clock misses time: the others cannot tell it which date is
right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from tests.models.search import Broken

SERVERS = range(3)
DEAF = 3
MAJORITY = 2
JUMP, BOUND = 10, 2
RATE_STEPS = 2
"""Number of steps in which the date moves towards the wall clocks by one."""
OWNER, MARGIN, GRACE = 2, 1, 1
TTL = OWNER + MARGIN + GRACE
TIME_MAX, TIME_MAX_AHEAD, TIME_MAX_CUT = 3, 6, 5
SILENT, TOGETHER = 1, 0
"""Maximum distance that the date moves towards wall clocks while a server is silent or apart, and the distance from
which on the date of a server that is sure is apart."""


@dataclass(frozen=True)
class Rules:
    """The rules of the model. A rule that is False is not kept."""

    elapsed_time_decides: bool = True
    """P28: no server steps its date to wall clocks, not even to those of a majority."""
    is_slow: bool = True
    """P28: the date moves towards the wall clocks of a majority at a bounded rate."""
    stays_near_silent: bool = True
    """P28: while a server is silent, the date moves towards wall clocks by SILENT at most."""
    stays_near_apart: bool = True
    """P28: a server that is sure and has another date counts as silent, because it may receive no answers."""
    new_date_stays: bool = True
    """P28: a process that starts, or takes the date of another server, does not move its date until all servers
    answer."""
    first_from_dated: bool = True
    """P28: a process takes its first date from a server that has one, not from wall clocks."""
    survives_restarts: bool = True
    """P28: a process takes over the date of the process before it if the machine was not rebooted."""
    waits_for_silent: bool = True
    """P28: wall clocks count for the first date only after each silent server was silent for a long time."""
    majority_of_walls: bool = True
    """P28: only the wall clocks of a majority count."""
    alone_has_no_date: bool = True
    """P28: a server that was alone for a long time and believes its wall clock has no date that others may take."""
    doubtful_does_not_lead: bool = True
    """P29: a server whose date differs from the others' does not lead while another could."""
    alone_removes_nothing: bool = True
    """P31: a server that believes its wall clock removes nothing by it."""
    goes_on_ahead: bool = True
    """P30: record time that is ahead of the date continues."""
    owner_counts_less: bool = True
    """Q2: the owner's lease is shorter than the store's by more than the date may move."""


class Server(NamedTuple):
    wall: int = 0
    date: int | None = 0
    """None if no server's elapsed time explains a date here."""
    believed: int | None = None
    """The server was alone for a long time: it leads by what its wall clock showed then."""
    was_rebooted: bool = False
    """The server has no date because of a reboot."""
    is_confirmed: bool = True
    """A majority has shared its date since this process began, or since its clocks last diverged."""
    moved: int | None = 0
    """Distance that the date has moved since a server became silent. None: it may not move until all servers
    answer."""


class State(NamedTuple):
    """The whole state. The last fields bound the search."""

    servers: tuple[Server, ...] = (Server(), Server(), Server())
    now: int = 0
    cut: int = 0
    """1: the first server and the others do not reach each other; 2: for a long time. 3: the first server receives no
    answers, and the others receive its answers."""
    only: int | None = None
    """The only server that can lead the partition: the others have no replica, or a damaged one."""
    leader: int | None = 0
    record: int = -JUMP
    """Record time of the last entry. No entry has been written for a long time."""
    recorded_at: int = 0
    """The time at which the leader wrote that entry, or began to lead."""
    lock: tuple[int, int] | None = None
    """The time of its grant, and its expiry."""
    pin: tuple[int, int] | None = None
    """The time at which it was made, and its deadline."""
    lost: int = 0
    """1: a server that was alone believes its wrong wall clock; 2: a majority without a date believes wrong wall
    clocks."""
    grants: str = "lock"
    """"lock", "pin", or "key": a lock whose key is also not shown after its time to live."""
    may_sleep: bool = False
    time_max: int = TIME_MAX
    jumps: int = 2
    starts: int = 1
    cuts: int = 1


Step = tuple[str, "State | Broken"]


class Model:
    """The steps that a set of rules allows."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.owner = OWNER if rules.owner_counts_less else OWNER + MARGIN

    def steps(self, state: State) -> Iterator[Step]:
        """Yield all possible next steps, treating states that differ only in server names as equal."""
        for label, after in self._steps(state):
            yield label, after if isinstance(after, Broken) else _ordered(after)

    def _steps(self, state: State) -> Iterator[Step]:
        judged = [step for number in SERVERS for step in self._judge(state, number)]
        if state.now < state.time_max:
            yield "time", self._pass_time(state)
        if state.cuts:
            yield "the first server is cut off", state._replace(cut=1, cuts=state.cuts - 1)
            if state.leader is not None:
                yield "only the leader can lead", state._replace(only=state.leader, cuts=state.cuts - 1)
        if state.cut:
            yield "the cut ends", self._together_again(state._replace(cut=0))
        if state.cut == 1:
            yield "the cut lasts", state._replace(cut=2)
        yield from self._clocks(state)
        if state.starts:
            yield from self._starts(state)
        yield from judged
        yield from self._role(state)

    def _role(self, state: State) -> Iterator[Step]:
        if state.leader is None:
            for number in SERVERS:
                if self._may_run(state, number) and self._is_judged(state, number):
                    yield f"{number} leads", state._replace(leader=number, recorded_at=state.now)
        elif not self._may_lead(state, state.leader) and state.only is None:  # another server takes leadership
            yield "stops leading", state._replace(leader=None)
        else:
            if state.only is None:
                yield "hands over", state._replace(leader=None)
            yield from self._lead(state, state.leader)

    def _is_judged(self, state: State, number: int) -> bool:
        return not any(self._judge(state, number)) or not self.rules.doubtful_does_not_lead

    # ── clocks ──

    def _clocks(self, state: State) -> Iterator[Step]:
        for number, server in enumerate(state.servers):
            if state.jumps and not server.wall:
                for jump in (JUMP, -JUMP):
                    jumped = server._replace(wall=jump, is_confirmed=False)
                    yield f"{number} jumps by {jump}", _put(state, number, jumped)._replace(jumps=state.jumps - 1)
            if state.jumps and self._may_sleep(state, number):
                asleep = server._replace(date=-JUMP, is_confirmed=False)
                yield f"{number} sleeps", _put(_unled(state, number), number, asleep)._replace(jumps=state.jumps - 1)

    def _may_sleep(self, state: State, number: int) -> bool:
        """Return False for two of three servers, which would then agree on a date."""
        dates = [each.date for each in state.servers]
        return state.may_sleep and dates[number] == 0 and all(date in (0, None) for date in dates)

    def _starts(self, state: State) -> Iterator[Step]:
        after = state._replace(starts=state.starts - 1)
        for number in SERVERS:
            one = _unled(after, number)
            yield f"{number} restarts", _put(one, number, self._restarted(state, state.servers[number]))
            yield f"{number} is rebooted", _put(one, number, _rebooted(state.servers[number]))
        servers = tuple([self._restarted(state, each) for each in state.servers])
        yield "all restart", after._replace(leader=None, servers=servers)
        yield "all are rebooted", after._replace(leader=None, servers=tuple(map(_rebooted, state.servers)))

    def _moved_at_first(self, state: State) -> int | None:
        return None if state.cut and self.rules.new_date_stays and self.rules.stays_near_silent else 0

    def _restarted(self, state: State, server: Server) -> Server:
        date = server.date if self.rules.survives_restarts else None
        return server._replace(date=date, believed=None, is_confirmed=False, moved=self._moved_at_first(state))

    def _pass_time(self, state: State) -> State:
        now = state.now + 1
        servers = [self._moved(state, number) for number in SERVERS] if now % RATE_STEPS else state.servers
        return state._replace(now=now, servers=tuple(servers))

    def _moved(self, state: State, number: int) -> Server:
        server, heard = state.servers[number], self._heard(state, number)
        walls = sorted([server.wall, *(each.wall for each in heard)])
        wall = server.wall if walls.count(server.wall) >= MAJORITY else walls[len(walls) // 2]
        if server.date is None or walls.count(wall) < MAJORITY:
            return server
        most = 1 if self.rules.is_slow else JUMP
        way = max(-most, min(most, wall - server.date))
        if self.rules.stays_near_silent and not self._are_together(state, number):
            if server.moved is None:
                return server
            way = max(-SILENT, min(SILENT, server.moved + way)) - server.moved
            server = server._replace(moved=server.moved + way)
        elif server.moved:
            server = server._replace(moved=0)
        return server._replace(date=server.date + way)

    def _are_together(self, state: State, number: int) -> bool:
        """Return True if all servers answer, and none that is sure has another date."""
        date = state.servers[number].date
        others = self._reached(state, number)
        sure = [state.servers[other].date for other in others if self._is_sure(state, other)]
        is_apart = any(date is not None and each is not None and abs(each - date) > TOGETHER for each in sure)
        is_apart = is_apart and self._is_sure(state, number) and self.rules.stays_near_apart
        return len(others) == len(SERVERS) - 1 and not is_apart

    def _together_again(self, state: State) -> State:
        servers = [
            server._replace(moved=0) if self._are_together(state, number) else server
            for number, server in enumerate(state.servers)
        ]
        return state._replace(servers=tuple(servers))

    def _reached(self, state: State, number: int) -> list[int]:
        if state.cut == DEAF:
            return [other for other in SERVERS if other != number and number]
        return [other for other in SERVERS if other != number and not (state.cut and 0 in (number, other))]

    def _heard(self, state: State, number: int) -> list[Server]:
        return [state.servers[other] for other in self._reached(state, number)]

    def _judge(self, state: State, number: int) -> Iterator[Step]:
        server, heard = state.servers[number], self._heard(state, number)
        after = self._first(state, server, heard) if server.date is None else self._next(state, number, heard)
        if after is not None and after != server:
            lost = max(state.lost, _lost_by(state, server, after, heard))
            yield f"{number} judges", _put(state, number, after)._replace(lost=lost)

    def _first(self, state: State, server: Server, heard: list[Server]) -> Server | None:
        if self.rules.first_from_dated and (dated := self._dated(heard)):
            date = self._best(server, heard, dated)
            return Server(server.wall, date, is_confirmed=False, moved=self._moved_at_first(state))
        is_cut = state.cut == 2 or not self.rules.waits_for_silent
        is_heard_out = len(heard) == len(SERVERS) - 1 or is_cut
        agree = 1 + [each.wall for each in heard].count(server.wall)
        if is_heard_out and (agree >= MAJORITY or (heard and not self.rules.majority_of_walls)):
            return Server(server.wall, server.wall, moved=self._moved_at_first(state))
        is_alone = is_cut and not heard and server.believed is None
        return server._replace(believed=server.wall) if is_alone else None

    def _dated(self, heard: list[Server]) -> list[int]:
        dated = [each.date for each in heard if each.date is not None]
        if not self.rules.alone_has_no_date:
            dated += [each.believed for each in heard if each.believed is not None]
        return sorted(dated)

    def _best(self, server: Server, heard: list[Server], dated: list[int]) -> int:
        """Return the latest date that a majority supports, or the latest of all dates: clocks can miss time but not
        gain it."""
        return ([date for date in dated if self._has_majority(server, heard, date)] or dated)[-1]

    def _has_majority(self, server: Server, heard: list[Server], date: int) -> bool:
        has = sum(_near(each.date, date) or _near(each.wall, date) for each in heard)
        return has + _near(server.wall, date) >= MAJORITY

    def _next(self, state: State, number: int, heard: list[Server]) -> Server:
        server = state.servers[number]
        assert server.date is not None
        if not self.rules.elapsed_time_decides:
            shown = [each.wall if each.date != each.wall else each.date for each in heard]
            if server.wall != server.date and 1 + shown.count(server.wall) >= MAJORITY:
                return Server(server.wall, server.wall)
        if not self._is_sure(state, number):
            later = [date for date in self._dated(heard) if date > server.date + BOUND]
            if supported := [date for date in later if self._has_majority(server, heard, date)]:
                return server._replace(date=supported[-1], moved=self._moved_at_first(state))
        near = 1 + sum(_near(each.date, server.date) for each in heard)
        return server._replace(is_confirmed=server.is_confirmed or near >= MAJORITY)

    # ── leading ──

    def _is_sure(self, state: State, number: int) -> bool:
        server = state.servers[number]
        if server.date is None or not server.is_confirmed:
            return False
        dates = [each.date for each in self._heard(state, number) if each.date is not None]
        return sum(not _near(date, server.date) for date in dates) < MAJORITY

    def _may_lead(self, state: State, number: int) -> bool:
        server = state.servers[number]
        if server.date is None and server.believed is None:
            return False
        others_could = any(self._is_sure(state, other) for other in self._reached(state, number))
        return self._is_sure(state, number) or not others_could or not self.rules.doubtful_does_not_lead

    def _may_run(self, state: State, number: int) -> bool:
        """Return True if the server may run for election although it is not sure of its date, because no server has
        led for a long time."""
        if state.only is None:
            return self._may_lead(state, number)
        server = state.servers[number]
        return state.only == number and (server.date is not None or server.believed is not None)

    def _lead(self, state: State, number: int) -> Iterator[Step]:
        time = self._time(state, number)
        acted = state._replace(record=time, recorded_at=state.now)
        if state.grants == "pin":
            yield from self._lead_pins(state, number, time)
        elif state.lock is None:
            yield "grants", acted._replace(lock=(state.now, time + TTL))
        else:
            granted, expiry = state.lock
            if not state.lost and time >= expiry and state.now < granted + self.owner:
                yield "gives it to another", Broken(f"held twice at {state.now}, granted at {granted}")
            elif not state.lost and time < expiry and state.now > granted + TTL and state.grants == "key":
                yield "shows it", Broken(f"there at {state.now}, granted at {granted}")
            else:
                yield "looks at it", acted

    def _lead_pins(self, state: State, number: int, time: int) -> Iterator[Step]:
        if state.pin is None and not state.lost:
            yield "pins", state._replace(pin=(state.now, time + TTL), record=time, recorded_at=state.now)
        may_remove = self._is_sure(state, number) or not self.rules.alone_removes_nothing
        is_past = state.pin is None or state.lost == 2 or state.now >= state.pin[0] + OWNER
        if state.pin and not is_past and may_remove and self._date(state, number) >= state.pin[1]:
            yield "removes the pin", Broken(f"at {state.now}, of {state.pin[0]}")

    def _date(self, state: State, number: int) -> int:
        server = state.servers[number]
        date = server.believed if server.date is None else server.date
        assert date is not None
        return state.now + date

    def _time(self, state: State, number: int) -> int:
        """Return the record time of an entry made now."""
        date = self._date(state, number)
        gone_on = state.record + state.now - state.recorded_at
        return max(date, gone_on if self.rules.goes_on_ahead else state.record)


def _ordered(state: State) -> State:
    """Return one representative of the states that differ only in the names of servers. Only a past or future cut
    distinguishes the first server from the others."""
    servers, leader, only = state.servers, state.leader, state.only
    first = 1 if state.cut or state.cuts else 0
    keys = [(_sortable(each), number == leader, number == only) for number, each in enumerate(servers)]
    names = [*range(first), *sorted(range(first, len(servers)), key=keys.__getitem__)]
    if names == [*SERVERS]:
        return state
    return state._replace(
        servers=tuple([servers[number] for number in names]),
        leader=None if leader is None else names.index(leader),
        only=None if only is None else names.index(only),
    )


@cache
def _sortable(server: Server) -> tuple[int, ...]:
    """None comes before every number."""
    return tuple(-(1 << 30) if each is None else each for each in server)


def _near(date: int | None, other: int) -> bool:
    return date is not None and abs(date - other) <= BOUND


def _rebooted(server: Server) -> Server:
    return Server(server.wall, None, was_rebooted=True, is_confirmed=False)


def _lost_by(state: State, before: Server, after: Server, heard: list[Server]) -> int:
    """Return the new value of `lost` if the server believes wrong wall clocks and could not know better, otherwise
    0."""
    if (
        before.date is not None
        or not before.was_rebooted
        or not before.wall
        or any(not _is_lost(each) for each in heard)
    ):
        return 0
    if after.date is None:
        return 1 if state.cut == 2 else 0
    is_wrong = [each.wall for each in (before, *heard)].count(before.wall) >= MAJORITY
    return 2 if after.date == before.wall and is_wrong and state.cut != 1 else 0


def _is_lost(server: Server) -> bool:
    return server.date is None and server.was_rebooted


def _unled(state: State, number: int) -> State:
    """End the leadership of the server, if it led."""
    return state._replace(leader=None) if state.leader == number else state


def _put(state: State, number: int, server: Server) -> State:
    servers = state.servers
    return state._replace(servers=(*servers[:number], server, *servers[number + 1 :]))


AHEAD = State(record=JUMP, only=0, jumps=0, starts=0, cuts=0, time_max=TIME_MAX_AHEAD, grants="key")
"""A log whose record time is ahead, written by an older version or by servers that had lost their date. A new leader
does not know the age of the last entry, so there is only one such state."""

_WRONG = Server(wall=JUMP)
ONE_WAY = State((Server(), _WRONG, _WRONG), cut=DEAF, jumps=0, cuts=0, time_max=TIME_MAX_CUT, starts=0)
"""The same, but the others receive the answers of the first server."""
LONG_CUT = State((Server(), _WRONG, _WRONG), cut=2, jumps=0, cuts=0, time_max=TIME_MAX_CUT)
"""A server has been silent for a long time and leads, and the wall clocks of the others have jumped."""
