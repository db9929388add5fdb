"""The events that the router handles and the commands that it returns. Decides only."""

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
    """An endpoint submits an operation for the partition that owns its key, or for `partition`."""

    op: Op
    sink: Sink
    token: int
    partition: PartitionId | None = None
    ring_version: int = 0
    """Version of the ring that the sender used; 0 if that does not matter."""
    awaits_ring: bool = False
    """True if the sender used a later ring than this server knows, and this server is reading the later ring."""


@dataclass(frozen=True, slots=True)
class SentByPeer:
    """Another server sent an operation to this server."""

    partition: PartitionId
    op: Op
    sink: Sink
    token: int
    ring_version: int


@dataclass(frozen=True, slots=True)
class RejectedHere:
    """The local replica rejected an operation because it does not own the key."""

    op: Op
    sink: Sink
    token: int
    moved: Moved


@dataclass(frozen=True, slots=True)
class RefusedByPeer:
    """Another server refused operations, given by number, because it does not lead their partition or because they
    belong to another partition."""

    flight: Flight
    errors: list[tuple[int, NotLeader | Moved]]


@dataclass(frozen=True, slots=True)
class ReadsAnswered:
    """Another server answered reads while others wait for their turn. With `is_check`, the waiting reads must be
    checked for overdue ones."""

    flight: Flight
    is_check: bool = False


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """Operations can now be sent to the flight's server."""

    flight: Flight


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link was lost. Operations numbered `first_unsent` and higher had not been sent."""

    flight: Flight
    first_unsent: int


@dataclass(frozen=True, slots=True)
class TopologyChanged:
    """A new topology is in force, and all operations that were routed by the previous one have been sent. An
    `MovedRejected` event follows."""

    topology: ClusterTopology


@dataclass(frozen=True, slots=True)
class MovedRejected:
    """The local replicas have rejected the waiting operations that now belong to other partitions."""


@dataclass(frozen=True, slots=True)
class HostingChanged:
    """This server has a replica of the partition from now on, or no longer."""

    partition: PartitionId
    is_here: bool


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed, so waiting operations must be checked again."""


@dataclass(frozen=True, slots=True)
class Closing:
    """This server is stopping."""


Event = (
    Submitted
    | SentByPeer
    | RejectedHere
    | RefusedByPeer
    | ReadsAnswered
    | LinkOpened
    | LinkLost
    | TopologyChanged
    | MovedRejected
    | HostingChanged
    | Ticked
    | Closing
)

# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class SubmitHere:
    """Command to give the operation to the local replica."""

    partition: PartitionId
    op: Op
    sink: Sink
    token: int


@dataclass(frozen=True, slots=True)
class Send:
    """Command to send the operation, which has this number in the flight of the server."""

    server: ServerId
    partition: PartitionId
    number: int
    op: Op


@dataclass(frozen=True, slots=True)
class Connect:
    """Command to open a link to the server, if there is none."""

    server: ServerId


@dataclass(frozen=True, slots=True)
class Fail:
    """Command to complete an operation with an error on a later turn of the event loop."""

    sink: Sink
    token: int
    error: StoreError


@dataclass(frozen=True, slots=True)
class RejectPeer:
    """Command to refuse an operation that another server sent. That server then sends it again."""

    sink: PeerSink
    op: Op
    token: int
    error: Moved


@dataclass(frozen=True, slots=True)
class RejectMoved:
    """Command to make the local replicas reject waiting operations whose keys belong to other partitions."""


@dataclass(frozen=True, slots=True)
class ReadLeader:
    """Command to read the partition's leader again."""

    partition: PartitionId


@dataclass(frozen=True, slots=True)
class ReadRing:
    """Command to read the ring again. `version` is the newer ring version that an operation named. It is 0 if a
    partition rejected a key that the known ring assigns to it."""

    version: int = 0


Command = SubmitHere | Send | Connect | Fail | RejectPeer | RejectMoved | ReadLeader | ReadRing
