"""Damage to bytes."""

from __future__ import annotations


def flipped(data: bytes, bit: int) -> bytes:
    """Return the data with one bit changed."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
