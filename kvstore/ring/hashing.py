"""Maps a key to its token, its place on the ring. Decides only.

Golden vectors pin each mapping, because any change to it would make every stored key unreachable.
"""

from __future__ import annotations

import re
from binascii import crc_hqx
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import repeat

from mmh3 import mmh3_32_uintdigest

from kvstore.errors import InvalidRequest

_OPENS = ord("{")
_tag_of = re.compile(rb"[^{]*\{([^}]+)\}").match

TOKENS = 1 << 32
"""Tokens are 0 to TOKENS - 1."""


@dataclass(frozen=True, slots=True)
class KeyHash:
    """A mapping of keys to tokens. A cluster has one from its founding and never changes it."""

    name: str
    token_of: Callable[[bytes], int]
    """Return the key's token, which depends on its hash tag only."""
    tokens_of: Callable[[list[bytes]], list[int]]
    """Return the tokens of many keys, in order. Much cheaper than calling `token_of` for each key."""
    unit: int = 1
    """Number of adjacent tokens that always have one owner. The first token of each unit is a multiple of it."""

    @property
    def units(self) -> int:
        """The number of units, which is the maximum number of partitions."""
        return TOKENS // self.unit

    def ends_unit(self, token: int) -> bool:
        """Return True if the token is the last one of its unit, so that a range may end there."""
        return (token + 1) % self.unit == 0


class KeyHashName(StrEnum):
    """The names of the key hashes, as they are in rings and options."""

    SLOTS = "slots"
    MURMUR3 = "murmur3"


SLOTS = 1 << 14
"""The number of slots of Redis Cluster."""
_SLOT_BITS = 18
"""A token is the slot and this number of bits of murmur3."""


def slot_of(key: bytes) -> int:
    """Return the key's slot in Redis Cluster: CRC-16 of its hash tag, modulo 16,384."""
    return crc_hqx(hash_tag(key), 0) % SLOTS


def slot_of_token(token: int) -> int:
    """Return the slot of the keys that have this token by the key hash `slots`."""
    return token >> _SLOT_BITS


def tokens_of_slot(slot: int) -> tuple[int, int]:
    """Return the first and last token of the slot by the key hash `slots`. One partition owns all of them."""
    return slot << _SLOT_BITS, (slot + 1 << _SLOT_BITS) - 1


def hash_tag(key: bytes) -> bytes:
    """Return the part of a key that determines its partition: the bytes between the first `{` and the next `}`, or the
    whole key if there is no such part. Keys with the same hash tag are always in the same partition."""
    found = _tag_of(key)
    return found[1] if found else key


def _murmur3_token_of(key: bytes) -> int:
    # `_OPENS` is a number, because searching for a bytes object costs more than hashing
    if _OPENS in key and (found := _tag_of(key)):
        key = found[1]
    return mmh3_32_uintdigest(key)


def _murmur3_tokens_of(keys: list[bytes]) -> list[int]:
    return list(map(mmh3_32_uintdigest, _hash_tags(keys)))


def _hash_tags(keys: list[bytes]) -> list[bytes]:
    if _OPENS not in b"".join(keys):
        return keys
    tag_of = _tag_of
    return [found[1] if _OPENS in key and (found := tag_of(key)) else key for key in keys]


def _slots_token_of(key: bytes) -> int:
    if _OPENS in key and (found := _tag_of(key)):
        key = found[1]
    return (crc_hqx(key, 0) & 0x3FFF) << 18 | mmh3_32_uintdigest(key) >> 14


def _slots_tokens_of(keys: list[bytes]) -> list[int]:
    tags = _hash_tags(keys)
    hashes = zip(map(crc_hqx, tags, repeat(0)), map(mmh3_32_uintdigest, tags), strict=True)
    return [(crc & 0x3FFF) << 18 | murmur >> 14 for crc, murmur in hashes]


MURMUR3 = KeyHash(KeyHashName.MURMUR3.value, _murmur3_token_of, _murmur3_tokens_of)
"""The token is the unsigned 32-bit murmur3 hash of the hash tag."""

# docs/protocol.md H14
SLOTS_HASH = KeyHash(KeyHashName.SLOTS.value, _slots_token_of, _slots_tokens_of, 1 << _SLOT_BITS)
"""The first 14 bits of the token are the slot of the key in Redis Cluster, the other 18 bits are the first bits of
murmur3 of the hash tag. A slot never has two owners."""

HASHES = {each.name: each for each in (MURMUR3, SLOTS_HASH)}
"""The key hashes by name."""


def hash_named(name: str) -> KeyHash:
    """Return the key hash of this name. An empty name, from a server or a file older than key hashes, is murmur3.
    Raises InvalidRequest for an unknown name."""
    found = HASHES.get(name or MURMUR3.name)
    if found is None:
        raise InvalidRequest(f"expected one of the key hashes {', '.join(HASHES)}, got {name!r}; upgrade kvstore")
    return found
