"""The interfaces through which routing asks the replicas here, and the links to other servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvstore.partition.state.commands import NotNow, Op, Sink
from kvstore.types import PartitionId, ServerId


class Reads(Protocol):
    """Linearizable GETs that take no more than a look: kvstore.partition.leading.leader_reads.LeaderReads."""

    def now(self, key: bytes, token: int, now: float) -> bytes | NotNow | None:
        """Return the row of a GET at `now`; NOT_NOW if it takes more, and has to be submitted. `token` is the key's."""
        ...

    def all_now(self, keys: list[bytes], tokens: list[int], now: float) -> list[bytes | None] | NotNow:
        """The same of many keys; NOT_NOW if it takes more for any of them, or reads that came before wait."""
        ...


class LocalReplica(Protocol):
    """A replica on this node: kvstore.partition.Partition."""

    @property
    def serving(self) -> bool: ...

    def submit(self, op: Op, sink: Sink, token: int) -> None: ...

    def submit_puts(self, ops: list[Op], sink: Sink, tokens: Sequence[int]) -> bool:
        """The same for puts of one sink, in this order. False, and none is taken, unless this replica leads."""
        ...

    @property
    def reads(self) -> Reads | None:
        """The reads of its lead; None if it does not lead."""
        ...

    def expel(self) -> None:
        """Turn away what waits here and is another partition's."""
        ...


class Lanes(Protocol):
    """Operations that leave for another server with the next frame: kvstore.server.peer.lanes.Lanes."""

    def add(self, partition: PartitionId, number: int, op: Op) -> None:
        """Send an operation that is in the server's flight."""
        ...

    def add_puts(self, partition: PartitionId, numbers: range, ops: list[Op]) -> None:
        """The same for puts."""
        ...


class Links(Protocol):
    """Links to other servers: kvstore.server.peer.links.PeerLinks."""

    @property
    def lanes(self) -> Mapping[ServerId, Lanes]:
        """The lanes to each server that there is a link to."""
        ...

    def connect(self, server: ServerId) -> None:
        """Open a link to the server, if there is none and an address is known."""
        ...

    def flush(self) -> None:
        """Send what waits for this turn's frame."""
        ...
