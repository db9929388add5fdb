"""Judges the cluster time that a server uses (docs/protocol.md, P28 and P29). Decides only. In the code and the
protocol, cluster time is called the server's date.

    NO DATE ──a server that has a date answers──────────────> HAS A DATE, not sure <──its clocks moved apart, or──> SURE
       ├────no server has one, and most wall clocks agree──────>      │                  a majority differs          ^
       └────alone for 30 s──> USES ITS WALL CLOCK                     └──────────a majority has the date─────────────┘

Cluster time advances with the monotonic clock. Neither one wall clock nor a majority of wall clocks steps it: it moves
towards a majority of wall clocks at RATE. A server whose monotonic clock has missed time steps forward to the time of
another server.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvstore.types import ServerId

BOUND_MS = 2_000
"""Difference up to which two dates or wall clocks agree. NTP's corrections are smaller."""
APART_MS = 3_000
"""Difference at which a server that was sure of its date stops being sure. It exceeds BOUND_MS as hysteresis."""
RATE = 0.01
"""Maximum share of elapsed time by which the date moves towards wall clocks: 36 s per hour. The owner of a session
counts less of its TTL than this takes away (kvstore.client.coordination.lease.CLOCK_RATE)."""
SILENT_MS = 1_000
"""Maximum distance that the date moves towards wall clocks while a server is silent, or sure of another date. Two
servers that are sure and then stop hearing each other stay within the grace of sessions: APART_MS and twice this."""
ANSWER_S = 5.0
"""Time for which an answer counts, in addition to the time of one polling round."""
ALONE_S = 30.0
"""Time that a process without a date waits for silent servers before wall clocks count."""
AWAKE_S = 1.0
"""Maximum time between two judgements that counts as waiting: a process that was paused has not received answers
either."""
CALM_S, CALM_MS = 1.0, 2
"""Time for which a judgement is reused while all clocks agree as before."""
ARRIVED_MS = 10.0
"""Distance from the wall clocks at which a date stops moving."""


class PeerClock(NamedTuple):
    """The clocks of another server according to its last answer. They are offsets from this server's monotonic
    clock, in ms."""

    offset_ms: float | None
    """Offset of its date, or None if it has no date."""
    wall_ms: float
    """Offset of its wall clock."""
    is_sure: bool
    at: float
    """Time at which it was asked."""

    def has(self, offset_ms: float) -> bool:
        """Return True if the server's date agrees with the offset."""
        return self.offset_ms is not None and abs(self.offset_ms - offset_ms) <= BOUND_MS

    def supports(self, offset_ms: float) -> bool:
        """Return True if the server's date or its wall clock agrees with the offset."""
        return self.has(offset_ms) or abs(self.wall_ms - offset_ms) <= BOUND_MS

    def is_like(self, other: PeerClock | None) -> bool:
        """Return True if the other answer would lead to the same judgement."""
        if other is None or self.is_sure is not other.is_sure or abs(self.wall_ms - other.wall_ms) >= CALM_MS:
            return False
        if self.offset_ms is None or other.offset_ms is None:
            return self.offset_ms is other.offset_ms
        return abs(self.offset_ms - other.offset_ms) < CALM_MS


class ClockJudge:
    """Judges the date of one server. `now` is its monotonic clock in seconds. An offset is a date minus the
    monotonic clock, in ms."""

    def __init__(self, server: ServerId, now: float, wall_ms: int, kept_ms: float | None = None) -> None:
        """`kept_ms` is the offset of the date that the previous process used. It is None if the machine has rebooted
        since."""
        self._server = server
        self._sampled_at, self._wall_ms = now, wall_ms - now * 1000
        self._waited_s = self._alone_s = 0.0
        """Seconds that this process, running and without a date, has waited for silent servers, and seconds in a row in
        which it has received answers from fewer than a majority."""
        self._moved_apart_at = now
        """When the wall clock and the monotonic clock last moved apart by more than BOUND_MS, or the process began."""
        self.offset_ms = self._wall_ms if kept_ms is None else kept_ms
        """Offset of the date."""
        self._shown_ms: float | None = None
        """The offset shown to clients before the first date; None: nothing is shown."""
        self._peers: dict[ServerId, PeerClock] = {}
        self._calm_until = now
        self._anchor_ms, self._slack_ms = self.offset_ms, 0.0
        """Offset of the date when all servers last answered and agreed, and how far the date may move from there while
        a server is silent or apart. Before all servers have answered once, and after a step to the date of another
        server, the date does not move: the process before this one, or the other server, may already have moved it by
        SILENT_MS."""
        self.has_date = kept_ms is not None
        """True if the date follows by elapsed time from another server's date or from the first agreement of a
        majority."""
        self.is_known = self.has_date
        """True if the server has a date, or was alone for so long that it uses its wall clock."""
        self.is_confirmed = False
        """True if a majority has agreed with the date since the process began or its clocks moved apart."""
        self.is_sure = False
        self.others_are_sure = False
        self.behind_ms = 0.0
        """Milliseconds by which the wall clocks of a majority are ahead of the date; 0 if no majority agrees."""
        self.taken_over = 0
        """Number of times that the server stepped to the date of another server, not counting its first date."""
        self.doubt = "it has no date yet"
        """The reason why the server is not sure of its date, or an empty string if it is sure."""

    def shown_ms(self, now: float) -> int:
        """Return the date to show to clients, in ms. A date that is too early is safe for clients, but a date in the
        future is not."""
        offset_ms = self.offset_ms if self.is_known else self._shown_ms
        return 0 if offset_ms is None else int(now * 1000 + offset_ms)

    @property
    def may_lead(self) -> bool:
        """True if this server may lead: it is sure, or it has a date and knows no server that is sure."""
        return self.is_sure or (self.is_known and not self.others_are_sure)

    @property
    def may_remove(self) -> bool:
        """True if data that has expired according to this date may be removed."""
        return self.is_sure

    @property
    def drift_ms(self) -> float:
        """The milliseconds by which the wall clock is ahead of the date."""
        return self._wall_ms - self.offset_ms

    def reported_ms(self, now: float) -> int:
        """Return the date to report to other servers. If this server is not sure, this is the date of its wall
        clock."""
        return int(now * 1000 + (self.offset_ms if self.is_sure else self._wall_ms))

    def note_answer(self, server: ServerId, answer: PeerClock) -> None:
        """Record the answer of another server."""
        if server == self._server:
            return
        before, self._peers[server] = self._peers.get(server), answer
        if not answer.is_like(before):
            self._calm_until = answer.at

    def is_calm(self, now: float, wall_ms: int) -> bool:
        """Return True if `poll` would reach the same judgement as the last time. Always False while anything is in
        doubt."""
        return now < self._calm_until and -CALM_MS < wall_ms - now * 1000 - self._wall_ms < CALM_MS

    def poll(self, now: float, wall_ms: int, servers: Collection[ServerId], valid_s: float = ANSWER_S) -> None:
        """Judge the date by the current clocks. `servers` are all servers of the ring; whether this server is among
        them does not matter. An answer of another server counts for `valid_s` seconds."""
        elapsed_s = min(max(0.0, now - self._sampled_at), AWAKE_S)
        self._sample(now, wall_ms)
        if not servers:
            return  # the ring is still unknown
        self._peers = {server: each for server, each in self._peers.items() if now - each.at <= valid_s}
        others = [each for server, each in self._peers.items() if server in servers]
        silent = len({*servers} - {self._server, *self._peers})
        majority = len({*servers, self._server}) // 2 + 1
        self.others_are_sure = any(each.is_sure for each in others)
        if not self.has_date:
            self._waited_s = self._waited_s + elapsed_s if silent else ALONE_S
            self._alone_s = self._alone_s + elapsed_s if len(others) + 1 < majority else 0.0
            self._begin(others, majority)
        if not silent and not (self.is_sure and self._is_apart(others)):
            self._anchor_ms, self._slack_ms = self.offset_ms, SILENT_MS
        is_moving = self._move(others, majority, elapsed_s)
        if self.has_date:
            self._compare(others, majority)
        self._calm_until = now + CALM_S if self.is_sure and not is_moving else now

    def _sample(self, now: float, wall_ms: int) -> None:
        wall = wall_ms - now * 1000
        if abs(wall - self._wall_ms) > BOUND_MS:
            self._moved_apart_at, self.is_confirmed = now, False  # the monotonic clock may have missed time
        self._wall_ms, self._sampled_at = wall, now

    def _begin(self, others: Sequence[PeerClock], majority: int) -> None:
        """Take the first date: from a server that has one, or from wall clocks once no other server can have one."""
        dated = [each.offset_ms for each in others if each.offset_ms is not None]
        if dated:
            self._take(self._best(dated, others, majority))
            return
        walls = [each.wall_ms for each in others]
        if self._waited_s >= ALONE_S and 1 + _near(walls, self._wall_ms) >= majority:
            self._take(self._wall_ms)
            return
        if not self.is_known:
            self.offset_ms = self._wall_ms
            self._shown_ms = min(self._wall_ms, *walls) if walls else None
        if self._alone_s >= ALONE_S:
            self.is_known = True
        if self.is_known:
            self.doubt = f"it reached no other server for {ALONE_S:g} s and uses its wall clock"
        else:
            self.doubt = f"it has no date yet: no server with a date answers, and no {majority} wall clocks agree"

    def _is_apart(self, others: Sequence[PeerClock]) -> bool:
        """Return True if a server that is sure has another date: it may receive no answers, and then its date does not
        move with this one."""
        dated = [each.offset_ms for each in others if each.is_sure and each.offset_ms is not None]
        return any(abs(each - self.offset_ms) > BOUND_MS for each in dated)

    def _take(self, offset_ms: float) -> None:
        self._step(offset_ms)
        self.has_date = self.is_known = True

    def _step(self, offset_ms: float) -> None:
        self.offset_ms = self._anchor_ms = offset_ms
        self._slack_ms = 0.0

    def _best(self, dated: Sequence[float], others: Sequence[PeerClock], majority: int) -> float:
        """Return the latest date that a majority supports, or else the latest date, because clocks miss time and never
        gain it."""
        return max([each for each in dated if self._is_supported(each, others, majority)] or dated)

    def _is_supported(self, offset_ms: float, others: Sequence[PeerClock], majority: int) -> bool:
        own = abs(self._wall_ms - offset_ms) <= BOUND_MS
        return own + sum(each.supports(offset_ms) for each in others) >= majority

    def _move(self, others: Sequence[PeerClock], majority: int, elapsed_s: float) -> bool:
        """Move the date towards the wall clocks of a majority or, if there is no majority, towards its own wall clock
        if that is near. While a server is silent or apart, the date moves by SILENT_MS at most. Return False once the
        date has arrived."""
        walls = sorted([self._wall_ms, *(each.wall_ms for each in others)])
        target = self._wall_ms if _near(walls, self._wall_ms) >= majority else walls[len(walls) // 2]
        has_majority = _near(walls, target) >= majority
        self.behind_ms = target - self.offset_ms if has_majority and self.has_date else 0.0
        if not has_majority:
            target = self._wall_ms if abs(self.drift_ms) <= BOUND_MS else self.offset_ms
        if self.has_date:  # a silent server may lead by its date, which does not move with this one
            target = max(self._anchor_ms - self._slack_ms, min(self._anchor_ms + self._slack_ms, target))
        most = RATE * elapsed_s * 1000
        self.offset_ms += max(-most, min(most, target - self.offset_ms))
        return abs(target - self.offset_ms) > ARRIVED_MS

    def _compare(self, others: Sequence[PeerClock], majority: int) -> None:
        """Decide whether the server is sure of its date. A server that is not sure steps forward to a later date that
        another server has and a majority supports."""
        apart_ms = APART_MS if self.is_sure else BOUND_MS
        dated = [each.offset_ms for each in others if each.offset_ms is not None]
        apart = sum(abs(each - self.offset_ms) > apart_ms for each in dated)
        if apart >= majority or not self.is_confirmed:
            later = [each for each in dated if each > self.offset_ms + BOUND_MS]
            if supported := [each for each in later if self._is_supported(each, others, majority)]:
                self._step(max(supported))
                self.taken_over += 1
                apart = sum(abs(each - self.offset_ms) > BOUND_MS for each in dated)
        fresh = [each for each in others if each.at > self._moved_apart_at]
        self.is_confirmed |= 1 + sum(each.has(self.offset_ms) for each in fresh) >= majority
        self.is_sure = self.is_confirmed and apart < majority
        if self.is_sure:
            self.doubt = ""
        elif apart >= majority:
            self.doubt = f"its date differs by more than {apart_ms} ms from the dates of {apart} other servers"
        else:
            self.doubt = (
                f"too few servers have confirmed its date since the process began or since its wall clock jumped; the "
                f"wall clock is {self.drift_ms / 1000:+.1f} s from the date"
            )


def _near(offsets: Sequence[float], offset_ms: float) -> int:
    return sum(abs(each - offset_ms) <= BOUND_MS for each in offsets)
