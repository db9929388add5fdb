"""Decides how much of the ring each partition owns: which ranges a newcomer takes, and where the ranges of a leaver go.
Decides only, deterministically.

A joining partition takes up to SLICES_MAX slices, each from the largest range of the most loaded partition; no donor
goes below the new mean. The newcomer takes more slices only if a partition would otherwise keep more than 1/20 above
the mean. Every partition's share therefore stays near the mean, without hundreds of random tokens per partition, and a
join moves no more than the newcomer's own share.

Inside, ranges are counted in units of tokens that always have one owner (KeyHash.unit), so that no cut divides a unit.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from kvstore.ring.hashing import KeyHash
from kvstore.ring.ring import TokenRange
from kvstore.types import PartitionId

SLICES_MAX = 16
_TOLERANCE = 20
"""A partition may own at most the mean plus this fraction of it (1/20)."""
_SLACK = 64
"""A receiver may exceed the mean by this fraction of it (1/64), so that no tiny ranges are cut off."""
_Heap = list[tuple[int, int]]
"""Heap of (-size, end) of ranges."""


# docs/protocol.md H4
class Balance:
    """The shares of all partitions while a plan is computed. After `join` and `leave`, `owners` maps the end of each
    range that changed hands to its new owner, in the order of the changes."""

    def __init__(
        self,
        hash: KeyHash,
        ranges: Iterable[TokenRange],
        active: Iterable[PartitionId],
        fixed: frozenset[int] = frozenset(),
    ) -> None:
        """Start from the given ranges. Only the partitions in `active` give and receive ranges. A range whose end is in
        `fixed` counts towards its owner's share but does not move."""
        self._unit, self._units = hash.unit, hash.units
        self.owners: dict[int, PartitionId] = {}
        self._heaps: dict[PartitionId, _Heap] = {partition: [] for partition in active}
        self._loads: dict[PartitionId, int] = dict.fromkeys(self._heaps, 0)
        self._beside: dict[int, PartitionId] = {}
        """Owner of the range that ends at a unit."""
        self._after: dict[int, PartitionId] = {}
        """Owner of the range that starts after a unit."""
        for span in ranges:
            start, end, size = span.start // self._unit, span.end // self._unit, span.size // self._unit
            self._after[start] = self._beside[end] = span.owner
            if span.owner in self._heaps:
                self._loads[span.owner] += size
                if span.end not in fixed:
                    self._heaps[span.owner].append((-size, end))
        for heap in self._heaps.values():
            heapq.heapify(heap)

    def loads(self) -> dict[PartitionId, int]:
        """Return how many tokens each active partition owns."""
        return {partition: load * self._unit for partition, load in self._loads.items()}

    def join(self, newcomer: PartitionId) -> None:
        """Give the newcomer its share, in slices cut from the start of other partitions' ranges. Raises ValueError if
        there are fewer units than partitions."""
        mean = self._units // (len(self._heaps) + 1)
        if not mean:
            raise ValueError(f"expected at most {self._units} partitions, got {len(self._heaps) + 1}")
        # Slots are coarse: without one more, rounding would take dozens of tiny slices from donors above the tolerance.
        high = mean + mean // _TOLERANCE + (self._unit > 1)
        loads = [(-load, partition) for partition, load in self._loads.items()]
        heapq.heapify(loads)
        taken: _Heap = []
        need = mean
        above = sum(load > high for load in self._loads.values())
        slices_left = max(SLICES_MAX, above)
        while slices_left and need > 0 and loads:
            load, donor = loads[0]
            heap = self._heaps[donor]
            if not heap:
                heapq.heappop(loads)  # all its ranges are already moving
                continue
            size, end = heapq.heappop(heap)
            # As many slices as donors above the tolerance remain: each slice must bring its donor down to it.
            least = -load - high if above >= slices_left else 1
            give = min(max(-load - mean, 0), max(need // slices_left, least), max(-size - 1, 1))
            above -= -load > high >= -load - give
            slices_left -= 1
            if give <= 0:
                heapq.heappush(heap, (size, end))
                break
            start = (end + size) % self._units
            cut = (start + give) % self._units
            self._assign(start, cut, newcomer)
            taken.append((-give, cut))
            need -= give
            if cut != end:
                self._after[cut] = donor
                heapq.heappush(heap, (size + give, end))
            self._loads[donor] -= give
            heapq.heapreplace(loads, (load + give, donor))
        heapq.heapify(taken)
        self._heaps[newcomer] = taken
        self._loads[newcomer] = mean - need

    def leave(self, leavers: Iterable[PartitionId]) -> None:
        """Distribute the leavers' ranges, the largest first. A range goes as a whole to the owner of an adjacent range
        if that owner has capacity. Otherwise the range goes to the least loaded partition, and is cut where that
        partition would exceed the mean."""
        ranges: _Heap = []
        for leaver in leavers:
            ranges += self._heaps.pop(leaver)
            del self._loads[leaver]
        heapq.heapify(ranges)
        mean = -(-self._units // len(self._heaps))
        slack = mean // _SLACK
        loads = [(load, partition) for partition, load in self._loads.items()]
        heapq.heapify(loads)
        while ranges:
            size, end = heapq.heappop(ranges)
            start = (end + size) % self._units
            receiver = self._neighbour_with_capacity(start, end, mean + slack + size)
            if receiver is None:
                load, receiver = self._least_loaded(loads)
                give = -size if -size <= mean + slack - load else max(mean - load, slack, 1)
                if give < -size:
                    heapq.heappush(ranges, (size + give, end))
                    end = (start + give) % self._units
            self._assign(start, end, receiver)
            self._loads[receiver] += (end - start) % self._units or self._units
            heapq.heappush(loads, (self._loads[receiver], receiver))

    def _least_loaded(self, loads: list[tuple[int, PartitionId]]) -> tuple[int, PartitionId]:
        while True:
            load, partition = heapq.heappop(loads)
            if self._loads[partition] == load:
                return load, partition
            # The entry is outdated: a neighbour of some range has taken it meanwhile.

    def _neighbour_with_capacity(self, start: int, end: int, load_max: int) -> PartitionId | None:
        for owner in (self._beside.get(start), self._after.get(end)):
            if owner is not None and self._loads.get(owner, load_max + 1) <= load_max:
                return owner
        return None

    def _assign(self, start: int, end: int, owner: PartitionId) -> None:
        self.owners[(end + 1) * self._unit - 1] = self._beside[end] = self._after[start] = owner
