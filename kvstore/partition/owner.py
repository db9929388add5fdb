"""One replica's way to the lead and back. Decides only; replica.py performs.

    FOLLOWING ──no leader──> STANDING ──its turn──> CLAIMING ──won──> OPENING ──served its first record──> SERVING
        ^          ^            │                      │                 │                                    │
        └──────────┴── another leads / lost the race ──┴── gave it back ─┴────────────── fenced ──────────────┘

The znode never stops a leader: one that serves and finds its znode gone claims it again, and one that finds another's
name there goes on until it is fenced, because until then nobody else can have acknowledged anything (docs/protocol.md,
Election).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from math import inf, isinf
from typing import assert_never

from kvstore.partition.election import INCUMBENT_GRACE_S, OUT_S, RANK_DELAY_S, YIELD_OUT_S, LeaderRecord
from kvstore.types import ServerId


class Role(Enum):
    FOLLOWING = auto()
    STANDING = auto()
    CLAIMING = auto()
    OPENING = auto()
    SERVING = auto()
    STOPPED = auto()


# ── what happened
# ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LeaderRead:
    """The leader znode as just read; None if there is none."""

    record: LeaderRecord | None


@dataclass(frozen=True, slots=True)
class Ranked:
    rank: int
    incumbent_serves: bool
    """A replica answered that it still serves its epoch: it lost its session, not its lead."""


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The leader's machine refuses connections: its process is gone, its session not yet."""

    server: ServerId


@dataclass(frozen=True, slots=True)
class Claimed:
    pass


@dataclass(frozen=True, slots=True)
class NotClaimed:
    pass


@dataclass(frozen=True, slots=True)
class Opened:
    """The log is open, the state is caught up, the first record is acknowledged."""


@dataclass(frozen=True, slots=True)
class OpenFailed:
    pass


@dataclass(frozen=True, slots=True)
class Ended:
    """This leadership is over: fenced, or too few bookies for too long."""


@dataclass(frozen=True, slots=True)
class Yielded:
    """This leader has released its lease for a better placed one."""


@dataclass(frozen=True, slots=True)
class Tick:
    pass


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Event = LeaderRead | Ranked | PeerGone | Claimed | NotClaimed | Opened | OpenFailed | Ended | Yielded | Tick | Stop

# ── what to do about it
# ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class PublishAndRank:
    """Publish this replica's sequence now, read the others', ask them whether one still serves, report Ranked."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Report Tick at this time."""

    at: float


@dataclass(frozen=True, slots=True)
class Claim:
    """Create the leader znode; report Claimed or NotClaimed."""


@dataclass(frozen=True, slots=True)
class RemoveStale:
    """Delete the leader znode if it is still this record's."""

    record: LeaderRecord


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Delete one's own leader znode, if it is there."""


@dataclass(frozen=True, slots=True)
class OpenLog:
    """Take the log over; report Opened or OpenFailed."""


@dataclass(frozen=True, slots=True)
class AbandonOpening:
    pass


@dataclass(frozen=True, slots=True)
class ReadLeader:
    """Read the leader znode again; report LeaderRead."""


@dataclass(frozen=True, slots=True)
class Follow:
    """Clients are to be sent to this server."""

    server: ServerId | None


Command = PublishAndRank | WakeAt | Claim | RemoveStale | GiveBack | OpenLog | AbandonOpening | ReadLeader | Follow


class Owner:
    """Turns each event into the commands it calls for. Performs none of them."""

    def __init__(self, me: ServerId, nonce: str) -> None:
        self.role = Role.FOLLOWING
        self.leader: ServerId | None = None
        self._me, self._nonce = me, nonce
        self._record: LeaderRecord | None = None
        """The leader znode that is being followed."""
        self._gone: LeaderRecord | None = None
        """The last one whose process is known to be gone."""
        self._deferred = False
        """An incumbent has had its grace since a leader's znode was last seen."""
        self._stand_at = 0.0
        self._out_until = 0.0
        self._failures = 0

    def handle(self, event: Event, now: float) -> list[Command]:
        """The only way in. `now` is the boot-time clock in seconds."""
        if self.role is Role.STOPPED:
            return []
        match event:
            case LeaderRead(record):
                return self._read(record, now)
            case Ranked(rank, incumbent_serves):
                return self._ranked(rank, incumbent_serves, now)
            case PeerGone(server):
                return self._peer_gone(server)
            case Tick():
                return self._tick(now)
            case Claimed():
                return self._claimed()
            case NotClaimed():
                return self._not_claimed()
            case Opened():
                return self._opened()
            case OpenFailed() | Ended():
                return self._stand_back(now)
            case Yielded():
                self._out_until = now + YIELD_OUT_S
                return self._stand_back(now)
            case Stop():
                return self._stop()
            case _:
                assert_never(event)

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold: one that serves or opens sends clients nowhere else."""
        assert self.role is not Role.SERVING or self.leader == self._me
        assert self._failures >= 0

    def _read(self, record: LeaderRecord | None, now: float) -> list[Command]:
        if record is None:
            return self._no_leader(now)
        if record.nonce == self._nonce:
            return [] if self.role in (Role.OPENING, Role.SERVING, Role.CLAIMING) else [GiveBack()]
        if record.server == self._me:
            return [RemoveStale(record), ReadLeader()]  # of this server's former process: the directory's lock says so
        if self.role is Role.SERVING:
            return []
        abandoned: list[Command] = [AbandonOpening()] if self.role is Role.OPENING else []
        self.role = Role.FOLLOWING
        if record == self._gone:
            return [*abandoned, RemoveStale(record), ReadLeader()]
        self._record, self._deferred = record, False
        return abandoned + self._follow(record.server)

    def _no_leader(self, now: float) -> list[Command]:
        if self.role in (Role.SERVING, Role.OPENING):
            return [Claim()]  # the session was lost, the lead was not
        if self.role in (Role.STANDING, Role.CLAIMING):
            return []
        commands = self._follow(None)
        if now < self._out_until:
            return [*commands, WakeAt(self._out_until)]
        self.role = Role.STANDING
        self._stand_at = inf
        return [*commands, PublishAndRank()]

    def _ranked(self, rank: int, incumbent_serves: bool, now: float) -> list[Command]:
        if self.role is not Role.STANDING:
            return []
        self._stand_at = now + rank * RANK_DELAY_S
        if incumbent_serves and not self._deferred:
            self._deferred = True
            self._stand_at += INCUMBENT_GRACE_S
        return [WakeAt(self._stand_at)]

    def _peer_gone(self, server: ServerId) -> list[Command]:
        if self._record is None or server != self._record.server or self.role is not Role.FOLLOWING:
            return []
        self._gone, self._record = self._record, None
        return [*self._follow(None), ReadLeader()]

    def _tick(self, now: float) -> list[Command]:
        if self.role is Role.STANDING:
            if now < self._stand_at:  # the timer's clock is not ours: it may run ahead by a little
                return [] if isinf(self._stand_at) else [WakeAt(self._stand_at)]
            self.role = Role.CLAIMING
            return [Claim()]
        if self.role is Role.FOLLOWING and self.leader is None:
            return [ReadLeader()]
        return []

    def _claimed(self) -> list[Command]:
        if self.role is not Role.CLAIMING:
            return [] if self.role in (Role.OPENING, Role.SERVING) else [GiveBack()]
        self.role = Role.OPENING
        return [OpenLog()]

    def _not_claimed(self) -> list[Command]:
        if self.role is Role.CLAIMING:
            self.role = Role.FOLLOWING
        return [ReadLeader()]

    def _opened(self) -> list[Command]:
        if self.role is not Role.OPENING:
            return []
        self.role, self._failures = Role.SERVING, 0
        return self._follow(self._me)

    def _stand_back(self, now: float) -> list[Command]:
        if self.role not in (Role.OPENING, Role.SERVING):
            return []
        served = self.role is Role.SERVING
        self.role = Role.FOLLOWING
        self.leader = self._record = None
        if not served:
            self._out_until = now + OUT_S[min(self._failures, len(OUT_S) - 1)]
            self._failures += 1
        return [GiveBack(), Follow(None), WakeAt(max(now, self._out_until)), ReadLeader()]

    def _stop(self) -> list[Command]:
        abandoned: list[Command] = [AbandonOpening()] if self.role is Role.OPENING else []
        self.role = Role.STOPPED
        return [*abandoned, GiveBack()]

    def _follow(self, server: ServerId | None) -> list[Command]:
        if server == self.leader:
            return []
        self.leader = server
        return [Follow(server)]
