"""Maps a key to its token, its place on the ring. Decides only.

Golden vectors pin each mapping, because any change to it would make every stored key unreachable.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

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


MURMUR3 = KeyHash("murmur3", _murmur3_token_of, _murmur3_tokens_of)
"""The token is the unsigned 32-bit murmur3 hash of the hash tag."""

HASHES = {each.name: each for each in (MURMUR3,)}
"""The key hashes by name."""


def hash_named(name: str) -> KeyHash:
    """Return the key hash of this name. An empty name, from a server or a file older than key hashes, is murmur3.
    Raises InvalidRequest for an unknown name."""
    found = HASHES.get(name or MURMUR3.name)
    if found is None:
        raise InvalidRequest(f"expected one of the key hashes {', '.join(HASHES)}, got {name!r}; upgrade kvstore")
    return found
