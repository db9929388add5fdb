"""The ring: which partition owns a token. Pure and immutable; a new version is built aside and swapped in whole.

Each token closes a range that starts after the token before it: (previous token, token]. The range after the last token
wraps round to the first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from sortedcontainers import SortedDict

from kvstore.ring.hashing import TOKENS, token_of
from kvstore.types import PartitionId, ServerId


class PartitionState(StrEnum):
    SERVING = "serving"
    JOINING = "joining"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class Member:
    """A partition's place in the ring."""

    id: PartitionId
    replicas: tuple[ServerId, ...]
    """In order of preference for the lead."""
    state: PartitionState = PartitionState.SERVING

    def __post_init__(self) -> None:
        if len(set(self.replicas)) != len(self.replicas):
            raise ValueError(f"partition {self.id}: want replicas on distinct servers, got {self.replicas}")


class TokenRange(NamedTuple):
    """The tokens t with start < t <= end; for start >= end they wrap round."""

    start: int
    end: int
    owner: PartitionId

    @property
    def size(self) -> int:
        return (self.end - self.start) % TOKENS or TOKENS


@dataclass(frozen=True, eq=False)
class Ring:
    """One version of the ring. Equal versions of one cluster are equal rings."""

    version: int
    partitions: Mapping[PartitionId, Member]
    tokens: SortedDict[int, PartitionId]
    """Never changed after construction."""
    _bounds: list[int] = field(init=False, repr=False)
    _owners: list[PartitionId] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        strangers = sorted(set(self.tokens.values()) - set(self.partitions))
        if strangers:
            raise ValueError(f"ring version {self.version}: tokens of unknown partitions {strangers}")
        if not self.tokens:
            raise ValueError(f"ring version {self.version}: want at least one token")
        first, last = self.tokens.peekitem(0)[0], self.tokens.peekitem(-1)[0]
        if first < 0 or last >= TOKENS:
            raise ValueError(f"ring version {self.version}: want tokens from 0 to {TOKENS - 1}, got {first} to {last}")
        # The range that wraps is listed twice, so that a lookup is one bisection without a special case.
        object.__setattr__(self, "_bounds", [*self.tokens.keys(), TOKENS])
        object.__setattr__(self, "_owners", [*self.tokens.values(), self.tokens.peekitem(0)[1]])

    def owner_of(self, token: int) -> PartitionId:
        """The partition that owns a token."""
        return self._owners[bisect_left(self._bounds, token)]

    def partition_of(self, key: bytes) -> PartitionId:
        """The partition that owns a key."""
        return self._owners[bisect_left(self._bounds, token_of(key))]

    def ranges(self) -> Iterator[TokenRange]:
        """All ranges, by their end."""
        previous = self.tokens.peekitem(-1)[0]
        for token, owner in self.tokens.items():
            yield TokenRange(previous, token, owner)
            previous = token

    def shares(self) -> dict[PartitionId, float]:
        """Each partition's part of the hash space; they add up to 1."""
        owned = dict.fromkeys(self.partitions, 0)
        for span in self.ranges():
            owned[span.owner] += span.size
        return {partition: size / TOKENS for partition, size in owned.items()}
