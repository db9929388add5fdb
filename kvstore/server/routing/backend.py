"""The interface between the endpoints and the server behind them: operations in, results to a sink, and the leaders of
partitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvstore.partition.state.commands import NotNow, Op, Sink
from kvstore.ring.ring import Ring
from kvstore.types import PartitionId, ServerId


class Endpoints(Protocol):
    """The addresses of a server, `host:port` each."""

    @property
    def grpc(self) -> str: ...
    @property
    def resp(self) -> str: ...
    @property
    def http(self) -> str: ...
    @property
    def zone(self) -> str: ...


class Topology(Protocol):
    """A server's view of the cluster. Immutable: a change creates a new instance."""

    @property
    def ring(self) -> Ring: ...

    @property
    def leaders(self) -> Mapping[PartitionId, tuple[ServerId, int]]:
        """Leader and epoch of each partition with a known leader."""
        ...

    @property
    def servers(self) -> Mapping[ServerId, Endpoints]: ...


class Submits(Protocol):
    """Accepts operations: a Backend, or a wrapper in front of one."""

    def submit(
        self,
        ops: Sequence[Op],
        sink: Sink,
        tokens: Sequence[int],
        ring_version: int = 0,
        partition: PartitionId | None = None,
    ) -> None:
        """Carry out operations of one sink. `sink.complete(token, result)` follows once for each operation, never from
        inside this call.

        Operations on one key are done in this order. `ring_version` is the ring by which the caller chose this server,
        0 if that does not matter. `partition` is for operations that name no key.
        """
        ...


class Backend(Submits, Protocol):
    """The operations of all partitions, wherever they are led."""

    @property
    def topology(self) -> Topology: ...

    def on_topology(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` on the event loop after each change of `topology`. Returns a function that removes the
        callback."""
        ...

    def progress(self, partition: PartitionId) -> tuple[int, int]:
        """Return (sequence, leader's time in ms), at least as high as in any answer that this server gave."""
        ...

    def read_now(self, keys: list[bytes]) -> list[bytes | None] | NotNow:
        """Return the rows (kvstore.partition.state.rows) of linearizable GETs of a client that waits for nothing else.

        NOT_NOW if one answer is not here or takes more than a lookup. Then all GETs must be submitted.
        """
        ...
