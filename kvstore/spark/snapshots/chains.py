"""Chains of snapshots: which stand on which, where a chain may be cut, and which may go. Decides only.

A chain is a full snapshot and incrementals of which each continues the one before. What is in the last one can be had
back only as long as all before it are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from kvstore.errors import Corrupted, InvalidRequest, StoreError
from kvstore.spark.snapshots.manifest import Manifest

Catalogue = Mapping[str, Manifest]


def newest_or_none(catalogue: Catalogue) -> Manifest | None:
    """The one whose positions are the latest."""
    return max(catalogue.values(), key=_age, default=None)


def check_one_cluster(catalogue: Catalogue) -> None:
    """Raises InvalidRequest where nobody can tell whose newest snapshot is meant."""
    newest = {each.cluster: each.id for each in in_order(catalogue)}
    if len(newest) > 1:
        raise InvalidRequest(
            f"there are snapshots of {len(newest)} clusters here, say which: {', '.join(newest.values())}"
        )


def in_order(catalogue: Catalogue) -> list[Manifest]:
    """Oldest first."""
    return sorted(catalogue.values(), key=_age)


def _age(manifest: Manifest) -> tuple[int, int, str]:
    """By the servers' clocks, which never go back: those of the machines that take snapshots may."""
    return complete_until_ms(manifest), manifest.started_ms, manifest.id


def chain_of(catalogue: Catalogue, wanted: str, unreadable: Mapping[str, str] | None = None) -> list[Manifest]:
    """Return the snapshots that `wanted` needs, the full snapshot first, itself last. `unreadable` says of snapshots
    that are not in the catalogue why their manifests cannot be read. Raises InvalidRequest if `wanted` is missing,
    Corrupted if something else is or two do not fit."""
    found: list[Manifest] = []
    name: str | None = wanted
    while name is not None:
        manifest = catalogue.get(name)
        if manifest is None:
            if not found:
                raise InvalidRequest(f"snapshot {name} is not here: see `kvstore snapshot list`")
            if unreadable and name in unreadable:
                raise Corrupted(f"snapshot {found[-1].id} continues {name}: {unreadable[name]}")
            raise Corrupted(
                f"snapshot {found[-1].id} continues {name}, which is not here: bring its folder back from a copy, or "
                "take a full snapshot"
            )
        if manifest in found:
            raise Corrupted(f"snapshot {wanted} continues itself, by way of {name}")
        found.append(manifest)
        name = manifest.parent
    found.reverse()
    for parent, child in pairwise(found):
        check_continues(parent, child)
    return found


def check_continues(parent: Manifest, child: Manifest) -> None:
    """Raises Corrupted if the incremental `child` cannot be what happened after `parent`."""
    if child.cluster != parent.cluster:
        raise Corrupted(f"snapshot {child.id} is of cluster {child.cluster}, its parent of {parent.cluster}")
    after = child.places()
    for before in parent.partitions:
        place = after.get(before.partition)
        if place is None and before.has_left:
            continue  # the parent has its log up to the end
        if place is None or place.sequence < before.sequence:
            found = f"at {place.sequence}" if place else "missing"
            raise Corrupted(
                f"snapshot {child.id}: partition {before.partition} is {found}, in its parent at {before.sequence}"
            )


@dataclass(frozen=True, slots=True)
class Cut:
    """Up to where a chain is wanted: a moment for all partitions, or a sequence for some. Default: all of it."""

    time_ms: int | None = None
    sequences: Mapping[str, int] | None = None
    """Partitions that are not named are taken up to the end."""

    def bound(self, partition: str, end: int) -> int:
        """The last sequence of the partition that is wanted, as far as sequences say it."""
        return min(end, (self.sequences or {}).get(partition, end))


def covering(catalogue: Catalogue, wanted: str | None, cut: Cut) -> list[Manifest]:
    """The chain from which the state at `cut` can be had: that of `wanted`, without the incrementals that lie behind
    the cut; without `wanted`, the shortest that reaches it. Raises InvalidRequest or Corrupted if there is none."""
    if wanted is not None:
        return _cut_chain(chain_of(catalogue, wanted), cut)
    refusal: StoreError | None = None
    for manifest in reversed(in_order(catalogue)):
        try:
            return _cut_chain(chain_of(catalogue, manifest.id), cut)
        except (InvalidRequest, Corrupted) as error:
            refusal = refusal or error
    raise refusal or InvalidRequest("there is no snapshot here")


def _cut_chain(chain: Sequence[Manifest], cut: Cut) -> list[Manifest]:
    full, last = chain[0], chain[-1]
    if cut.time_ms is not None:
        if full.time_ms > cut.time_ms:
            raise InvalidRequest(f"{_moment(cut.time_ms)} is before snapshot {full.id}, of {_moment(full.time_ms)}")
        if complete_until_ms(last) < cut.time_ms:
            known = _moment(complete_until_ms(last))
            raise InvalidRequest(f"{_moment(cut.time_ms)} is after snapshot {last.id}, complete up to {known}")
    for partition, sequence in sorted((cut.sequences or {}).items()):
        first, end = full.places().get(partition), last.places().get(partition)
        if end is None:
            raise InvalidRequest(f"snapshot {last.id} has no partition {partition}")
        lowest = first.sequence if first else 0
        if not lowest <= sequence <= end.sequence:
            raise InvalidRequest(
                f"partition {partition}: want a sequence from {lowest} ({full.id}) to {end.sequence} ({last.id}), "
                f"got {sequence}"
            )
    if cut == Cut():
        return list(chain)  # also what adds nothing: it is part of what is proven
    reaching = [number for number, (parent, child) in enumerate(pairwise(chain), 1) if _reaches(parent, child, cut)]
    return list(chain[: max(reaching, default=0) + 1])  # one in which nothing had changed may lie in between


def complete_until_ms(manifest: Manifest) -> int:
    """Nothing that was written up to then is missing: each position is a MARK of a later time."""
    return min((each.time_ms for each in manifest.partitions if not each.has_left), default=0) - 1


def _reaches(parent: Manifest, child: Manifest, cut: Cut) -> bool:
    """Whether anything in `child` may lie before the cut."""
    if cut.time_ms is not None and all(each.time_ms > cut.time_ms for each in parent.partitions):
        return False
    before = parent.places()
    return any(
        cut.bound(each.partition, each.sequence) > (before[each.partition].sequence if each.partition in before else 0)
        for each in child.partitions
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRetention:
    """Says which snapshots must be kept: the newest ones, and the newest of each of so many days and weeks (UTC)."""

    newest: int = 0
    days: int = 0
    weeks: int = 0

    def __post_init__(self) -> None:
        if min(self.newest, self.days, self.weeks) < 0 or not (self.newest or self.days or self.weeks):
            raise InvalidRequest("say what to keep: at least 1 of --keep, --daily, --weekly")


def prunable(catalogue: Catalogue, retention: SnapshotRetention) -> list[Manifest]:
    """Return the snapshots that may go, in an order in which every chain is whole after each removal: children before
    their parents.

    Kept is what the retention names, of each cluster, and all that it stands on, always the newest one; so a chain goes
    as a whole. Raises Corrupted if a chain that must be kept is broken already: then nobody can tell what it needs.
    """
    newest_first = in_order(catalogue)[::-1]
    named: list[Manifest] = []
    for cluster in {each.cluster for each in newest_first}:
        own = [each for each in newest_first if each.cluster == cluster]
        named += own[: retention.newest]
        named += _newest_of(own, retention.days, "%Y-%m-%d")
        named += _newest_of(own, retention.weeks, "%G-W%V")
    kept = {each.id for one in named for each in chain_of(catalogue, one.id)}
    going = [each for each in newest_first if each.id not in kept]
    return sorted(going, key=lambda each: _depth(catalogue, each), reverse=True)


def _newest_of(newest_first: Iterable[Manifest], count: int, period: str) -> list[Manifest]:
    """The newest snapshot of each of the last `count` periods that have one, by the servers' clocks: days that the
    machine which takes snapshots has made up would push real ones out."""
    found: dict[str, Manifest] = {}
    for manifest in newest_first:
        found.setdefault(datetime.fromtimestamp(complete_until_ms(manifest) / 1000, UTC).strftime(period), manifest)
    return list(found.values())[:count]


def _depth(catalogue: Catalogue, manifest: Manifest) -> int:
    """How many snapshots it stands on, as far as they are here."""
    seen = {manifest.id}
    above = catalogue.get(manifest.parent or "")
    while above is not None and above.id not in seen:
        seen.add(above.id)
        above = catalogue.get(above.parent or "")
    return len(seen)


def _moment(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
