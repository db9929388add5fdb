"""The consistent-hash ring."""

from kvstore.ring.builder import new_ring, with_partitions
from kvstore.ring.codec import decode, encode
from kvstore.ring.hashing import TOKENS, hash_tag, token_of
from kvstore.ring.moves import Journey, Move, MoveId, MoveState, Pace
from kvstore.ring.placement import place_members, place_replicas
from kvstore.ring.ports import Rings
from kvstore.ring.ring import Member, PartitionState, Ring, TokenRange

__all__ = [
    "TOKENS",
    "Journey",
    "Member",
    "Move",
    "MoveId",
    "MoveState",
    "Pace",
    "PartitionState",
    "Ring",
    "Rings",
    "TokenRange",
    "decode",
    "encode",
    "hash_tag",
    "new_ring",
    "place_members",
    "place_replicas",
    "token_of",
    "with_partitions",
]
