"""Chains of snapshots: which snapshots each one builds on, where a chain can be cut, and which snapshots can be
removed. Decides only.

A chain is a full snapshot followed by incremental snapshots, each of which continues the one before. The last snapshot
can be restored only while all snapshots before it exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from kvstore.errors import Corrupted, InvalidRequest, StoreError
from kvstore.spark.snapshots.manifest import Manifest

Catalogue = Mapping[str, Manifest]


def newest_or_none(catalogue: Catalogue) -> Manifest | None:
    """Return the snapshot with the latest positions, or None if there are no snapshots."""
    return max(catalogue.values(), key=_age, default=None)


def check_one_cluster(catalogue: Catalogue) -> None:
    """Raise InvalidRequest if the catalogue has snapshots of several clusters, because "the newest" is then
    ambiguous."""
    newest = {each.cluster: each.id for each in in_order(catalogue)}
    if len(newest) > 1:
        raise InvalidRequest(
            f"expected snapshots of one cluster, got {len(newest)}; choose one of {', '.join(newest.values())}"
        )


def in_order(catalogue: Catalogue) -> list[Manifest]:
    """Return all snapshots of the catalogue, oldest first."""
    return sorted(catalogue.values(), key=_age)


def _age(manifest: Manifest) -> tuple[int, int, str]:
    """Return the sort key for the age of a snapshot. It uses the servers' clocks, which never go back. The clocks of
    machines that take snapshots may go back."""
    return complete_until_ms(manifest), manifest.started_ms, manifest.id


def chain_of(catalogue: Catalogue, wanted: str, unreadable: Mapping[str, str] | None = None) -> list[Manifest]:
    """Return the chain of the snapshot `wanted`: first the full snapshot, last `wanted` itself.

    `unreadable` gives the reason for each snapshot whose manifest cannot be read. Raises InvalidRequest if `wanted` is
    missing, Corrupted if another snapshot of the chain is missing or two neighbours do not match.
    """
    found: list[Manifest] = []
    name: str | None = wanted
    while name is not None:
        manifest = catalogue.get(name)
        if manifest is None:
            if not found:
                raise InvalidRequest(f"no snapshot {name}; list snapshots with `kvstore snapshot list`")
            if unreadable and name in unreadable:
                raise Corrupted(f"snapshot {found[-1].id} continues {name}: {unreadable[name]}")
            raise Corrupted(
                f"snapshot {found[-1].id} continues {name}, which is missing; restore its folder from a copy, or take "
                "a "
                "full snapshot"
            )
        if manifest in found:
            raise Corrupted(f"snapshot {wanted} continues itself through {name}")
        found.append(manifest)
        name = manifest.parent
    found.reverse()
    for parent, child in pairwise(found):
        check_continues(parent, child)
    return found


def check_continues(parent: Manifest, child: Manifest) -> None:
    """Raise Corrupted if the incremental snapshot `child` cannot continue `parent`."""
    if child.cluster != parent.cluster:
        raise Corrupted(f"snapshot {child.id} belongs to cluster {child.cluster}, its parent to {parent.cluster}")
    after = child.places()
    for before in parent.partitions:
        place = after.get(before.partition)
        if place is None and before.has_left:
            continue  # the parent has its whole log
        if place is None or place.sequence < before.sequence:
            found = f"at {place.sequence}" if place else "missing"
            raise Corrupted(
                f"snapshot {child.id}: partition {before.partition} is {found}, in its parent at {before.sequence}"
            )


@dataclass(frozen=True, slots=True)
class Cut:
    """The point at which to end a chain: one moment for all partitions, or a sequence for some partitions. By
    default, the cut is at the end of the chain."""

    time_ms: int | None = None
    sequences: Mapping[str, int] | None = None
    """The last wanted sequence by partition. Partitions that are not listed are included up to their end."""

    def bound(self, partition: str, end: int) -> int:
        """Return the last wanted sequence of a partition whose snapshot ends at the sequence `end`. Applies
        `sequences` only, not `time_ms`."""
        return min(end, (self.sequences or {}).get(partition, end))


def covering(catalogue: Catalogue, wanted: str | None, cut: Cut) -> list[Manifest]:
    """Return the shortest chain that contains the state at `cut`.

    With `wanted`, the result is the chain of that snapshot, without the incremental snapshots after the cut. Without
    `wanted`, it is taken from the newest snapshot whose chain is intact and reaches the cut. Raises InvalidRequest or
    Corrupted if no chain contains the state.
    """
    if wanted is not None:
        return _cut_chain(chain_of(catalogue, wanted), cut)
    refusals: list[StoreError] = []
    for manifest in reversed(in_order(catalogue)):
        try:
            return _cut_chain(chain_of(catalogue, manifest.id), cut)
        except (InvalidRequest, Corrupted) as error:
            refusals.append(error)
    if cut.time_ms is not None and refusals and all(isinstance(each, InvalidRequest) for each in refusals):
        raise _outside(catalogue, cut.time_ms)
    raise refusals[0] if refusals else InvalidRequest("no snapshots found")


def _outside(catalogue: Catalogue, time_ms: int) -> InvalidRequest:
    """Return the error for a moment that no chain contains. It names the snapshots around the moment."""
    ended = [each for each in in_order(catalogue) if complete_until_ms(each) < time_ms]
    begun = [each for each in in_order(catalogue) if each.parent is None and each.time_ms > time_ms]
    around = []
    if ended:
        last = max(ended, key=complete_until_ms)
        around.append(f"after snapshot {last.id}, complete up to {_moment(complete_until_ms(last))}")
    if begun:
        first = min(begun, key=lambda each: each.time_ms)
        around.append(f"before snapshot {first.id}, of {_moment(first.time_ms)}")
    return InvalidRequest(f"{_moment(time_ms)} is {' and '.join(around)}")


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
                f"partition {partition}: expected a sequence from {lowest} ({full.id}) to {end.sequence} ({last.id}), "
                f"got {sequence}"
            )
    if cut == Cut():
        return list(chain)  # also snapshots without changes, which are verified, too
    reaching = [number for number, (parent, child) in enumerate(pairwise(chain), 1) if _reaches(parent, child, cut)]
    return list(chain[: max(reaching, default=0) + 1])  # a snapshot without changes may lie in between


def complete_until_ms(manifest: Manifest) -> int:
    """Return the time in milliseconds up to which the snapshot has all writes. Each position is a MARK with a later
    time."""
    return min((each.time_ms for each in manifest.partitions if not each.has_left), default=0) - 1


def _reaches(parent: Manifest, child: Manifest, cut: Cut) -> bool:
    """Return True if `child` may contain changes that are before the cut."""
    if cut.time_ms is not None and all(each.time_ms > cut.time_ms for each in parent.partitions):
        return False
    before = parent.places()
    return any(
        cut.bound(each.partition, each.sequence) > (before[each.partition].sequence if each.partition in before else 0)
        for each in child.partitions
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRetention:
    """The rule for which snapshots to keep: the newest ones, and the newest one of each of the last days, weeks and
    months in UTC."""

    newest: int = 0
    days: int = 0
    weeks: int = 0
    months: int = 0

    def __post_init__(self) -> None:
        counts = (self.newest, self.days, self.weeks, self.months)
        if min(counts) < 0 or not any(counts):
            raise InvalidRequest("expected at least one of --keep, --daily, --weekly and --monthly with 1 or more")


LEGAL_HOLD = "legal hold"
"""The tag of a snapshot that stays whatever the retention says."""
_PERIODS = (("daily", "%Y-%m-%d"), ("weekly", "%G-W%V"), ("monthly", "%Y-%m"))


def kept(catalogue: Catalogue, retention: SnapshotRetention, held: Collection[str] = ()) -> dict[str, list[str]]:
    """Return the snapshots that stay, by id, each with the tags that keep it: `newest`, `daily 2026-11-30`,
    `weekly 2026-W48`, `monthly 2026-11`, `legal hold`, `needed by <id>`.

    The rule applies to each cluster separately. Each snapshot that the rule or a legal hold (`held`) keeps is kept with
    all snapshots that it builds on. Raises Corrupted if a chain that must be kept is already broken, because it is then
    unknown what the chain needs.
    """
    newest_first = in_order(catalogue)[::-1]
    tags: dict[str, list[str]] = {}
    for cluster in {each.cluster for each in newest_first}:
        own = [each for each in newest_first if each.cluster == cluster]
        for manifest in own[: retention.newest]:
            tags.setdefault(manifest.id, []).append("newest")
        counts = (retention.days, retention.weeks, retention.months)
        for (tag, period), count in zip(_PERIODS, counts, strict=True):
            for name, manifest in _newest_of(own, count, period).items():
                tags.setdefault(manifest.id, []).append(f"{tag} {name}")
    for name in sorted(catalogue.keys() & set(held)):
        tags.setdefault(name, []).append(LEGAL_HOLD)
    for name in list(tags):
        for ancestor in chain_of(catalogue, name)[:-1]:
            if ancestor.id not in tags:
                tags[ancestor.id] = [f"needed by {name}"]
    return tags


def prunable(catalogue: Catalogue, staying: Collection[str]) -> list[Manifest]:
    """Return the snapshots to remove, children before parents, so that every remaining chain is complete after each
    removal. `staying` are the snapshots that `kept` returns."""
    going = [each for each in in_order(catalogue)[::-1] if each.id not in staying]
    return sorted(going, key=lambda each: _depth(catalogue, each), reverse=True)


def _newest_of(newest_first: Iterable[Manifest], count: int, period: str) -> dict[str, Manifest]:
    """Return the newest snapshot of each of the last `count` periods that have a snapshot, by the period. Periods
    follow the servers' clocks, because a wrong clock of the machine that takes snapshots would push real periods
    out."""
    found: dict[str, Manifest] = {}
    for manifest in newest_first:
        found.setdefault(datetime.fromtimestamp(complete_until_ms(manifest) / 1000, UTC).strftime(period), manifest)
    return dict(list(found.items())[:count])


def _depth(catalogue: Catalogue, manifest: Manifest) -> int:
    """Return the number of existing snapshots that this snapshot builds on."""
    seen = {manifest.id}
    above = catalogue.get(manifest.parent or "")
    while above is not None and above.id not in seen:
        seen.add(above.id)
        above = catalogue.get(above.parent or "")
    return len(seen)


def _moment(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
