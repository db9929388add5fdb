"""Evens out the leaders' work between servers, by moving leads between existing replicas. A lead moves without copying
anything, so this goal comes before moves of data. Decides only."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.server.balance.judge import GAIN, WORK_MIN, Judge, Verdict, threshold
from kvstore.server.balance.observation import Observation
from kvstore.server.balance.step import Goal, Step
from kvstore.types import PartitionId, ServerId


def find(seen: Observation, judge: Judge) -> Verdict:
    """Return the lead to move."""
    overloaded = overloaded_servers(seen)
    if not overloaded and seen.mean < WORK_MIN:
        return _by_count(seen, judge)
    if not overloaded:
        return Verdict(None, f"no server has more than {threshold(seen.mean):,.0f} units of work/s")
    for source in overloaded:
        steps = sorted(by_load(seen, source), key=lambda found: (-found[0], found[1].partition, found[1].target))
        for _, step in steps:
            if judge.allows(step):
                return Verdict(step, str(step), overloaded)
        if steps:
            return Verdict(None, f"{source} is overloaded; the leads that would help moved not long ago", overloaded)
    return Verdict(None, f"{', '.join(overloaded)}: overloaded, but no other lead is better there", overloaded)


def overloaded_servers(seen: Observation) -> list[ServerId]:
    """Return the overloaded servers, the busiest first."""
    high = threshold(seen.mean)
    return sorted(
        (each for each, work in seen.works.items() if work > high), key=lambda each: (-seen.works[each], each)
    )


def by_load(seen: Observation, source: ServerId) -> Iterator[tuple[float, Step]]:
    """Yield the leads whose move from the overloaded server helps, each with how much it helps: by how much the busier
    of the two servers has less work afterwards. Leads that have not arrived yet do not move on."""
    works = seen.works
    for partition in seen.leads_of(source):
        if seen.leaders.get(partition) != source:
            continue
        work = seen.work(partition)
        for target in seen.ring.partitions[partition].replicas:
            if target == source or not seen.may_lead(partition, target):
                continue
            gain = works[source] - max(works[source] - work, works[target] + work)
            if gain >= GAIN * seen.mean:
                reason = (
                    f"{source} has {works[source]:,.0f} units of work/s and {target} has {works[target]:,.0f}, the "
                    f"mean is {seen.mean:,.0f}; {partition} has {work:,.0f}"
                )
                yield (
                    gain,
                    Step(goal=Goal.LEADS, partition=partition, source=source, target=target, reason=reason),
                )


def _overloads(seen: Observation, partition: PartitionId, target: ServerId) -> bool:
    """Return True if the target would be overloaded with the partition's lead."""
    return seen.works[target] + seen.work(partition) > threshold(seen.mean)


def _by_count(seen: Observation, judge: Judge) -> Verdict:
    """Return the lead to move so that the servers of an idle cluster lead about the same number of partitions. Under
    load the number does not matter, and moves for it would bring servers close to overload. No move overloads a
    server, because the lead would come back."""
    counts = {server: len(seen.leads_of(server)) for server in seen.servers}
    possible: list[tuple[int, PartitionId, Step]] = []
    for source in sorted(counts):
        for partition in seen.leads_of(source):
            for target in seen.ring.partitions[partition].replicas:
                if (
                    not seen.may_lead(partition, target)
                    or counts[source] - counts[target] < 2
                    or _overloads(seen, partition, target)
                    or seen.leaders.get(partition) != source
                ):
                    continue
                reason = f"{source} leads {counts[source]} partitions and {target} leads {counts[target]}"
                step = Step(goal=Goal.LEADS, partition=partition, source=source, target=target, reason=reason)
                possible.append((counts[target] - counts[source], partition, step))
    allowed = [each for each in possible if judge.allows(each[2])]
    if allowed:
        step = min(allowed, key=lambda each: (each[0], each[1], each[2].target))[2]
        return Verdict(step, str(step), {each[2].source for each in possible})
    if possible:
        return Verdict(None, "the numbers of leads differ; the leads that could move did so not long ago")
    if max(counts.values(), default=0) - min(counts.values(), default=0) > 1:
        return Verdict(None, "the numbers of leads differ, but no lead can move without overload")
    return Verdict(None, "the cluster is nearly idle, and the numbers of leads are even")
