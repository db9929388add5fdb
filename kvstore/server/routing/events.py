"""The router's events and commands: what happens to operations in transit, and what to do about it. Decides only."""

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
    """An endpoint submits an operation for the owner of its key, or for `partition`."""

    op: Op
    sink: Sink
    token: int
    partition: PartitionId | None = None
    ring_version: int = 0
    """Version of the ring by which it was sent; 0 if that does not matter."""
    awaits_ring: bool = False
    """True if that ring is later than the known one and is being read."""


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
    """The local replica was asked for a key that it does not own."""

    op: Op
    sink: Sink
    token: int
    moved: Moved


@dataclass(frozen=True, slots=True)
class RefusedByPeer:
    """Another server has refused operations, by number, as not led there or as belonging to another partition."""

    flight: Flight
    errors: list[tuple[int, NotLeader | Moved]]


@dataclass(frozen=True, slots=True)
class ReadsAnswered:
    """Another server has answered reads while others wait for their turn. With `is_look`, it is time to check the
    waiting reads."""

    flight: Flight
    is_look: bool = False


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """Operations can be sent to the flight's server."""

    flight: Flight


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link is gone. Operations from number `first_unsent` on had not been sent."""

    flight: Flight
    first_unsent: int


@dataclass(frozen=True, slots=True)
class TopologyChanged:
    """Another topology is in force, and all operations based on the former one have been sent. `Expelled` follows."""

    topology: ClusterTopology


@dataclass(frozen=True, slots=True)
class Expelled:
    """The local replicas have rejected waiting operations that belong to other partitions now."""


@dataclass(frozen=True, slots=True)
class HostingChanged:
    """A replica of the partition is here from now on, or no longer."""

    partition: PartitionId
    is_here: bool


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed: waiting operations are checked again."""


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
    """Command to give the operation to the local replica."""

    partition: PartitionId
    op: Op
    sink: Sink
    token: int


@dataclass(frozen=True, slots=True)
class Send:
    """Command to send the operation with this number in the server's flight."""

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
    """Command to complete an operation with the error, in a later turn of the event loop."""

    sink: Sink
    token: int
    error: StoreError


@dataclass(frozen=True, slots=True)
class RejectPeer:
    """Command to refuse an operation that another server sent. That server sends it again."""

    sink: PeerSink
    op: Op
    token: int
    error: Moved


@dataclass(frozen=True, slots=True)
class ExpelHere:
    """Command to make the local replicas reject waiting operations whose keys belong to other partitions."""


@dataclass(frozen=True, slots=True)
class ReadLeader:
    """Command to read the partition's leader again."""

    partition: PartitionId


@dataclass(frozen=True, slots=True)
class ReadRing:
    """Command to read the ring again. `version` is the newer ring that an operation named, or 0 if the known ring does
    not match what a partition owns."""

    version: int = 0


Command = SubmitHere | Send | Connect | Fail | RejectPeer | ExpelHere | ReadLeader | ReadRing
