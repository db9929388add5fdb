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


class Backend(Protocol):
    """The operations of all partitions, wherever they are led."""

    @property
    def topology(self) -> Topology: ...

    def on_topology(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` on the event loop after each change of `topology`; returns what ends that."""
        ...

    def progress(self, partition: PartitionId) -> tuple[int, int]:
        """(sequence, leader's time in ms), no smaller than those of any answer that this server gave."""
        ...

    def submit(
        self, op: Op, sink: Sink, token: int, ring_version: int = 0, partition: PartitionId | None = None
    ) -> None:
        """`sink.complete(token, result)` follows, once. `partition` is for operations that name no key of one."""
        ...

    def submit_puts(self, ops: list[Op], sink: Sink, tokens: Sequence[int]) -> None:
        """The same for puts of one sink: those of one partition go there together, in this order."""
        ...

    def read_now(self, key: bytes) -> bytes | NotNow | None:
        """Return the row (kvstore.partition.state.rows) of a linearizable GET whose answer is here and takes no more
        than a look, small and without an expiry; else NOT_NOW, and it has to be submitted."""
        ...

    def read_all_now(self, keys: list[bytes]) -> list[bytes | None] | NotNow:
        """The same of many keys; NOT_NOW if one of them has to be submitted: then all are."""
        ...
