"""The ring, which says which partition owns a token. A ring is immutable and decides only. A change builds a new
version, which replaces the old one as a whole.

Each token closes a range that starts after the previous token: (previous token, token]. The range after the last token
wraps around to the first. A planned move covers exactly one such range, so a change of ownership changes the owner of
one token, and every token has exactly one owner in every version. A partition that joins owns nothing until its first
move is done.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import repeat
from types import MappingProxyType
from typing import NamedTuple

from sortedcontainers import SortedDict

from kvstore.ring.hashing import TOKENS, KeyHash
from kvstore.ring.moves import FIRST_MOVE, Journey, Move, MoveId, MoveState, Pace
from kvstore.ring.operations import RingOperation
from kvstore.types import PartitionId, ServerId


class PartitionState(StrEnum):
    """The state of a partition in the ring."""

    SERVING = "serving"
    JOINING = "joining"
    """Some of the ranges that were planned for the partition when it was added have not arrived yet."""
    LEAVING = "leaving"
    """All ranges that the partition owns are planned to move to other partitions."""
    RETIRED = "retired"
    """The partition owns nothing and never will again. Its replicas stop, then its log is removed, and then the
    partition is removed from the ring."""


@dataclass(frozen=True, slots=True)
class Member:
    """A partition in the ring, and the servers of its replicas."""

    id: PartitionId
    replicas: tuple[ServerId, ...]
    """Servers in order of preference for leadership, including replicas that are still catching up."""
    state: PartitionState = PartitionState.SERVING
    replacing: tuple[tuple[ServerId, ServerId], ...] = ()
    """Pairs of (newcomer, the replica that leaves once the newcomer has caught up). Both servers are in `replicas`."""
    owned_seq: int = 0
    """The partition's sequence when it last received a range. A replica behind this sequence may own a range without
    having the writes that came with it."""
    owned_at: int = 0
    """The ring version in which the partition last received a range."""

    def is_on(self, server: ServerId) -> bool:
        """Return True if the server should run a replica of the partition."""
        return server in self.replicas and self.state is not PartitionState.RETIRED

    def __post_init__(self) -> None:
        if len(set(self.replicas)) != len(self.replicas):
            raise ValueError(f"partition {self.id}: expected replicas on distinct servers, got {self.replicas}")
        named = [server for pair in self.replacing for server in pair]
        if len(set(named)) != len(named) or not set(named) <= set(self.replicas):
            raise ValueError(
                f"partition {self.id}: expected distinct replicas of its own to be replaced, got {self.replacing}"
            )


# docs/protocol.md H1
class TokenRange(NamedTuple):
    """The tokens t with start < t <= end, and their owner. If start >= end, the range wraps around."""

    start: int
    end: int
    owner: PartitionId

    @property
    def size(self) -> int:
        """Number of tokens in the range."""
        return (self.end - self.start) % TOKENS or TOKENS


@dataclass(frozen=True, eq=False)
class Ring:
    """One version of the ring. All rings of one cluster with the same version are identical."""

    version: int
    partitions: Mapping[PartitionId, Member]
    tokens: SortedDict[int, PartitionId]
    """Owners by the end of their range. Never changed after construction."""
    hash: KeyHash
    """The mapping of keys to tokens. The same in all versions."""
    moves: Mapping[MoveId, Move] = field(default_factory=lambda: MappingProxyType({}))
    """The open moves, by id."""
    next_move: MoveId = FIRST_MOVE
    """The id of the next move that is planned."""
    pace: Pace = field(default_factory=Pace)
    journey: Journey = field(default_factory=Journey)
    draining: tuple[ServerId, ...] = ()
    """Servers that must not hold replicas: their replicas move elsewhere, and no new replicas are placed on them.
    Sorted."""
    retired: tuple[PartitionId, ...] = ()
    """Ids of partitions that have left the ring. They are never reused, because clients may still hold session tokens
    of these partitions. Sorted."""
    routed: int = 0
    """The first version that routes keys as this one does; clients and servers compare it. If it is 0 at construction,
    it becomes this version."""
    operations: tuple[RingOperation, ...] = ()
    """The latest operations that operators requested under an id, oldest first."""
    forgotten: tuple[str, ...] = ()
    """Marks of operations whose results have been dropped, oldest first."""
    _bounds: list[int] = field(init=False, repr=False)
    _owners: list[PartitionId] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.tokens.values()) - set(self.partitions))
        if unknown:
            raise ValueError(f"ring version {self.version}: tokens of unknown partitions {unknown}")
        if not self.tokens:
            raise ValueError(f"ring version {self.version}: expected at least one token")
        first, last = self.tokens.peekitem(0)[0], self.tokens.peekitem(-1)[0]
        if first < 0 or last >= TOKENS:
            raise ValueError(
                f"ring version {self.version}: expected tokens from 0 to {TOKENS - 1}, got {first} to {last}"
            )
        if divided := [end for end in self.tokens if not self.hash.ends_unit(end)]:
            raise ValueError(f"ring version {self.version}: token {divided[0]} does not end a unit of {self.hash.name}")
        object.__setattr__(self, "routed", self.routed or self.version)
        # The range that wraps around is listed twice, so that a lookup is one bisection without a special case.
        object.__setattr__(self, "_bounds", [*self.tokens.keys(), TOKENS])
        object.__setattr__(self, "_owners", [*self.tokens.values(), self.tokens.peekitem(0)[1]])
        for move in self.moves.values():
            self._check_move(move)
        if len({move.end for move in self.moves.values()}) != len(self.moves):
            raise ValueError(f"ring version {self.version}: expected one move per range, got two")

    def _check_move(self, move: Move) -> None:
        place = bisect_left(self._bounds, move.end)
        owner = move.target if move.state is MoveState.FLIPPED else move.source
        if self._bounds[place] != move.end or self._bounds[place - 1 if place else -2] != move.start:
            raise ValueError(
                f"move {move.id}: ({move.start}, {move.end}] is not a range of ring version {self.version}"
            )
        if self._owners[place] != owner:
            raise ValueError(f"move {move.id}: expected {owner} to own its range, got {self._owners[place]}")
        if move.id >= self.next_move or not {move.source, move.target} <= set(self.partitions):
            raise ValueError(f"move {move.id}: its partition is unknown, or its id is not below {self.next_move}")

    def owner_of(self, token: int) -> PartitionId:
        """Return the partition that owns the token. Takes one binary search."""
        return self._owners[bisect_left(self._bounds, token)]

    def partition_of(self, key: bytes) -> PartitionId:
        """Return the partition that owns the key."""
        return self._owners[bisect_left(self._bounds, self.hash.token_of(key))]

    def partitions_of(self, keys: list[bytes]) -> list[PartitionId]:
        """Return the partitions that own the keys, in the order of the keys."""
        return self.owners_of(self.hash.tokens_of(keys))

    def owners_of(self, tokens: list[int]) -> list[PartitionId]:
        """Return the partitions that own the tokens, in the order of the tokens."""
        return list(map(self._owners.__getitem__, map(bisect_left, repeat(self._bounds), tokens)))

    def has_left(self, partition: PartitionId) -> bool:
        """Return True if the partition has retired and will never own tokens again. Returns False for a partition that
        this version does not know, because it may have joined since."""
        member = self.partitions.get(partition)
        return member.state is PartitionState.RETIRED if member is not None else partition in self.retired

    @cached_property
    def owners(self) -> list[PartitionId]:
        """The partitions that own tokens, sorted. A request to all partitions goes to these only: a partition that owns
        nothing, because it is joining or leaving, may have no leader."""
        return sorted(set(self._owners))

    def ranges(self) -> Iterator[TokenRange]:
        """Yield all ranges in the order of their ends."""
        previous = self.tokens.peekitem(-1)[0]
        for token, owner in self.tokens.items():
            yield TokenRange(previous, token, owner)
            previous = token

    def ranges_by_owner(self) -> dict[PartitionId, list[TokenRange]]:
        """Return the ranges of each partition in the order of their ends."""
        found: dict[PartitionId, list[TokenRange]] = {partition: [] for partition in self.partitions}
        for span in self.ranges():
            found[span.owner].append(span)
        return found

    def shares(self) -> dict[PartitionId, float]:
        """Return the fraction of the hash space that each partition owns. The fractions add up to 1."""
        owned = dict.fromkeys(self.partitions, 0)
        for span in self.ranges():
            owned[span.owner] += span.size
        return {partition: size / TOKENS for partition, size in owned.items()}
