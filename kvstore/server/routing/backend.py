"""The interface between the endpoints and the server behind them: endpoints submit operations, results go to a sink,
and a topology tells which server leads each partition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore.partition.state.commands import NotNow, Op, Sink
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.types import PartitionId


class Submits(Protocol):
    """Accepts operations. Implemented by every Backend and by wrappers of a Backend."""

    def submit(
        self,
        ops: Sequence[Op],
        sink: Sink,
        tokens: Sequence[int],
        ring_version: int = 0,
        partition: PartitionId | None = None,
    ) -> None:
        """Execute operations and deliver their results to `sink`. `sink.complete(token, result)` is called once for
        each operation, with the token at the operation's place in `tokens`, and never from inside this call.

        Operations on one key are executed in the order of `ops`. `ring_version` is the version of the ring that the
        caller used to choose this server; 0 if that does not matter. Pass `partition` for operations that name no key.
        """
        ...


class Backend(Submits, Protocol):
    """Executes operations on any partition, whichever server leads it."""

    @property
    def topology(self) -> ClusterTopology: ...

    def on_topology(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` on the event loop after each change of `topology`. Returns a function that removes the
        callback."""
        ...

    def progress(self, partition: PartitionId) -> tuple[int, int]:
        """Return (sequence, leader's time in ms) of the partition. Both are at least as high as in any answer that
        this server has given."""
        ...

    def read_now(self, keys: list[bytes]) -> list[bytes | None] | NotNow:
        """Return the rows (kvstore.partition.state.rows) that linearizable GETs of `keys` find, None for an absent key.

        Return NOT_NOW if the server cannot give one of the answers at once, or if one takes more than a lookup. The
        caller must then submit all GETs. Use this only for a client that has no other operation in progress.
        """
        ...
