"""Decides the role of one replica, on its way to the lead and back. Decides only; replica.py carries out the commands.

    FOLLOWING ──no leader──> CANDIDATE ──its turn──> CLAIMING ──won──> OPENING ──served its first record──> SERVING
        ^          ^            │                       │                │                                    │
        └──────────┴── another leads / lost the race ───┴─── resigned ───┴────────────── fenced ──────────────┘

    SERVING ──released for a successor──> YIELDING ──its znode is there──> FOLLOWING
                                             └───it did not take over──> CLAIMING

A CANDIDATE waits for its turn to claim the znode. The znode never stops a leader. A leader that serves and finds its
znode gone claims it again. A leader that finds another replica's znode continues until it is fenced, because
until then no other replica can have acknowledged anything (docs/protocol.md, Election).
"""

from __future__ import annotations

from enum import Enum, auto
from math import inf, isinf
from typing import assert_never

from kvstore.partition.election.ranking import (
    ASK_AGAIN_S,
    INCUMBENT_GRACE_S,
    OUT_S,
    RANK_DELAY_S,
    SETTLED_S,
    SILENT_GRACE_S,
    UNFIT_GRACE_S,
    Incumbent,
    LeaderRecord,
)
from kvstore.partition.election.role_events import (
    AbandonOpening,
    Barred,
    Claim,
    Claimed,
    ClockJudged,
    Command,
    EndLead,
    Event,
    FollowLeader,
    LeadEnded,
    LeaderLost,
    LeaderRead,
    NotClaimed,
    NotTaken,
    Offered,
    OpenAsLeader,
    Opened,
    OpenFailed,
    Prove,
    PublishAndRank,
    Ranked,
    ReadLeaderZnode,
    RemoveStale,
    ReplaceLeader,
    Resign,
    StopReplica,
    Tick,
    WakeAt,
    Yielded,
)
from kvstore.types import ServerId


class ReplicaRole(Enum):
    """The role of a replica; the module's diagram shows the transitions."""

    FOLLOWING = auto()
    CANDIDATE = auto()
    CLAIMING = auto()
    OPENING = auto()
    SERVING = auto()
    YIELDING = auto()
    STOPPED = auto()


_LEADING = (ReplicaRole.CANDIDATE, ReplicaRole.CLAIMING, ReplicaRole.OPENING, ReplicaRole.SERVING)
"""Roles that a barred replica never has."""
_GRACE_S = {Incumbent.GONE: 0.0, Incumbent.SILENT: SILENT_GRACE_S, Incumbent.SERVES: INCUMBENT_GRACE_S}


class RoleMachine:
    """Turns each event into the commands that it requires. Carries out none of them."""

    def __init__(self, me: ServerId, nonce: str) -> None:
        self.role = ReplicaRole.FOLLOWING
        self.leader: ServerId | None = None
        self.is_barred = False
        """True if the replica may neither lead nor run for election (docs/protocol.md, P35)."""
        self._me, self._nonce = me, nonce
        self._record: LeaderRecord | None = None
        """The leader znode that is being followed."""
        self._replaces: tuple[LeaderRecord, int] | None = None
        """The leader znode that this replica is replacing, or is about to replace, and the term at which it was
        read."""
        self._graced_from = inf
        """When an incumbent was first asked since there was last a leader."""
        self._asks_again = False
        """True if the incumbent is to be asked again before this replica claims."""
        self._may_lead = True
        """False while the server's clock is not good enough."""
        self._claim_at = 0.0
        self._out_until = 0.0
        self._failures = 0
        self._has_led = False
        """True from a claim of the lead until the leader znode is read as another's, or as missing."""
        self._deposed_by: ServerId | None = None
        """The leader, if its znode has replaced this replica's."""
        self._served_at = 0.0
        """When the present or the last leadership began."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """Handle one event, and return the commands to carry out, in order. All events go through this method. `now` is
        the boot-time clock in seconds."""
        if self.role is ReplicaRole.STOPPED:
            return []
        match event:
            case LeaderRead(record, is_passing):
                return self._read(record, is_passing, now)
            case Ranked(rank, incumbent, is_fit):
                return self._ranked(rank, incumbent, is_fit, now)
            case LeaderLost():
                return self._leader_lost(event, now)
            case Tick():
                return self._tick(now)
            case Claimed():
                return self._claimed()
            case NotClaimed():
                return self._not_claimed()
            case Opened():
                return self._opened(now)
            case OpenFailed() | LeadEnded():
                return self._step_back(now, has_failed=isinstance(event, OpenFailed) or event.has_failed)
            case Yielded(successor):
                return self._yielded(successor)
            case NotTaken():
                return self._not_taken()
            case Offered(record, term):
                return self._offered(record, term)
            case Barred() | ClockJudged():
                return self._bar(event.is_barred, now) if isinstance(event, Barred) else self._judged(event.may_lead)
            case StopReplica():
                return self._stop()
            case _:
                assert_never(event)

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold: a replica that serves, or opens the log to serve, sends
        clients to no other server."""
        assert self.role is not ReplicaRole.SERVING or self.leader == self._me
        assert self.role is not ReplicaRole.YIELDING or self.leader != self._me
        assert self._failures >= 0
        assert not (self.is_barred and self.role in _LEADING), f"barred, and {self.role.name}"

    def _read(self, record: LeaderRecord | None, is_passing: bool, now: float) -> list[Command]:
        if record is None:
            return self._no_leader(now)
        if record.nonce == self._nonce:
            return self._own_read(is_passing)
        if record.server == self._me:
            # left by this server's former process: the lock on the directory proves that it is gone
            return [RemoveStale(record)]
        if self.role is ReplicaRole.SERVING:
            return [Prove()]
        if (
            self.role in (ReplicaRole.CANDIDATE, ReplicaRole.CLAIMING)
            and self._replaces is not None
            and record == self._replaces[0]
        ):
            return []
        abandoned: list[Command] = [AbandonOpening()] if self.role is ReplicaRole.OPENING else []
        self.role = ReplicaRole.FOLLOWING
        self._deposed_by = record.server if self._has_led or record.server == self._deposed_by else None
        self._has_led = False
        self._record, self._graced_from = record, inf
        return abandoned + self._follow(record.server)

    def _own_read(self, is_passing: bool) -> list[Command]:
        if self.role in (ReplicaRole.OPENING, ReplicaRole.SERVING):
            return [Claim()] if is_passing else []  # before it vanishes, so that no other replica sees that
        return [] if self.role in (ReplicaRole.CLAIMING, ReplicaRole.YIELDING) else [Resign()]

    # docs/protocol.md P23
    def _no_leader(self, now: float) -> list[Command]:
        if self.role in (ReplicaRole.SERVING, ReplicaRole.OPENING):
            return [Claim()]  # the session was lost, the lead was not
        if self.role in (ReplicaRole.CANDIDATE, ReplicaRole.CLAIMING):
            return []
        self._has_led = False
        commands = self._follow(None)
        if self.is_barred or not self._may_lead:
            return commands
        if now < self._out_until:
            return [*commands, WakeAt(self._out_until)]
        self.role, self._replaces = ReplicaRole.CANDIDATE, None
        self._claim_at = inf
        return [*commands, PublishAndRank()]

    # docs/protocol.md P25, P41
    def _ranked(self, rank: int, incumbent: Incumbent, is_fit: bool, now: float) -> list[Command]:
        if self.role is not ReplicaRole.CANDIDATE:
            return []
        if self._replaces is not None:
            if not is_fit:
                self.role = ReplicaRole.FOLLOWING
                return [ReadLeaderZnode()]
            self._asks_again, self._claim_at = False, now + rank * RANK_DELAY_S
            return [WakeAt(self._claim_at)]
        self._graced_from = min(self._graced_from, now)
        grace_s = max(_GRACE_S[incumbent], 0.0 if is_fit else UNFIT_GRACE_S)
        self._asks_again = now < self._graced_from + grace_s
        self._claim_at = now + (ASK_AGAIN_S if self._asks_again else rank * RANK_DELAY_S)
        return [WakeAt(self._claim_at)]

    # docs/protocol.md P40
    def _leader_lost(self, lost: LeaderLost, now: float) -> list[Command]:
        """Replace the leader's znode when this replica's turn comes. There is no moment without a znode, in which the
        former leader, if it still serves, would claim it again.

        A leader that has deposed this replica is replaced only if another replica confirms the loss. Otherwise two
        replicas that refuse each other's connections would depose each other forever.
        """
        record, term = lost.record, lost.term
        if self.role is not ReplicaRole.FOLLOWING or record != self._record:
            return []
        if not lost.is_confirmed and record.server == self._deposed_by:
            return []
        if self.is_barred or not self._may_lead or now < self._out_until:
            return []
        self.role, self._replaces, self._record = ReplicaRole.CANDIDATE, (record, term), None
        self._claim_at = inf
        return [*self._follow(None), PublishAndRank(asks=False)]

    # docs/protocol.md P25
    def _tick(self, now: float) -> list[Command]:
        if self.role is ReplicaRole.CANDIDATE:
            if now < self._claim_at:  # the timer's clock may run ahead of the boot-time clock by a little
                return [] if isinf(self._claim_at) else [WakeAt(self._claim_at)]
            if self._asks_again:
                self._claim_at = inf
                return [PublishAndRank()]
            self.role = ReplicaRole.CLAIMING
            return [Claim() if self._replaces is None else ReplaceLeader(*self._replaces)]
        if self.role is ReplicaRole.FOLLOWING and self.leader is None:
            return [ReadLeaderZnode()]
        return []

    def _claimed(self) -> list[Command]:
        if self.role is not ReplicaRole.CLAIMING:
            return [] if self.role in (ReplicaRole.OPENING, ReplicaRole.SERVING) else [Resign()]
        self.role, self._has_led = ReplicaRole.OPENING, True
        return [OpenAsLeader()]

    def _not_claimed(self) -> list[Command]:
        if self.role is not ReplicaRole.CLAIMING:
            return [ReadLeaderZnode()]
        self.role = ReplicaRole.FOLLOWING
        return [*self._follow(None), ReadLeaderZnode()]

    def _opened(self, now: float) -> list[Command]:
        if self.role is not ReplicaRole.OPENING:
            return []
        self.role, self.leader, self._graced_from, self._served_at = ReplicaRole.SERVING, self._me, inf, now
        return [FollowLeader(self._me)]  # also if clients were sent here before: they can be answered now

    def _yielded(self, successor: ServerId) -> list[Command]:
        """Send clients to the successor at once; it lets them wait until it serves."""
        if self.role is not ReplicaRole.SERVING:
            return []
        self.role, self._record, self._failures, self._has_led = ReplicaRole.YIELDING, None, 0, False
        return self._follow(successor)

    def _not_taken(self) -> list[Command]:
        if self.role is not ReplicaRole.YIELDING:
            return []
        if self.is_barred or not self._may_lead:
            self.role = ReplicaRole.FOLLOWING
            return [Resign(), *self._follow(None)]
        self.role, self._replaces = ReplicaRole.CLAIMING, None
        return [*self._follow(None), Claim()]

    def _offered(self, record: LeaderRecord, term: int) -> list[Command]:
        if self.role not in (ReplicaRole.FOLLOWING, ReplicaRole.CANDIDATE) or self.is_barred or not self._may_lead:
            return []
        self.role, self._replaces = ReplicaRole.CLAIMING, (record, term)
        return [*self._follow(self._me), ReplaceLeader(record, term)]

    def _judged(self, may_lead: bool) -> list[Command]:
        """Note whether the clock allows leading. A replica that leads, or is about to, gives the lead up by itself
        (docs/protocol.md, P29)."""
        self._may_lead = may_lead
        if not may_lead and self.role is ReplicaRole.CANDIDATE:
            self.role = ReplicaRole.FOLLOWING
        return [ReadLeaderZnode()] if may_lead else []

    # docs/protocol.md P41
    def _step_back(self, now: float, *, has_failed: bool) -> list[Command]:
        """Stay out of elections after a failure, longer each time, until a leadership has lasted for SETTLED_S."""
        if self.role not in (ReplicaRole.OPENING, ReplicaRole.SERVING):
            return []
        if self.role is ReplicaRole.SERVING and (not has_failed or now - self._served_at >= SETTLED_S):
            self._failures = 0
        self.role = ReplicaRole.FOLLOWING
        self.leader = self._record = None
        if has_failed:
            self._out_until = now + OUT_S[min(self._failures, len(OUT_S) - 1)]
            self._failures += 1
        return [Resign(), FollowLeader(None), WakeAt(max(now, self._out_until)), ReadLeaderZnode()]

    def _bar(self, is_barred: bool, now: float) -> list[Command]:
        self.is_barred = is_barred
        if not is_barred:
            return [ReadLeaderZnode()]
        if self.role is ReplicaRole.SERVING:
            return [EndLead(), *self._step_back(now, has_failed=False)]
        if self.role is ReplicaRole.OPENING:
            return [AbandonOpening(), *self._step_back(now, has_failed=True)]
        if self.role in (ReplicaRole.CANDIDATE, ReplicaRole.CLAIMING):  # a claim that is won after this is resigned
            self.role = ReplicaRole.FOLLOWING
        return []

    def _stop(self) -> list[Command]:
        abandoned: list[Command] = [AbandonOpening()] if self.role is ReplicaRole.OPENING else []
        self.role = ReplicaRole.STOPPED
        return [*abandoned, Resign()]

    def _follow(self, server: ServerId | None) -> list[Command]:
        if server == self.leader:
            return []
        self.leader = server
        return [FollowLeader(server)]
