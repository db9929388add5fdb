"""Checks whether the ranges that several partitions own cover all tokens, each exactly once. Decides only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvstore.ring.hashing import TOKENS

Spans = Iterable[tuple[int, int]]
"""Ranges of tokens as (first, last), both included."""


def flaw(owned: Mapping[str, Spans]) -> str:
    """Describe the first token that has no owner or two owners. Returns an empty string if every token has exactly one
    owner."""
    last, before = -1, ""
    for first, end, owner in sorted((first, end, owner) for owner, spans in owned.items() for first, end in spans):
        if first > last + 1:
            return f"nobody owns tokens {last + 1:08x} to {first - 1:08x}"
        if first <= last:
            return f"{before} and {owner} own token {first:08x}"
        last, before = end, owner
    return f"nobody owns tokens {last + 1:08x} to {TOKENS - 1:08x}" if last < TOKENS - 1 else ""
