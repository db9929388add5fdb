"""Chooses the directory of a new ledger. Decides only.

The choice depends on the ledger's id and is proportional to the free space: a disk that is larger or was added later
gets more of the new ledgers, but never all of them (weighted rendezvous hashing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import log
from struct import pack


@dataclass(frozen=True, slots=True)
class Candidate:
    """A directory that can receive a new ledger, because it has not failed."""

    number: int
    free_bytes: int
    is_full: bool
    """True if the directory accepts no ordinary adds."""


def choose(ledger: int, candidates: Sequence[Candidate]) -> int:
    """Return the number of the directory for the ledger. A full directory is chosen only if all are full, for fences
    and recoveries."""
    return max(candidates, key=lambda each: (not each.is_full, _score(ledger, each))).number


def _score(ledger: int, candidate: Candidate) -> float:
    digest = blake2b(pack(">qI", ledger, candidate.number), digest_size=6).digest()
    luck = (int.from_bytes(digest) + 1) / ((1 << 48) + 1)
    return max(1, candidate.free_bytes) / -log(luck)
