"""The router's events and commands: what happens to operations on their way, and what is to be done about it. Decides
only."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import Moved, NotLeader, StoreError
from kvstore.partition.state.commands import Op, Sink
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.routing.flight import Flight
from kvstore.server.routing.pending import PeerSink
from kvstore.types import PartitionId, ServerId

# ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Submitted:
    """A door brings an operation for the owner of its key, or for `partition`."""

    op: Op
    sink: Sink
    token: int
    partition: PartitionId | None = None
    ring_version: int = 0
    """Version of the ring by which it was sent; 0 if that does not matter."""
    awaits_ring: bool = False
    """That ring is later than the one known here, and is being read."""


@dataclass(frozen=True, slots=True)
class SentByPeer:
    """Another server sent an operation here."""

    partition: PartitionId
    op: Op
    sink: Sink
    token: int
    ring_version: int


@dataclass(frozen=True, slots=True)
class RejectedHere:
    """The replica here was asked for what it does not own."""

    op: Op
    sink: Sink
    token: int
    moved: Moved


@dataclass(frozen=True, slots=True)
class RefusedByPeer:
    """Another server has refused operations by number, as not led there or as another partition's."""

    flight: Flight
    errors: list[tuple[int, NotLeader | Moved]]


@dataclass(frozen=True, slots=True)
class ReadsAnswered:
    """Another server has answered reads while others wait for their turn; or `is_look`: it is time to look at these."""

    flight: Flight
    is_look: bool = False


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """Operations can be sent to the flight's server."""

    flight: Flight


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link is gone. Operations from number `first_unsent` on had not left."""

    flight: Flight
    first_unsent: int


@dataclass(frozen=True, slots=True)
class TopologyChanged:
    """Another topology is in force, and all operations that were sent by the former one have left. `Expelled`
    follows."""

    topology: ClusterTopology


@dataclass(frozen=True, slots=True)
class Expelled:
    """The replicas here have turned away what waited there and is not theirs any more."""


@dataclass(frozen=True, slots=True)
class HostingChanged:
    """A replica of the partition is here from now on, or not any more."""

    partition: PartitionId
    is_here: bool


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed: what waits is looked at again."""


@dataclass(frozen=True, slots=True)
class Closing:
    """This server stops."""


Event = (
    Submitted
    | SentByPeer
    | RejectedHere
    | RefusedByPeer
    | ReadsAnswered
    | LinkOpened
    | LinkLost
    | TopologyChanged
    | Expelled
    | HostingChanged
    | Ticked
    | Closing
)

# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class SubmitHere:
    """Give the operation to the replica here."""

    partition: PartitionId
    op: Op
    sink: Sink
    token: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send what the server's flight has under this number."""

    server: ServerId
    partition: PartitionId
    number: int
    op: Op


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a link to the server, if there is none."""

    server: ServerId


@dataclass(frozen=True, slots=True)
class Fail:
    """Give the sink the error, on a later turn of the event loop."""

    sink: Sink
    token: int
    error: StoreError


@dataclass(frozen=True, slots=True)
class RejectPeer:
    """Refuse the operation of another server, which sends it out again."""

    sink: PeerSink
    op: Op
    token: int
    error: Moved


@dataclass(frozen=True, slots=True)
class ExpelHere:
    """Let the replicas here turn away what waits there and is another partition's."""


@dataclass(frozen=True, slots=True)
class ReadLeader:
    """Read again who leads the partition."""

    partition: PartitionId


@dataclass(frozen=True, slots=True)
class ReadRing:
    """Read the ring again. `version`: an operation was sent by this later one; 0: the one known here does not fit what
    a partition owns."""

    version: int = 0


Command = SubmitHere | Send | Connect | Fail | RejectPeer | ExpelHere | ReadLeader | ReadRing
