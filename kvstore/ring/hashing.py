"""Maps a key to its token, its place on the ring. Decides only.

Pinned by golden vectors; a change here would lose every key.
"""

from __future__ import annotations

import re

from mmh3 import mmh3_32_uintdigest

_OPENS = ord("{")
_tag_of = re.compile(rb"[^{]*\{([^}]+)\}").match

TOKENS = 1 << 32
"""Tokens are 0 to TOKENS - 1."""


def hash_tag(key: bytes) -> bytes:
    """Return the part of a key that is hashed: the bytes between the first `{` and the next `}` if there are any,
    otherwise the whole key."""
    found = _tag_of(key)
    return found[1] if found else key


def token_of(key: bytes) -> int:
    """Return the key's token: murmur3, 32 bits, unsigned."""
    # `_OPENS` is a number, because searching for a bytes object costs more than hashing
    if _OPENS in key and (found := _tag_of(key)):
        key = found[1]
    return mmh3_32_uintdigest(key)


def tokens_of(keys: list[bytes]) -> list[int]:
    """Return the tokens of many keys, at the cost of a few calls."""
    if _OPENS in b"".join(keys):
        tag_of = _tag_of
        keys = [found[1] if _OPENS in key and (found := tag_of(key)) else key for key in keys]
    return list(map(mmh3_32_uintdigest, keys))
