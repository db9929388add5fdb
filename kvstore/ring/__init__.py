"""The consistent-hash ring."""

from kvstore.ring.builder import new_ring, place_replicas, with_partitions
from kvstore.ring.codec import decode, encode
from kvstore.ring.hashing import TOKENS, hash_tag, token_of
from kvstore.ring.ring import Member, PartitionState, Ring, TokenRange

__all__ = [
    "TOKENS",
    "Member",
    "PartitionState",
    "Ring",
    "TokenRange",
    "decode",
    "encode",
    "hash_tag",
    "new_ring",
    "place_replicas",
    "token_of",
    "with_partitions",
]
