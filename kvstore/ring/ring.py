"""The ring: which partition owns a token. Immutable, decides only; a new version is built separately and swapped in as
a whole.

Each token closes a range that starts after the previous token: (previous token, token]. The range after the last token
wraps around to the first. A planned move is one such range, so a change of owner is a change of one token's owner, and
every token has exactly one owner in every version. Partitions that join own nothing until their first move is done.
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

from kvstore.ring.hashing import TOKENS, token_of, tokens_of
from kvstore.ring.moves import FIRST_MOVE, Journey, Move, MoveId, MoveState, Pace
from kvstore.ring.operations import RingOperation
from kvstore.types import PartitionId, ServerId


class PartitionState(StrEnum):
    SERVING = "serving"
    JOINING = "joining"
    """Some of the ranges that were planned for it when it was added have not arrived yet."""
    LEAVING = "leaving"
    """Everything that it owns is planned to move to others."""
    RETIRED = "retired"
    """Owns nothing and never will again: its replicas stop, then its log is removed, then its place in the ring."""


@dataclass(frozen=True, slots=True)
class Member:
    """A partition's place in the ring."""

    id: PartitionId
    replicas: tuple[ServerId, ...]
    """In order of preference for the lead; newcomers included."""
    state: PartitionState = PartitionState.SERVING
    replacing: tuple[tuple[ServerId, ServerId], ...] = ()
    """(newcomer, the replica that leaves once the newcomer has caught up); both are in `replicas`."""
    owned_seq: int = 0
    """The partition's sequence when a range last came to it. A replica behind this sequence may own a range without the
    writes of others."""
    owned_at: int = 0
    """The ring version that gave it that range."""

    def is_on(self, server: ServerId) -> bool:
        """Return True if a replica is meant to run on the server."""
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
    """The tokens t with start < t <= end. If start >= end, they wrap around."""

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
    moves: Mapping[MoveId, Move] = field(default_factory=lambda: MappingProxyType({}))
    """The open moves, by id."""
    next_move: MoveId = FIRST_MOVE
    pace: Pace = field(default_factory=Pace)
    journey: Journey = field(default_factory=Journey)
    draining: tuple[ServerId, ...] = ()
    """Servers that must hold no replicas: their replicas move elsewhere, and no new ones come. Sorted."""
    retired: tuple[PartitionId, ...] = ()
    """Ids that were in the ring and are never reused, because clients may hold their session tokens. Sorted."""
    routed: int = 0
    """The version since which keys are routed as they are now; clients and servers compare it. 0 at construction means
    this version."""
    operations: tuple[RingOperation, ...] = ()
    """The latest operations that operators requested under ids of their own, oldest first."""
    forgotten: tuple[str, ...] = ()
    """Marks of earlier operations, oldest first."""
    _bounds: list[int] = field(init=False, repr=False)
    _owners: list[PartitionId] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        strangers = sorted(set(self.tokens.values()) - set(self.partitions))
        if strangers:
            raise ValueError(f"ring version {self.version}: tokens of unknown partitions {strangers}")
        if not self.tokens:
            raise ValueError(f"ring version {self.version}: expected at least one token")
        first, last = self.tokens.peekitem(0)[0], self.tokens.peekitem(-1)[0]
        if first < 0 or last >= TOKENS:
            raise ValueError(
                f"ring version {self.version}: expected tokens from 0 to {TOKENS - 1}, got {first} to {last}"
            )
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
        """Return the partition that owns a token."""
        return self._owners[bisect_left(self._bounds, token)]

    def partition_of(self, key: bytes) -> PartitionId:
        """Return the partition that owns a key."""
        return self._owners[bisect_left(self._bounds, token_of(key))]

    def partitions_of(self, keys: list[bytes]) -> list[PartitionId]:
        """Return the partitions that own these keys."""
        return self.owners_of(tokens_of(keys))

    def owners_of(self, tokens: list[int]) -> list[PartitionId]:
        """Return the partitions that own these tokens."""
        return list(map(self._owners.__getitem__, map(bisect_left, repeat(self._bounds), tokens)))

    def has_left(self, partition: PartitionId) -> bool:
        """Return True if the partition owns nothing any more, for good. A partition that this version does not name may
        have joined since."""
        member = self.partitions.get(partition)
        return member.state is PartitionState.RETIRED if member is not None else partition in self.retired

    @cached_property
    def owners(self) -> list[PartitionId]:
        """The partitions that own something, sorted. A caller that asks all partitions for their part asks these: a
        partition that joins or has given everything away need not have a leader."""
        return sorted(set(self._owners))

    def ranges(self) -> Iterator[TokenRange]:
        """Yield all ranges, by their end."""
        previous = self.tokens.peekitem(-1)[0]
        for token, owner in self.tokens.items():
            yield TokenRange(previous, token, owner)
            previous = token

    def shares(self) -> dict[PartitionId, float]:
        """Return each partition's part of the hash space. The parts add up to 1."""
        owned = dict.fromkeys(self.partitions, 0)
        for span in self.ranges():
            owned[span.owner] += span.size
        return {partition: size / TOKENS for partition, size in owned.items()}
