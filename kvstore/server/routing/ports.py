"""The interfaces through which routing uses local replicas and links to other servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvstore.partition.state.commands import NotNow, Op, Sink
from kvstore.types import PartitionId, ServerId


class LocalReplica(Protocol):
    """A replica on this node, as routing uses it. Implemented by kvstore.partition.Partition."""

    @property
    def serving(self) -> bool: ...

    def submit(self, ops: Sequence[Op], sink: Sink, tokens: Sequence[int]) -> None:
        """Execute or refuse operations in their order, and complete them at `sink`."""
        ...

    def read_now(
        self, keys: list[bytes], tokens: list[int], now: float, *, in_turn: bool = False
    ) -> list[bytes | None] | NotNow:
        """Return the rows that linearizable GETs find at the time `now`, None for an absent key. Return NOT_NOW if one
        GET takes more than a lookup; the caller must then submit all of them.

        `tokens` are the ring tokens of the keys. Several GETs do not overtake a read that waits for its turn. With
        `in_turn`, a single GET does not overtake it either.
        """
        ...

    def redirect_moved(self) -> None:
        """Reject the waiting operations that now belong to other partitions."""
        ...


class LinkPort(Protocol):
    """A link to another server, as routing uses it. Implemented by kvstore.server.peer.link.PeerLink."""

    def add(self, partition: PartitionId, number: int, op: Op) -> None:
        """Send an operation of the flight, which has this number, with the next frame."""
        ...

    def add_puts(self, partition: PartitionId, numbers: range, ops: Sequence[Op]) -> None:
        """Send puts of the flight, which have these numbers, with the next frame."""
        ...


class LinksPort(Protocol):
    """The links to all other servers. Implemented by kvstore.server.peer.links.PeerLinks."""

    @property
    def by_server(self) -> Mapping[ServerId, LinkPort]:
        """The existing link to each server."""
        ...

    def connect(self, server: ServerId) -> None:
        """Open a link to the server, unless there is one already or no address is known."""
        ...

    def flush(self) -> None:
        """Send the operations that were added during this turn of the event loop."""
        ...
