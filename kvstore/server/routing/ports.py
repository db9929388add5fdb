"""The interfaces of routing to the local replicas and to the links to other servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvstore.partition.state.commands import NotNow, Op, Sink
from kvstore.types import PartitionId, ServerId


class LocalReplica(Protocol):
    """A replica on this node. Implemented by kvstore.partition.Partition."""

    @property
    def serving(self) -> bool: ...

    def submit(self, ops: Sequence[Op], sink: Sink, tokens: Sequence[int]) -> None:
        """Carry out operations of one sink in order, or refuse them."""
        ...

    def read_now(
        self, keys: list[bytes], tokens: list[int], now: float, *, in_turn: bool = False
    ) -> list[bytes | None] | NotNow:
        """Return the rows that linearizable GETs find at `now`. NOT_NOW if one of them takes more than a lookup; then
        all must be submitted.

        `tokens` are the tokens of the keys. Several GETs do not overtake a read that waits for its turn; with
        `in_turn`, neither does a single GET.
        """
        ...

    def redirect_moved(self) -> None:
        """Reject waiting operations that belong to other partitions."""
        ...


class LinkPort(Protocol):
    """A link to another server. Implemented by kvstore.server.peer.link.PeerLink."""

    def add(self, partition: PartitionId, number: int, op: Op) -> None:
        """Send an operation of the flight with the next frame."""
        ...

    def add_puts(self, partition: PartitionId, numbers: range, ops: Sequence[Op]) -> None:
        """Send puts of the flight with the next frame."""
        ...


class LinksPort(Protocol):
    """Links to other servers. Implemented by kvstore.server.peer.links.PeerLinks."""

    @property
    def by_server(self) -> Mapping[ServerId, LinkPort]:
        """The link to each server that has one."""
        ...

    def connect(self, server: ServerId) -> None:
        """Open a link to the server, if there is none and an address is known."""
        ...

    def flush(self) -> None:
        """Send what waits for this turn's frame."""
        ...
