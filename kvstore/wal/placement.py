"""Chooses the bookies of an ensemble. Decides only; randomness is passed in as a seeded Random (docs/protocol.md, W10).

The writer's own bookie is always chosen: an add to it is a plain call, so that one of three copies costs no network
request. If that machine is lost, the leader and one copy are lost together, which the quorum tolerates. The other
bookies are spread over zones and then chosen at random.

A *clash* is a pair of places in an ensemble that hold copies of the same entry and are in the same zone. In an ensemble
that is as wide as its write quorum, any two places hold a common entry. In a wider ensemble, two places hold a common
entry if they are less than a write quorum apart. A bookie without a zone clashes with no other bookie, because its
location is unknown.

Bookies of one machine are lost together, so no ensemble includes two of them, however few machines there are. They are
the bookies of a machine's processes. A bookie that has lost its disk is also registered twice until its former session
ends. It is better to leave a failed bookie in its place, because the bookie may come back.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import NotEnoughBookies
from kvstore.types import BookieId, Fragment, LedgerMetadata, Quorum, machine_of

if TYPE_CHECKING:
    from random import Random

Zones = Mapping[BookieId, str]
"""The zone of each bookie. An empty string or a missing key means that the zone is unknown."""


_INCARNATION = re.compile(r"(.+)-[0-9a-f]{12}")


class BookieSwap(NamedTuple):
    """The replacement of one bookie by another."""

    leaving: BookieId
    newcomer: BookieId


def node_of_or_none(bookie: BookieId) -> str | None:
    """Return the node of a kvstore bookie: the part of its id that stays the same when the bookie loses its disk
    (docs/protocol.md, L13). Other bookies have no incarnation and no known node."""
    match = _INCARNATION.fullmatch(bookie)
    return match[1] if match else None


def machine_of_bookie(bookie: BookieId) -> str:
    """Return the machine of a bookie. A bookie without a known node counts as a machine."""
    node = node_of_or_none(bookie)
    return bookie if node is None else machine_of(node)


def machine_count(bookies: Iterable[BookieId]) -> int:
    """Return the number of machines that the bookies are on."""
    return len({machine_of_bookie(bookie) for bookie in bookies})


def quorum_for(machines: int, default: Quorum) -> Quorum:
    """Return the default quorum, reduced to fit `machines` with a writable bookie. The ack quorum is never reduced.
    Raises NotEnoughBookies if there are fewer machines than the ack quorum."""
    if machines < default.ack:
        raise NotEnoughBookies(
            f"expected writable bookies on at least {default.ack} machines for an ack quorum, got {machines}"
        )
    size = min(default.ensemble, machines)
    return Quorum(size, min(default.write, size), default.ack)


def choose(
    zones: Zones,
    count: int,
    luck: Random,
    *,
    write: int | None = None,
    own: BookieId | None = None,
    avoid: Collection[BookieId] = (),
) -> tuple[BookieId, ...]:
    """Choose up to `count` bookies of `zones`: first `own`, then bookies in the least used zones, and bookies in
    `avoid` last. Each machine is chosen at most once. The result is ordered to minimize clashes in write sets of
    `write` bookies (default: the whole ensemble)."""
    left = sorted(zones)
    luck.shuffle(left)
    chosen: list[BookieId] = []
    used: list[str] = []
    while left and len(chosen) < count:
        best = min(left, key=lambda b: (b in avoid, used.count(zones[b]) if zones[b] else 0, b != own))
        left = [bookie for bookie in left if machine_of_bookie(bookie) != machine_of_bookie(best)]
        chosen.append(best)
        used.append(zones[best])
    return _ordered(chosen, len(chosen) if write is None else write, zones)


def swaps(
    ensemble: tuple[BookieId, ...],
    failed: Collection[BookieId],
    zones: Zones,
    luck: Random,
    own: BookieId | None = None,
    *,
    write: int | None = None,
) -> dict[BookieId, BookieId]:
    """Choose replacements for the failed bookies, for as many as there are spares (bookies in `zones` but not in
    `ensemble`). The spare with the fewest clashes is preferred, then `own`. A machine that already has a place is never
    chosen. `write` is the size of the write quorum (default: the whole ensemble)."""
    spares = sorted(bookie for bookie in zones if bookie not in ensemble)
    luck.shuffle(spares)
    width = len(ensemble) if write is None else write
    places: list[BookieId | None] = [None if bookie in failed else bookie for bookie in ensemble]
    found: dict[BookieId, BookieId] = {}
    for place, leaving in enumerate(ensemble):
        if leaving not in failed:
            continue
        others = (found.get(each, each) for each in ensemble if each != leaving)
        twins = {each for each in failed if machine_of_bookie(each) == machine_of_bookie(leaving)}
        machines = {machine_of_bookie(each) for each in others if each not in twins}
        free = [spare for spare in spares if machine_of_bookie(spare) not in machines]
        if not free:
            continue

        def cost(spare: BookieId, place: int = place) -> tuple[int, bool]:
            return _clashes_at(place, spare, places, width, zones), spare != own

        newcomer = min(free, key=cost)
        spares.remove(newcomer)
        places[place] = found[leaving] = newcomer
    return found


def clashes(ensemble: Sequence[BookieId | None], write: int, zones: Zones) -> int:
    """Return the number of clashes in an ensemble whose write sets are `write` consecutive places."""
    found = sum(_clashes_at(place, bookie, ensemble, write, zones) for place, bookie in enumerate(ensemble) if bookie)
    return found // 2


def better_place(
    ensemble: tuple[BookieId, ...],
    write: int,
    zones: Zones,
    spares: Collection[BookieId],
    luck: Random,
    own: BookieId | None = None,
) -> BookieSwap | None:
    """Return the exchange of one bookie for a spare that removes the most clashes, or None if no exchange removes any.
    If several exchanges are equally good, `own` keeps its place."""
    if not clashes(ensemble, write, zones):
        return None
    machines = {machine_of_bookie(bookie) for bookie in ensemble}
    free = sorted(bookie for bookie in spares if zones.get(bookie) and machine_of_bookie(bookie) not in machines)
    luck.shuffle(free)
    best: tuple[tuple[int, bool], BookieSwap] | None = None
    for place, leaving in enumerate(ensemble):
        now = _clashes_at(place, leaving, ensemble, write, zones)
        for newcomer in free if now else ():
            rank = _clashes_at(place, newcomer, ensemble, write, zones) - now, leaving == own
            if rank[0] < 0 and (best is None or rank < best[0]):
                best = rank, BookieSwap(leaving, newcomer)
    return best[1] if best else None


def spread_out(
    metadata: LedgerMetadata, zones: Zones, spares: Collection[BookieId], luck: Random, own: BookieId | None = None
) -> LedgerMetadata | None:
    """Return `metadata` with places given to spare bookies until no further exchange removes clashes, or None if no
    exchange removes any."""
    fragments = tuple(
        Fragment(each.first, _spread_out(each.ensemble, metadata.quorum.write, zones, spares, luck, own))
        for each in metadata.fragments
    )
    return None if fragments == metadata.fragments else replace(metadata, fragments=fragments)


def replaced(
    metadata: LedgerMetadata, lost: Collection[BookieId], zones: Zones, spares: Collection[BookieId], luck: Random
) -> LedgerMetadata:
    """Return `metadata` with the lost bookies replaced, as long as there are spares. Each place gets the spare with the
    fewest clashes there."""
    fragments = []
    for each in metadata.fragments:
        around = {bookie: zones.get(bookie, "") for bookie in {*spares, *each.ensemble}}
        taken = swaps(each.ensemble, lost, around, luck, write=metadata.quorum.write)
        fragments.append(Fragment(each.first, tuple(taken.get(bookie, bookie) for bookie in each.ensemble)))
    return replace(metadata, fragments=tuple(fragments))


def newcomers_of(metadata: LedgerMetadata, wanted: LedgerMetadata) -> set[BookieId]:
    """Return the bookies that `wanted` names at places where `metadata` names others. A bookie that only changes its
    place in an ensemble is included, because it gets other entries if the ensemble is wider than its write sets."""
    pairs = zip(metadata.fragments, wanted.fragments, strict=True)
    return {
        bookie
        for old, new in pairs
        for before, bookie in zip(old.ensemble, new.ensemble, strict=True)
        if bookie != before
    }


# docs/protocol.md A8
def leaving(metadata: LedgerMetadata, wanted: LedgerMetadata) -> list[BookieId]:
    """Return the bookies whose places `wanted` gives to other bookies, sorted."""
    pairs = zip(metadata.fragments, wanted.fragments, strict=True)
    return sorted(
        {
            before
            for old, new in pairs
            for before, after in zip(old.ensemble, new.ensemble, strict=True)
            if before != after
        }
    )


def _spread_out(
    ensemble: tuple[BookieId, ...],
    write: int,
    zones: Zones,
    spares: Collection[BookieId],
    luck: Random,
    own: BookieId | None,
) -> tuple[BookieId, ...]:
    while (move := better_place(ensemble, write, zones, spares, luck, own)) is not None:
        ensemble = tuple(move.newcomer if each == move.leaving else each for each in ensemble)
    return ensemble


def _clashes_at(place: int, bookie: BookieId, ensemble: Sequence[BookieId | None], write: int, zones: Zones) -> int:
    """Return the number of other places that `bookie` would clash with at `place`."""
    zone = zones.get(bookie, "")
    if not zone:
        return 0
    others = (ensemble[other] for other in _neighbours(place, len(ensemble), write))
    return sum(each is not None and zones.get(each, "") == zone for each in others)


def _neighbours(place: int, size: int, write: int) -> Iterator[int]:
    """Yield the places that hold a common entry with `place`."""
    return (
        other for other in range(size) if other != place and min((other - place) % size, (place - other) % size) < write
    )


def _ordered(chosen: list[BookieId], write: int, zones: Zones) -> tuple[BookieId, ...]:
    """Exchange pairs of places as long as that removes clashes."""
    best = clashes(chosen, write, zones) if write < len(chosen) else 0
    is_better = best > 0
    while is_better:
        is_better = False
        for one in range(len(chosen)):
            for other in range(one):
                chosen[one], chosen[other] = chosen[other], chosen[one]
                count = clashes(chosen, write, zones)
                if count < best:
                    best, is_better = count, True
                else:
                    chosen[one], chosen[other] = chosen[other], chosen[one]
    return tuple(chosen)
