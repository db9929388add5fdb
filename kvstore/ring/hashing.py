"""Key → token: where a key stands on the ring. Pure. Pinned by golden vectors; a change here would lose every key."""

from __future__ import annotations

from collections.abc import Iterable

from mmh3 import mmh3_32_uintdigest

_OPENS = ord("{")

TOKENS = 1 << 32
"""Tokens are 0 to TOKENS - 1."""


def hash_tag(key: bytes) -> bytes:
    """Return the part of a key that is hashed: the bytes between the first `{` and the next `}` if there are any, else
    the whole key."""
    start = key.find(b"{")
    if start < 0:
        return key
    end = key.find(b"}", start + 1)
    return key[start + 1 : end] if end > start + 1 else key


def token_of(key: bytes) -> int:
    """The key's token: murmur3, 32 bits, unsigned."""
    if _OPENS in key:  # a number: to look for bytes costs more than to hash them
        key = hash_tag(key)
    return mmh3_32_uintdigest(key)


def tokens_of(keys: Iterable[bytes]) -> list[int]:
    """The tokens of many keys, at the price of one call."""
    murmur, opens = mmh3_32_uintdigest, _OPENS
    return [murmur(key) if opens not in key else token_of(key) for key in keys]
