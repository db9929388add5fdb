"""Shares of a limited number of slots, by network. Decides only.

Every listener and the gRPC server have a fixed number of slots for connections and calls that have not authenticated.
All of them use this class to choose who gives way when the slots run out: the oldest occupant of the network with the
most slots. So a peer with one slot keeps it, however many connections another network opens. Occupants from known
networks, such as the links of the other nodes, give way only to each other. One slot in UNKNOWN_SHARE is for unknown
networks, so that a client or a health probe from an unknown network gets in, whatever a known network holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from kvstore.env.networks import KnownNetworks

T = TypeVar("T")

UNKNOWN_SHARE = 8
"""Unknown networks have one slot out of this many, and at least one."""


def may_take(owned: int, free: int) -> bool:
    """Return True if an owner may have `owned` of a limit of which `free` is then left.

    An owner may use no more of a limit than it leaves free. So one user or network takes half of it, the next one a
    quarter, and another one always finds some. This is for requests that would lose work if they were displaced.
    """
    return owned <= free


def may_take_slot(owned: int, free: int) -> bool:
    """Return True if an owner that has `owned` slots may take another one while `free` are left, as `may_take`
    decides. An owner without slots may take the last one."""
    return free > 0 and (not owned or may_take(owned + 1, free - 1))


def largest_of_largest(held: Iterable[tuple[T, str, int]]) -> T:
    """Return the largest holder of the network that holds the most, from (holder, network, size) of at least one
    holder. So many small holders of one network give way before a larger one of another network."""
    of_network: Counter[str] = Counter()
    holders = list(held)
    for _, network, size in holders:
        of_network[network] += size
    return max(holders, key=lambda each: (of_network[each[1]], each[1], each[2]))[0]


class _Levels(Generic[T]):
    """Networks by their number of occupants. Finding the fullest network takes constant time."""

    def __init__(self) -> None:
        self.of_network: dict[str, dict[T, None]] = {}
        self._levels: list[dict[str, None]] = [{}]
        """Index n holds the networks with n occupants, in order of arrival. Index 0 is empty."""
        self.total = 0
        """Occupants of all networks."""

    def add(self, occupant: T, network: str) -> None:
        occupants = self.of_network.setdefault(network, {})
        occupants[occupant] = None
        self.total += 1
        count = len(occupants)
        self._levels[count - 1].pop(network, None)
        if count == len(self._levels):
            self._levels.append({})
        self._levels[count][network] = None

    def discard(self, occupant: T, network: str) -> None:
        occupants = self.of_network[network]
        del self._levels[len(occupants)][network]
        del occupants[occupant]
        self.total -= 1
        if occupants:
            self._levels[len(occupants)][network] = None
        else:
            del self.of_network[network]
        while len(self._levels) > 1 and not self._levels[-1]:
            self._levels.pop()

    @property
    def most(self) -> int:
        """Occupants of the fullest network."""
        return len(self._levels) - 1

    def oldest_of_fullest(self) -> T:
        return next(iter(self.of_network[next(iter(self._levels[-1]))]))


class Shares(Generic[T]):
    """The occupants of one listener's slots. The caller compares `len()` with the number of slots."""

    def __init__(self, known: KnownNetworks) -> None:
        self._known = known
        self._unknown_levels, self._known_levels = _Levels[T](), _Levels[T]()
        self._places: dict[T, tuple[_Levels[T], str, float]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[T]:
        return iter(self._places)

    def __contains__(self, occupant: T) -> bool:
        return occupant in self._places

    def add(self, occupant: T, network: str, now: float = 0.0) -> None:
        """Give a slot to an occupant from `network`. An occupant that has a slot keeps it, and its age."""
        if occupant not in self._places:
            levels = self._known_levels if network in self._known else self._unknown_levels
            levels.add(occupant, network)
            self._places[occupant] = levels, network, now

    def discard(self, occupant: T) -> bool:
        """Free the occupant's slot. Return True if it had one."""
        place = self._places.pop(occupant, None)
        if place is None:
            return False
        levels, network, _ = place
        levels.discard(occupant, network)
        return True

    def since(self, occupant: T) -> float:
        """Return the time at which the occupant got its slot, as passed to `add`."""
        return self._places[occupant][2]

    def count(self, network: str) -> int:
        """Return the number of slots that a network has."""
        both = self._unknown_levels, self._known_levels
        return sum(len(levels.of_network.get(network, ())) for levels in both)

    def first_to_go(self) -> T | None:
        """Return the occupant that must give way if there is one too many, which may be the newcomer. Returns None
        if there is no occupant."""
        if not self._places:
            return None
        levels = self._unknown_levels if self._have_unknown_too_many() else self._known_levels
        return levels.oldest_of_fullest()

    def displaced_by(self, network: str) -> T | None:
        """Return the occupant that gives way to a newcomer from `network`, or None if the newcomer has to wait or is
        refused.

        If the newcomer's network is known and unknown networks have more than their share, an occupant of an unknown
        network gives way. Otherwise, an occupant gives way whose network has more slots than the newcomer's network
        even after the swap.
        """
        if network in self._known:
            if self._unknown_levels.most and self._have_unknown_too_many():
                return self._unknown_levels.oldest_of_fullest()
            levels = self._known_levels
        else:
            levels = self._unknown_levels if self._have_unknown_too_many(1) else self._known_levels
        return levels.oldest_of_fullest() if levels.most > self.count(network) + 1 else None

    def order_of(self, network: str) -> tuple[bool, int]:
        """Return the sort key by which newcomers from networks get free slots; the least is first."""
        return network not in self._known and self._have_unknown_too_many(1), self.count(network)

    def _have_unknown_too_many(self, more: int = 0) -> bool:
        """Return True if unknown networks would have more than their share of the slots with so many `more`, or if
        nobody else has a slot."""
        unknown = self._unknown_levels.total + more
        return unknown > max(1, len(self._places) // UNKNOWN_SHARE) or not self._known_levels.most
