"""Judges the date that a server goes by (docs/protocol.md, P28). Decides only.

    UNKNOWN ──a majority has the wall clock's──> SURE <──the wall clock is back, or a majority has its date── DOUBTFUL
       └──────nobody to ask for 30 s───────────> SURE ──the wall clock leaves it, or a majority has another──>   ^

A date that was taken over goes on with the monotonic clock, and follows the wall clock slowly. So a jump of one wall
clock moves no date.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from kvstore.types import ServerId

BOUND_MS = 2_000
"""Dates that are no further apart agree. What NTP corrects in steps is below; what it slews the monotonic clock follows
too."""
APART_MS = 3_000
"""From here on a server that was sure differs from the others: dates at the edge do not make it change its mind at each
look."""
SLEW = 0.001
"""How fast a date follows its wall clock, in seconds per second: slower than a clock that is allowed to drift is not
of use, faster would be a jump in parts."""
HEARD_S = 5.0
"""For so long an answer counts, beside the time of one round of questions."""
ALONE_S = 30.0
"""A process without a date that hears from fewer than a majority for so long believes its wall clock."""
AWAKE_S = 1.0
"""What passes between two looks counts as time alone up to this: a process that stood still has heard nobody either."""
CALM_S, CALM_MS = 1.0, 2
"""For so long nothing is judged anew if the others say what they have said, and the two clocks of this server agree as
they did."""
STOOD_S = 300.0
"""A server that is the only one of its cluster takes over a date that its wall clock has had for so long."""


class Heard(NamedTuple):
    """Another server's date, and when it was told."""

    offset_ms: float
    """Of its date, or, if it is not sure, of its wall clock."""
    is_sure: bool
    at: float


class Judge:
    """Told what clocks say; `now` is always the monotonic one, in seconds. Offsets are dates less that."""

    def __init__(self, server: ServerId, now: float, wall_ms: int) -> None:
        self._server = server
        self._sampled_at, self._wall_ms = now, wall_ms - now * 1000
        self._alone_s = 0.0
        """For how long, awake and without a date, it has heard too few others to learn one."""
        self._stood_since, self._stood_ms = now, self._wall_ms
        """Since when the wall clock has been near this: many small steps are a jump too."""
        self.offset_ms = self._wall_ms
        """Of the date."""
        self._shown_ms: float | None = None
        """What clients are told before the first date; None: nothing."""
        self._heard: dict[ServerId, Heard] = {}
        self._calm_until = now
        """While nothing happens, the judgement is what it was."""
        self.is_known = False
        """A date has been taken over since this process began."""
        self.is_borne_out = False
        """By a majority, at some time."""
        self.is_sure = False
        self.others_are_sure = False
        self.taken_over = 0
        """Dates after the first one."""
        self.doubt = "no majority of the servers has borne out its date yet"
        """Why the server is not sure; empty if it is."""

    def shown_ms(self, now: float) -> int:
        """The date that clients are told. Any that is too early is safe for them, one of the future is not."""
        offset_ms = self.offset_ms if self.is_known else self._shown_ms
        return 0 if offset_ms is None else int(now * 1000 + offset_ms)

    @property
    def may_lead(self) -> bool:
        """Whether this server may lead by its date: an unsure one leaves it to those that are sure; if there is none,
        its monotonic clock has to do."""
        return self.is_sure or (self.is_known and not self.others_are_sure)

    @property
    def may_remove(self) -> bool:
        """Whether something may be removed because its time is over by this date."""
        return self.is_sure and self.is_borne_out

    @property
    def drift_ms(self) -> float:
        """The milliseconds by which the wall clock is ahead of the date."""
        return self._wall_ms - self.offset_ms

    def told_ms(self, now: float) -> int:
        """The date that other servers are told; that of the wall clock, if this one is not sure."""
        return int(now * 1000 + (self.offset_ms if self.is_sure else self._wall_ms))

    def hear(self, server: ServerId, heard: Heard) -> None:
        if server == self._server:
            return
        before, self._heard[server] = self._heard.get(server), heard
        is_same = before is not None and before.is_sure is heard.is_sure
        if before is None or not is_same or abs(heard.offset_ms - before.offset_ms) >= CALM_MS:
            self._calm_until = heard.at

    def is_calm(self, now: float, wall_ms: int) -> bool:
        """Whether a look now would find what the last one has found. Never while something is in doubt."""
        return now < self._calm_until and -CALM_MS < wall_ms - now * 1000 - self._wall_ms < CALM_MS

    def look(self, now: float, wall_ms: int, servers: Collection[ServerId], heard_s: float = HEARD_S) -> None:
        """Judge by what the clocks say now. `servers`: all of the ring, this one perhaps among them; an answer counts
        for `heard_s`."""
        elapsed_s = self._sample(now, wall_ms)
        self._heard = {server: each for server, each in self._heard.items() if now - each.at <= heard_s}
        others = [each for server, each in self._heard.items() if server in servers]
        majority = len({*servers, self._server}) // 2 + 1
        self.others_are_sure = any(each.is_sure for each in others)
        has_wall = 1 + _near(others, self._wall_ms) >= majority
        if not self.is_known:
            self._begin(others, elapsed_s, has_wall=has_wall, is_alone=len(others) + 1 < majority)
        elif abs(self.drift_ms) > BOUND_MS and has_wall and (majority > 1 or now - self._stood_since >= STOOD_S):
            self.offset_ms = self._wall_ms
            self.taken_over += 1
            self._be_sure(is_borne_out=True)
        else:
            self._compare(others, majority)
        self._calm_until = now + CALM_S if self.is_sure and self.is_borne_out else now

    def _sample(self, now: float, wall_ms: int) -> float:
        """Returns the seconds since the sample before."""
        wall = wall_ms - now * 1000
        if abs(wall - self._stood_ms) > BOUND_MS:
            self._stood_since, self._stood_ms = now, wall
        elapsed_s = max(0.0, now - self._sampled_at)
        self._wall_ms, self._sampled_at = wall, now
        if self.is_known and abs(self.drift_ms) <= BOUND_MS:
            step_ms = SLEW * elapsed_s * 1000
            self.offset_ms += max(-step_ms, min(step_ms, self.drift_ms))
        return elapsed_s

    def _begin(self, others: list[Heard], elapsed_s: float, *, has_wall: bool, is_alone: bool) -> None:
        """Take over a first date. Until then go by that of the servers that are sure: clients ask this one too."""
        sure = sorted(each.offset_ms for each in others if each.is_sure)
        is_contradicted = any(abs(each - self._wall_ms) > BOUND_MS for each in sure)
        self._alone_s = self._alone_s + min(elapsed_s, AWAKE_S) if is_alone and not is_contradicted else 0.0
        self.offset_ms = sure[(len(sure) - 1) // 2] if sure else self._wall_ms
        told = [self.offset_ms] if sure else [each.offset_ms for each in others]
        self._shown_ms = min(self.offset_ms, *told) if told else None
        if has_wall or self._alone_s >= ALONE_S:
            self.offset_ms = self._wall_ms
            self._be_sure(is_borne_out=has_wall)

    def _be_sure(self, *, is_borne_out: bool) -> None:
        self.is_known = self.is_sure = True
        self.is_borne_out, self.doubt = is_borne_out, ""

    def _compare(self, others: list[Heard], majority: int) -> None:
        """Keep the date; say whether it is still the one to go by."""
        apart_ms = APART_MS if self.is_sure else BOUND_MS
        apart = sum(abs(each.offset_ms - self.offset_ms) > apart_ms for each in others)
        if abs(self.drift_ms) > BOUND_MS:
            self.is_sure = False
            self.doubt = f"its wall clock is {self.drift_ms / 1000:+.1f} s from what its monotonic clock explains"
        elif apart >= majority:
            self.is_sure = False
            self.doubt = f"its date is more than {apart_ms} ms from that of {apart} other servers"
        else:
            is_borne_out = self.is_borne_out or 1 + _near(others, self.offset_ms) >= majority
            self._be_sure(is_borne_out=is_borne_out)


def _near(others: list[Heard], offset_ms: float) -> int:
    return sum(abs(each.offset_ms - offset_ms) <= BOUND_MS for each in others)
