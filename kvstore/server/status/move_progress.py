"""Reports the progress of moves. Each server reports the moves whose target partitions it leads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import msgspec

from kvstore.errors import StoreError
from kvstore.partition.moves.import_driver import MoveProgress
from kvstore.partition.partition import Partition
from kvstore.ring import MoveId
from kvstore.server.peer_calls import PeerCalls
from kvstore.types import PartitionId, ServerId

log = logging.getLogger(__name__)

MOVES = PartitionId("@moves")
"""The id under which servers ask each other for moves. No partition has this id."""
CALL_S = 1.0

Copied = dict[MoveId, float]
"""Moves and the copied fraction of each, from 0 to 1."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[int, float]).decode


class MoveReports:
    """Reports the progress of moves whose target partitions this server leads."""

    def __init__(self, leading: Callable[[], Mapping[PartitionId, Partition]]) -> None:
        self._leading = leading

    def by_move(self) -> dict[MoveId, MoveProgress]:
        """Return the progress of the moves whose target partitions this server leads."""
        found: dict[MoveId, MoveProgress] = {}
        for _, replica in sorted(self._leading().items()):
            found |= replica.mover.progress()
        return found

    def copied(self) -> Copied:
        """Return the copied fraction of the moves whose target partitions this server leads."""
        return {move: progress.part for move, progress in self.by_move().items()}

    async def answer(self, server: ServerId, method: str, body: bytes) -> bytes:
        """Answer another server with the progress of the moves whose target partitions this server leads."""
        return _encode(self.copied())

    async def of_cluster(self, links: PeerCalls, own: ServerId, servers: Iterable[ServerId]) -> Copied:
        """Return the copied fraction of all moves in the cluster whose targets' leaders answer."""
        found = self.copied()
        for server in servers:
            if server == own:
                continue
            try:
                report = _decode(await links.call(server, MOVES, "moves", b"", CALL_S))
            except (StoreError, msgspec.MsgspecError) as error:
                log.info("server=%s does not report the progress of moves: %r", server, error)
            else:
                found |= {MoveId(move): part for move, part in report.items()}
        return found
