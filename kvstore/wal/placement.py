"""Which bookies form an ensemble. Decides only; luck comes in as a seeded Random.

The writer's own bookie is always taken: an add to it is a plain call, so one of three copies costs no frame, and losing
that machine loses the leader and one copy at once, which is what a quorum is for. The others are spread over zones,
then drawn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from kvstore.errors import NotEnoughBookies
from kvstore.types import BookieId, Quorum

if TYPE_CHECKING:
    from random import Random


def quorum_for(writable: int, default: Quorum) -> Quorum:
    """The default, made smaller to fit; never below its ack quorum. Raises NotEnoughBookies."""
    if writable < default.ack:
        raise NotEnoughBookies(f"{writable} bookies are writable, an acknowledged write needs {default.ack}")
    size = min(default.ensemble, writable)
    return Quorum(size, min(default.write, size), default.ack)


def choose(
    zones: Mapping[BookieId, str],
    count: int,
    luck: Random,
    *,
    keep: Iterable[BookieId] = (),
    own: BookieId | None = None,
    avoid: Collection[BookieId] = (),
) -> tuple[BookieId, ...]:
    """Up to `count` bookies of `zones` (bookie -> zone, "" if it has none) beside those that are kept: the own one
    first, then from the zones least used so far. Those to avoid are taken last."""
    kept = list(keep)
    used = [zones.get(bookie, "") for bookie in kept]
    left = sorted(set(zones) - set(kept))
    luck.shuffle(left)
    chosen: list[BookieId] = []
    while left and len(chosen) < count:
        best = min(left, key=lambda b: (b in avoid, b != own, used.count(zones[b])))
        left.remove(best)
        chosen.append(best)
        used.append(zones[best])
    return tuple(chosen)


def swaps(
    ensemble: tuple[BookieId, ...],
    failed: Collection[BookieId],
    zones: Mapping[BookieId, str],
    luck: Random,
    own: BookieId | None = None,
) -> dict[BookieId, BookieId]:
    """For as many failed bookies as there are spare ones: who takes whose place."""
    spares = {bookie: zone for bookie, zone in zones.items() if bookie not in ensemble}
    leaving = [bookie for bookie in ensemble if bookie in failed]
    staying = [bookie for bookie in ensemble if bookie not in failed]
    zoned = {**{bookie: zones.get(bookie, "") for bookie in staying}, **spares}
    new = choose(zoned, len(leaving), luck, keep=staying, own=own)
    return dict(zip(leaving, new, strict=False))
