"""Moves ranges between partitions: off a partition that is too busy for any server, and off a partition that owns far
too much of the ring. Decides only.

A range that moves is cut off where the load is, so a hot range is split by moving a part of it. Cuts make the ring
longer, so there is a limit on the number of ranges.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import inf

from kvstore.ring import TOKENS
from kvstore.server.balance import leads
from kvstore.server.balance.judge import GAIN, Judge, Verdict, threshold
from kvstore.server.balance.observation import Observation
from kvstore.server.balance.step import Goal, Step
from kvstore.server.load.load import ONE_KEY, Cut, cut
from kvstore.types import PartitionId, ServerId

SHARE_HIGH = 2.0
"""A partition owns too much from this multiple of the mean share. No range moves to a partition that would own more."""
KEYS_MIN = 100_000
"""Number of keys in the cluster below which shares do not matter."""
SHARE_GAP = 0.25
"""Minimum distance from the mean of both partitions of a move because of shares, as a part of the mean."""
RANGE_MIN = 1 / 32
"""Minimum size of a range that moves because of shares, as a part of the mean."""
REASONS_MAX = 8
"""Maximum number of reasons that a finding names."""
NOBODY = ServerId("")
RANGES_MAX = 64
"""Mean number of ranges per partition above which nothing is cut any more. A ring with many small ranges is slow to
plan, to store and to route by."""


def find_load(seen: Observation, judge: Judge) -> Verdict:
    """Return the range to move off a partition whose leader's server is overloaded, where no lead can help."""
    overloaded = leads.overloaded_servers(seen)
    if not overloaded:
        return Verdict(None, "no server is overloaded")
    stuck = [server for server in overloaded if next(leads.by_load(seen, server), None) is None]
    if not stuck:
        return Verdict(None, f"{', '.join(overloaded)}: overloaded; moving leads helps, so no range moves")
    if len(seen.ring.tokens) > RANGES_MAX * len(seen.serving):
        return Verdict(None, f"the ring has {len(seen.ring.tokens)} ranges, which is too many to cut more")
    reasons: list[str] = []
    takers = _takers(seen)
    sources = {partition for server in stuck for partition in seen.leads_of(server)}
    for server in stuck:
        busy = sorted(seen.leads_of(server), key=lambda each: (-seen.work(each), each))
        for partition in busy:
            found = _off_partition(seen, judge, server, partition, takers)
            if isinstance(found, Step):
                return Verdict(found, str(found), sources)
            reasons.append(found)
    shown = list(dict.fromkeys(reasons))[:REASONS_MAX]
    return Verdict(None, "; ".join(shown) or f"{', '.join(stuck)}: overloaded, but leads nothing", sources)


def _off_partition(
    seen: Observation, judge: Judge, server: ServerId, source: PartitionId, takers: Sequence[PartitionId]
) -> Step | str:
    """Return the best range to move off the partition, or why there is none."""
    load, work, works = seen.loads.get(source), seen.work(source), seen.works
    if load is None or work < GAIN * seen.mean:
        return f"{source} has too little load to matter"
    if load.hot and load.hot[0].share >= ONE_KEY:
        key = load.hot[0].key.decode("utf-8", "backslashreplace")[:40]
        return (
            f"{load.hot[0].share:.0%} of the operations of {source} are for the key {key!r}, which no move can split; "
            "read it at level session or stale from replicas, or spread it over several keys"
        )
    if judge.rests(source):
        return f"{source} was part of a step not long ago"
    cuts: dict[ServerId, Cut | None] = {}
    for target in takers:
        taker = seen.expected[target]
        if target == source or judge.rests(target):
            continue
        if taker not in cuts:
            wanted = min(works[server] - seen.mean, seen.mean - works[taker])
            cuts[taker] = cut(seen.ranges[source], seen.ring.hash.unit, load, wanted / work)
        found = cuts[taker]
        if found is None or not _fits(seen, target, found.last - found.first + 1):
            continue
        moved = found.share * work
        if works[server] - max(works[server] - moved, works[taker] + moved) < GAIN * seen.mean / 2:
            continue
        reason = (
            f"{server}, which leads {source}, has {works[server]:,.0f} units of work/s, the mean is {seen.mean:,.0f}, "
            f"and no lead can move; about {moved:,.0f} move to {taker}, which has {works[taker]:,.0f}"
        )
        step = Step(
            goal=Goal.LOAD,
            partition=source,
            source=source,
            target=target,
            first=found.first,
            last=found.last,
            reason=reason,
        )
        if judge.allows(step):
            return step
    return f"no range of {source} can move: its load is in too few keys or slots, or others moved lately"


def _takers(seen: Observation) -> list[PartitionId]:
    """Return the partitions that could take load, those of the least busy servers first."""
    work_max = (1 - GAIN) * seen.mean
    found = (each for each in seen.serving if seen.works.get(seen.expected.get(each, NOBODY), inf) <= work_max)
    return sorted(found, key=lambda each: (seen.works[seen.expected[each]], seen.work(each), each))


def _fits(seen: Observation, target: PartitionId, tokens: int) -> bool:
    """Return True if the partition would not own too much with these tokens."""
    return seen.shares[target] + tokens / TOKENS <= SHARE_HIGH / len(seen.serving)


def find_shares(seen: Observation, judge: Judge) -> Verdict:
    """Return the range to move off a partition that owns far more of the ring than the mean."""
    keys = sum(seen.keys.get(each, 0) for each in seen.serving)
    if len(seen.serving) < 2 or keys < KEYS_MIN:
        return Verdict(None, f"with {keys:,} keys, the shares of the ring do not matter")
    shares, mean = seen.shares, 1 / len(seen.serving)
    large = [each for each in seen.serving if shares[each] > SHARE_HIGH * mean]
    if not large:
        return Verdict(None, f"no partition owns more than {SHARE_HIGH:g} times the mean share")
    source = max(large, key=lambda each: (shares[each], each))
    if judge.rests(source):
        return Verdict(None, f"{source} owns {shares[source]:.0%} of the ring, and was part of a step not long ago")
    for target in sorted(seen.serving, key=lambda each: (shares[each], each)):
        tokens = int(min(shares[source] - mean, mean - shares[target]) * TOKENS)
        step = _quiet_range(seen, source, target, tokens) if tokens >= SHARE_GAP * mean * TOKENS else None
        if step is not None and judge.allows(step):
            return Verdict(step, str(step), large)
    return Verdict(
        None, f"{source} owns {shares[source]:.0%} of the ring, but its load or a recent move keeps it there"
    )


def _quiet_range(seen: Observation, source: PartitionId, target: PartitionId, tokens: int) -> Step | None:
    """Return the move of about so many tokens of the source in one range, where the source has least load, unless the
    load would be too much for the target's server."""
    sampled = seen.loads[source].tokens if source in seen.loads else ()
    taker = seen.expected.get(target)
    unit = seen.ring.hash.unit
    least = RANGE_MIN * TOKENS / len(seen.serving)
    found: list[tuple[float, int, int, float]] = []
    for span in seen.ranges[source]:
        if span.start >= span.end:
            continue
        first, last = span.start + 1, min(span.end, span.start + tokens // unit * unit)
        if (size := last - first + 1) >= least:
            count = bisect_right(sampled, last) - bisect_left(sampled, first)
            work = count / len(sampled) * seen.work(source) if sampled else seen.work(source)
            found.append((work / size, -size, first, work))
    if not found or taker is None or taker not in seen.works:
        return None
    _, negative_size, first, work = min(found)
    last = first - negative_size - 1
    if seen.works[taker] + work > threshold(seen.mean):
        return None
    reason = f"{source} owns {seen.shares[source]:.1%} of the ring and {target} owns {seen.shares[target]:.1%}"
    return Step(goal=Goal.SHARES, partition=source, source=source, target=target, first=first, last=last, reason=reason)
