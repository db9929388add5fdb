"""The interface through which the doors ask the server behind them: operations in, results to a sink, and who leads
what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvstore.partition.state.commands import NotNow, Op, Sink
from kvstore.ring.ring import Ring
from kvstore.types import PartitionId, ServerId


class Endpoints(Protocol):
    """Where a server listens, `host:port` each."""

    @property
    def grpc(self) -> str: ...
    @property
    def resp(self) -> str: ...
    @property
    def http(self) -> str: ...
    @property
    def zone(self) -> str: ...


class Topology(Protocol):
    """A server's view of the cluster. Immutable: a change makes another."""

    @property
    def ring(self) -> Ring: ...

    @property
    def leaders(self) -> Mapping[PartitionId, tuple[ServerId, int]]:
        """Leader and epoch of each partition that has a leader as far as is known."""
        ...

    @property
    def servers(self) -> Mapping[ServerId, Endpoints]: ...


class Submits(Protocol):
    """Takes operations: a Backend, or a wrapper in front of one."""

    def submit(
        self,
        ops: Sequence[Op],
        sink: Sink,
        tokens: Sequence[int],
        ring_version: int = 0,
        partition: PartitionId | None = None,
    ) -> None:
        """Carry out operations of one sink. `sink.complete(token, result)` follows once for each of them, never from
        inside this call.

        Operations on one key are done in this order. `ring_version`: the ring by which the caller chose this server; 0
        if that does not matter. `partition` is for operations that name no key.
        """
        ...


class Backend(Submits, Protocol):
    """The operations of all partitions, wherever they are led."""

    @property
    def topology(self) -> Topology: ...

    def on_topology(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` on the event loop after each change of `topology`; returns what ends that."""
        ...

    def progress(self, partition: PartitionId) -> tuple[int, int]:
        """(sequence, leader's time in ms), no smaller than those of any answer that this server gave."""
        ...

    def read_now(self, keys: list[bytes]) -> list[bytes | None] | NotNow:
        """Return the rows (kvstore.partition.state.rows) of linearizable GETs of a client that waits for nothing else.

        NOT_NOW if the answer to one of them is not here, or takes more than a lookup: then all have to be submitted.
        """
        ...
