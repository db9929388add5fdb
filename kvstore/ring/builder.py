"""Makes rings: balanced shares with few moves, replicas on distinct servers and zones. Pure and deterministic.

A joining partition takes up to SLICES_MAX slices, each from the largest range of the most loaded partition; no donor
goes below the new mean. So every partition's share stays within a few percent of the mean without the hundreds of
random tokens per partition that it would otherwise take, and a join moves no more than the newcomer's own share.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from sortedcontainers import SortedDict

from kvstore.ring.hashing import TOKENS
from kvstore.ring.ring import Member, PartitionState, Ring
from kvstore.types import PartitionId, ServerId

SLICES_MAX = 16
_Ranges = dict[PartitionId, list[tuple[int, int]]]
"""Per owner a heap of (-size, end)."""


def new_ring(partitions: Sequence[PartitionId], servers: Mapping[ServerId, str], replicas: int) -> Ring:
    """The first ring of a cluster. `servers` maps each server to its zone (empty: none). Raises ValueError for no
    partition."""
    if not partitions:
        raise ValueError("want at least one partition, got none")
    first, *others = _place_all(partitions, servers, replicas)
    step = TOKENS // SLICES_MAX
    tokens = SortedDict({TOKENS - 1 - step * slice_: first.id for slice_ in range(SLICES_MAX)})
    ring = Ring(1, {first.id: first}, tokens)
    return Ring(1, *_joined(ring, others))


def with_partitions(ring: Ring, members: Sequence[Member]) -> Ring:
    """The next version of the ring, in which each of `members` owns its share. Raises ValueError for one that is in it
    already."""
    return Ring(ring.version + 1, *_joined(ring, members))


def place_replicas(
    servers: Mapping[ServerId, str], count: int, replicas: Mapping[ServerId, int], leads: Mapping[ServerId, int]
) -> tuple[ServerId, ...]:
    """Servers for one partition, the preferred leader first: zones that have none yet before others, then those with
    the fewest replicas (`replicas`), then by name; among the chosen the one that leads least (`leads`) comes first."""
    if not 1 <= count <= len(servers):
        raise ValueError(f"want 1 to {len(servers)} replicas on as many servers, got {count}")
    chosen: list[ServerId] = []
    zones: Counter[str] = Counter()
    while len(chosen) < count:
        rest = [server for server in servers if server not in chosen]
        best = min(rest, key=lambda server: (zones[servers[server]], replicas.get(server, 0), server))
        chosen.append(best)
        if servers[best]:
            zones[servers[best]] += 1
    first = min(chosen, key=lambda server: (leads.get(server, 0), server))
    turn = chosen.index(first)
    return (*chosen[turn:], *chosen[:turn])


def _place_all(partitions: Iterable[PartitionId], servers: Mapping[ServerId, str], count: int) -> list[Member]:
    held: Counter[ServerId] = Counter()
    leads: Counter[ServerId] = Counter()
    members = []
    for partition in partitions:
        replicas = place_replicas(servers, count, held, leads)
        held.update(replicas)
        leads[replicas[0]] += 1
        members.append(Member(partition, replicas, PartitionState.SERVING))
    return members


def _joined(ring: Ring, members: Sequence[Member]) -> tuple[Mapping[PartitionId, Member], SortedDict[int, PartitionId]]:
    partitions, tokens = dict(ring.partitions), SortedDict(ring.tokens)
    ranges = _ranges_by_owner(ring)
    for member in members:
        if member.id in partitions:
            raise ValueError(f"partition {member.id} is in the ring already")
        partitions[member.id] = member
        taken = _cut(ranges, TOKENS // len(partitions))
        tokens.update((end, member.id) for _, end in taken)
        ranges[member.id] = taken
    return partitions, tokens


def _ranges_by_owner(ring: Ring) -> _Ranges:
    ranges: _Ranges = {partition: [] for partition in ring.partitions}
    for span in ring.ranges():
        ranges[span.owner].append((-span.size, span.end))
    for heap in ranges.values():
        heapq.heapify(heap)
    return ranges


def _cut(ranges: _Ranges, mean: int) -> list[tuple[int, int]]:
    """The ranges that a newcomer takes, as a heap, each cut from the start of another's; up to `mean` tokens in all."""
    loads = [(sum(size for size, _ in heap), partition) for partition, heap in ranges.items()]
    heapq.heapify(loads)
    taken: list[tuple[int, int]] = []
    need = mean
    for slices_left in range(SLICES_MAX, 0, -1):
        if need <= 0:
            break
        load, donor = heapq.heappop(loads)
        size, end = heapq.heappop(ranges[donor])
        give = min(max(-load - mean, 0), max(need // slices_left, 1), -size - 1)
        if give > 0:
            taken.append((-give, (end + size + give) % TOKENS))
            need -= give
        heapq.heappush(ranges[donor], (size + give, end))
        heapq.heappush(loads, (load + give, donor))
    heapq.heapify(taken)
    return taken
