"""Chooses the bookies of an ensemble. Decides only; luck comes in as a seeded Random (docs/protocol.md, W10).

The writer's own bookie is always taken: an add to it is a plain call, so one of three copies costs no frame, and losing
that machine loses the leader and one copy at once, which is what a quorum is for. The others are spread over zones,
then drawn.

A *clash* is a pair of places of an ensemble that hold copies of the same entry and stand in the same zone. Where an
ensemble is as wide as its write quorum, each two places do; where it is wider, those less than a write quorum apart. A
bookie without a zone clashes with nobody: nothing is known of it.

A machine that has lost its disk is registered twice until its former session ends. Both are one machine, and at most
one of them answers: no ensemble is given both. A place is better left with who has failed, and may come back.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import NotEnoughBookies
from kvstore.types import BookieId, Fragment, LedgerMetadata, Quorum

if TYPE_CHECKING:
    from random import Random

Zones = Mapping[BookieId, str]
"""Where each bookie stands; "" or absent: nowhere in particular."""


_INCARNATION = re.compile(r"(.+)-[0-9a-f]{12}")


class BookieSwap(NamedTuple):
    """One bookie takes another's place."""

    leaving: BookieId
    newcomer: BookieId


def machine_of(bookie: BookieId) -> str:
    """Where its disk is or was: the name that one of our bookies keeps when it has lost that (docs/protocol.md, L13).
    Of another's, which has no incarnation, the id."""
    match = _INCARNATION.fullmatch(bookie)
    return match.group(1) if match else bookie


def quorum_for(writable: int, default: Quorum) -> Quorum:
    """The default, made smaller to fit; never below its ack quorum. Raises NotEnoughBookies."""
    if writable < default.ack:
        raise NotEnoughBookies(f"{writable} bookies are writable, an acknowledged write needs {default.ack}")
    size = min(default.ensemble, writable)
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
    """Up to `count` bookies of `zones`: the own one first, then from the zones least used so far; those to avoid are
    taken last, and of each machine one. Ordered so that write sets of `write` bookies (all, unless told) clash least.
    """
    left = sorted(zones)
    luck.shuffle(left)
    chosen: list[BookieId] = []
    used: list[str] = []
    while left and len(chosen) < count:
        best = min(left, key=lambda b: (b in avoid, used.count(zones[b]) if zones[b] else 0, b != own))
        left = [bookie for bookie in left if machine_of(bookie) != machine_of(best)]
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
    """For as many failed bookies as there are spare ones (in `zones`, not in `ensemble`): who takes whose place. Who
    clashes least, the own one among equals; nobody of a machine that has another place."""
    spares = sorted(bookie for bookie in zones if bookie not in ensemble)
    luck.shuffle(spares)
    width = len(ensemble) if write is None else write
    places: list[BookieId | None] = [None if bookie in failed else bookie for bookie in ensemble]
    found: dict[BookieId, BookieId] = {}
    for place, leaving in enumerate(ensemble):
        if leaving not in failed:
            continue
        others = (found.get(each, each) for each in ensemble if each != leaving)
        twins = {each for each in failed if machine_of(each) == machine_of(leaving)}
        machines = {machine_of(each) for each in others if each not in twins}
        free = [spare for spare in spares if machine_of(spare) not in machines]
        if not free:
            continue

        def cost(spare: BookieId, place: int = place) -> tuple[int, bool]:
            return _clashes_at(place, spare, places, width, zones), spare != own

        newcomer = min(free, key=cost)
        spares.remove(newcomer)
        places[place] = found[leaving] = newcomer
    return found


def clashes(ensemble: Sequence[BookieId | None], write: int, zones: Zones) -> int:
    """How many clashes an ensemble has, each write set being `write` places in a row."""
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
    """The move of one place to a spare bookie that takes most clashes away; None if none takes any. The own bookie
    stays where another can go."""
    if not clashes(ensemble, write, zones):
        return None
    machines = {machine_of(bookie) for bookie in ensemble}
    free = sorted(bookie for bookie in spares if zones.get(bookie) and machine_of(bookie) not in machines)
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
    """`metadata` with places given to spare bookies for as long as that takes clashes away; None if none does."""
    fragments = tuple(
        Fragment(each.first, _spread_out(each.ensemble, metadata.quorum.write, zones, spares, luck, own))
        for each in metadata.fragments
    )
    return None if fragments == metadata.fragments else replace(metadata, fragments=fragments)


def replaced(
    metadata: LedgerMetadata, lost: Collection[BookieId], zones: Zones, spares: Collection[BookieId], luck: Random
) -> LedgerMetadata:
    """`metadata` with spare bookies in the places of lost ones, for as many as there are: each place goes to whoever
    clashes least there."""
    fragments = []
    for each in metadata.fragments:
        around = {bookie: zones.get(bookie, "") for bookie in {*spares, *each.ensemble}}
        taken = swaps(each.ensemble, lost, around, luck, write=metadata.quorum.write)
        fragments.append(Fragment(each.first, tuple(taken.get(bookie, bookie) for bookie in each.ensemble)))
    return replace(metadata, fragments=tuple(fragments))


def newcomers_of(metadata: LedgerMetadata, wanted: LedgerMetadata) -> set[BookieId]:
    """The bookies that `wanted` names where `metadata` does not. One that changes its place in an ensemble is among
    them: where that is wider than its write sets, other entries are its own then."""
    pairs = zip(metadata.fragments, wanted.fragments, strict=True)
    return {
        bookie
        for old, new in pairs
        for before, bookie in zip(old.ensemble, new.ensemble, strict=True)
        if bookie != before
    }


# docs/protocol.md A8
def leaving(metadata: LedgerMetadata, wanted: LedgerMetadata) -> list[BookieId]:
    """The bookies whose places `wanted` gives to others."""
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
    """How many other places `bookie` clashes with when it is at `place`."""
    zone = zones.get(bookie, "")
    if not zone:
        return 0
    others = (ensemble[other] for other in _neighbours(place, len(ensemble), write))
    return sum(each is not None and zones.get(each, "") == zone for each in others)


def _neighbours(place: int, size: int, write: int) -> Iterator[int]:
    """The places that share an entry with `place`."""
    return (
        other for other in range(size) if other != place and min((other - place) % size, (place - other) % size) < write
    )


def _ordered(chosen: list[BookieId], write: int, zones: Zones) -> tuple[BookieId, ...]:
    """The same bookies, exchanged two by two for as long as that takes clashes away."""
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
