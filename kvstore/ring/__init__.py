"""The consistent-hash ring."""

from kvstore.ring.builder import new_ring, with_partitions
from kvstore.ring.codec import decode, encode
from kvstore.ring.hashing import HASHES, MURMUR3, SLOTS_HASH, TOKENS, KeyHash, hash_named, hash_tag
from kvstore.ring.moves import Journey, Move, MoveId, MoveState, Pace
from kvstore.ring.placement import place_members, place_replicas
from kvstore.ring.ports import Rings
from kvstore.ring.ring import Member, PartitionState, Ring, TokenRange

__all__ = [
    "HASHES",
    "MURMUR3",
    "SLOTS_HASH",
    "TOKENS",
    "Journey",
    "KeyHash",
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
    "hash_named",
    "hash_tag",
    "new_ring",
    "place_members",
    "place_replicas",
    "with_partitions",
]
