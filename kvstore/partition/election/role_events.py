"""The events and commands of role_machine.py: events tell the role machine what has happened to the replica, and
commands are what the replica must do next. Decides only."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.partition.election.ranking import Incumbent, LeaderRecord
from kvstore.types import ServerId

# ── what happened ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LeaderRead:
    """The leader znode was read. `record` is its content, or None if the znode does not exist."""

    record: LeaderRecord | None
    is_passing: bool = False
    """True if the znode belongs to an earlier session of this process. It will vanish with that session."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """The replica has been ranked among the others: the answer to PublishAndRank."""

    rank: int
    incumbent: Incumbent
    is_fit: bool = True
    """True if most of the replicas that answered reach this one, and its disks can be written to."""


@dataclass(frozen=True, slots=True)
class LeaderLost:
    """The replicas agree that this leader is gone or unreachable, although its znode exists at this term."""

    record: LeaderRecord
    term: int
    is_confirmed: bool = True
    """True if another replica receives nothing from the leader either. False if only a refused connection shows the
    loss."""


@dataclass(frozen=True, slots=True)
class Claimed:
    pass


@dataclass(frozen=True, slots=True)
class NotClaimed:
    pass


@dataclass(frozen=True, slots=True)
class Opened:
    """The log is open, the state has caught up, and the first record is acknowledged."""


@dataclass(frozen=True, slots=True)
class OpenFailed:
    pass


@dataclass(frozen=True, slots=True)
class LeadEnded:
    """This leadership has ended, because the leader was fenced or failed."""

    has_failed: bool = False
    """True if this server was unable to lead: its engine failed, or its entries found no ack quorum for too long."""


@dataclass(frozen=True, slots=True)
class Yielded:
    """This leader has released its lease for `successor`, which is about to be notified."""

    successor: ServerId


@dataclass(frozen=True, slots=True)
class NotTaken:
    """The successor has not reported that it serves."""


@dataclass(frozen=True, slots=True)
class Offered:
    """The leader has released its lease for this replica. The replica may replace the leader's znode while the term is
    unchanged."""

    record: LeaderRecord
    term: int


@dataclass(frozen=True, slots=True)
class ClockJudged:
    """This server's clock has become good enough to lead, or is no longer good enough."""

    may_lead: bool


@dataclass(frozen=True, slots=True)
class Tick:
    pass


@dataclass(frozen=True, slots=True)
class Barred:
    """This replica must not lead because its state may be damaged, or it may lead again."""

    is_barred: bool


@dataclass(frozen=True, slots=True)
class StopReplica:
    pass


Event = (
    LeaderRead
    | Ranked
    | LeaderLost
    | Claimed
    | NotClaimed
    | Opened
    | OpenFailed
    | LeadEnded
    | Yielded
    | NotTaken
    | Offered
    | ClockJudged
    | Tick
    | Barred
    | StopReplica
)

# ── what to do about it ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class PublishAndRank:
    """Command to publish this replica's sequence, read the sequences of the others, ask them whether one still serves,
    and report Ranked."""

    asks: bool = True
    """False if no replica needs to be asked, because the replicas have just agreed that the leader is lost."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Command to report Tick at time `at`."""

    at: float


@dataclass(frozen=True, slots=True)
class Claim:
    """Command to create the leader znode, or to recreate this process's own znode in its current session. The answer is
    Claimed or NotClaimed."""


@dataclass(frozen=True, slots=True)
class ReplaceLeader:
    """Command to replace the znode of `record` by this replica's znode if the term is still `term`. The answer is
    Claimed or NotClaimed."""

    record: LeaderRecord
    term: int


@dataclass(frozen=True, slots=True)
class RemoveStale:
    """Command to delete the leader znode if it still belongs to `record`."""

    record: LeaderRecord


@dataclass(frozen=True, slots=True)
class Resign:
    """Command to delete this replica's leader znode if it exists."""


@dataclass(frozen=True, slots=True)
class OpenAsLeader:
    """Command to take over the log. The answer is Opened or OpenFailed."""


@dataclass(frozen=True, slots=True)
class AbandonOpening:
    pass


@dataclass(frozen=True, slots=True)
class EndLead:
    """Command to stop answering requests. Operations in flight have an unknown outcome."""


@dataclass(frozen=True, slots=True)
class Prove:
    """Command to append a record, to find out whether this leader is fenced. A leader that receives no requests would
    not notice otherwise."""


@dataclass(frozen=True, slots=True)
class ReadLeaderZnode:
    """Command to read the leader znode again. The answer is LeaderRead."""


@dataclass(frozen=True, slots=True)
class FollowLeader:
    """Command to send clients to this server; None if no leader is known."""

    server: ServerId | None


Command = (
    PublishAndRank
    | WakeAt
    | Claim
    | ReplaceLeader
    | RemoveStale
    | Resign
    | OpenAsLeader
    | AbandonOpening
    | EndLead
    | Prove
    | ReadLeaderZnode
    | FollowLeader
)
