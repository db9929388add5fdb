"""How far moves are: each server tells of those that come to the partitions which it leads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import msgspec

from kvstore.errors import StoreError
from kvstore.partition.moves.import_driver import MoveProgress
from kvstore.partition.partition import Partition
from kvstore.ring import MoveId
from kvstore.server.load.sampler import Calls
from kvstore.types import PartitionId, ServerId

log = logging.getLogger(__name__)

MOVES = PartitionId("@moves")
"""What servers ask each other for; no partition has such an id."""
CALL_S = 1.0

Copied = dict[MoveId, float]
"""Moves → which part of each is copied, from 0 to 1."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[int, float]).decode


class Progress:
    """One server's share."""

    def __init__(self, leading: Callable[[], Mapping[PartitionId, Partition]]) -> None:
        self._leading = leading

    def stands(self) -> dict[MoveId, MoveProgress]:
        """How far the moves are that come to partitions led here."""
        found: dict[MoveId, MoveProgress] = {}
        for _, replica in sorted(self._leading().items()):
            if replica.mover is not None:
                found |= replica.mover.progress()
        return found

    def copied(self) -> Copied:
        """Of the moves that come to partitions led here."""
        return {move: stand.part for move, stand in self.stands().items()}

    async def answer(self, server: ServerId, method: str, body: bytes) -> bytes:
        """Answer another server with the progress of the moves to here."""
        return _encode(self.copied())

    async def of_cluster(self, links: Calls, own: ServerId, servers: Iterable[ServerId]) -> Copied:
        """Of all moves whose targets' leaders answer."""
        found = self.copied()
        for server in servers:
            if server == own:
                continue
            try:
                told = _decode(await links.call(server, MOVES, "moves", b"", CALL_S))
            except (StoreError, msgspec.MsgspecError) as error:
                log.info("server=%s does not tell how far moves are: %r", server, error)
            else:
                found |= {MoveId(move): part for move, part in told.items()}
        return found
