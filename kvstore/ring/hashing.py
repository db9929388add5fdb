"""Maps a key to its token, its place on the ring. Decides only.

Golden vectors pin the mapping, because any change to it would make every stored key unreachable.
"""

from __future__ import annotations

import re

from mmh3 import mmh3_32_uintdigest

_OPENS = ord("{")
_tag_of = re.compile(rb"[^{]*\{([^}]+)\}").match

TOKENS = 1 << 32
"""Tokens are 0 to TOKENS - 1."""


def hash_tag(key: bytes) -> bytes:
    """Return the part of a key that determines its partition: the bytes between the first `{` and the next `}`, or the
    whole key if there is no such part. Keys with the same hash tag are always in the same partition."""
    found = _tag_of(key)
    return found[1] if found else key


def token_of(key: bytes) -> int:
    """Return the key's token: the unsigned 32-bit murmur3 hash of its hash tag."""
    # `_OPENS` is a number, because searching for a bytes object costs more than hashing
    if _OPENS in key and (found := _tag_of(key)):
        key = found[1]
    return mmh3_32_uintdigest(key)


def tokens_of(keys: list[bytes]) -> list[int]:
    """Return the tokens of many keys, in order. Much cheaper than calling `token_of` for each key."""
    if _OPENS in b"".join(keys):
        tag_of = _tag_of
        keys = [found[1] if _OPENS in key and (found := tag_of(key)) else key for key in keys]
    return list(map(mmh3_32_uintdigest, keys))
