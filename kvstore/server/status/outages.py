"""Detects when outages in a node's cluster begin and end. An outage concerns the metadata store, an ack quorum of
bookies, or the leaders of partitions. Decides only; outage_watch.py checks regularly and writes the log
(docs/how-to/read-logs.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.types import PartitionId, ServerId

GONE_S = 2.0
"""Seconds after which an outage is reported. Changes of leadership and moves of sessions take less time, and are as
frequent as restarts."""
NAMED_MAX = 10
"""Maximum number of partitions that one log line names. Only the number of the others is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """The node's view of the cluster at one moment."""

    metadata: str = "connected"
    """State of the session: connected, suspended or lost."""
    writable: int = 0
    """Number of machines with a bookie that is registered as writable."""
    readonly: int = 0
    """Number of machines with a bookie that is registered as read-only."""
    ack: int = 0
    """Number of machines with a writable bookie that an acknowledged write needs."""
    leaders: Mapping[PartitionId, ServerId] = field(default_factory=dict)
    """Leaders of the partitions that have one."""
    leaderless: Iterable[PartitionId] = ()
    """Partitions without a known leader."""
    servers: frozenset[ServerId] = frozenset()
    """Registered servers."""


class OutageEvent(NamedTuple):
    """A log line: a message and its arguments."""

    is_loss: bool
    """True for an outage (a warning), False for its end."""
    message: str
    arguments: tuple[object, ...]


@dataclass(slots=True)
class _Outage:
    since: float
    reason: str
    is_reported: bool = False


class Outages:
    """Reports each outage once, when it has lasted for GONE_S seconds, and its end once."""

    def __init__(self) -> None:
        self._metadata: _Outage | None = None
        self._quorum: _Outage | None = None
        self._leaders: dict[PartitionId, _Outage] = {}
        self._led_by: dict[PartitionId, ServerId] = {}
        """The last leader of each partition."""

    def poll(self, now: float, sight: ClusterView) -> list[OutageEvent]:
        """Return the events to log, given the node's view of the cluster at the time `now`."""
        return [*self._of_metadata(now, sight), *self._of_quorum(now, sight), *self._of_leaders(now, sight)]

    def _of_metadata(self, now: float, sight: ClusterView) -> Iterable[OutageEvent]:
        reason = "" if sight.metadata == "connected" else sight.metadata
        self._metadata, reported = _follow(self._metadata, reason, now)
        if reported is not None and reason:
            yield OutageEvent(
                True,
                "metadata=%s the metadata store is unavailable: reads and writes continue, but no leader, ledger or "
                "bookie can "
                "be replaced until it is back",
                (reason,),
            )
        elif reported is not None:
            yield OutageEvent(
                False, "metadata=%s the metadata store is back after %.1f s", (sight.metadata, now - reported.since)
            )

    def _of_quorum(self, now: float, sight: ClusterView) -> Iterable[OutageEvent]:
        reason = "" if sight.writable >= sight.ack or sight.metadata != "connected" else "few"
        if sight.metadata != "connected" and self._quorum is not None:
            return  # the registered bookies are unknown now
        self._quorum, reported = _follow(self._quorum, reason, now)
        if reported is not None and reason:
            yield OutageEvent(
                True,
                "writable=%d readonly=%d ack=%d the ack quorum is lost: too few bookies are writable, so logs that "
                "need a new "
                "ledger accept no writes",
                (sight.writable, sight.readonly, sight.ack),
            )
        elif reported is not None:
            text = "writable=%d readonly=%d ack=%d the ack quorum is back after %.1f s"
            yield OutageEvent(False, text, (sight.writable, sight.readonly, sight.ack, now - reported.since))

    def _of_leaders(self, now: float, sight: ClusterView) -> Iterable[OutageEvent]:
        lost: dict[str, list[PartitionId]] = {}
        back: list[tuple[PartitionId, float]] = []
        leaderless = set(sight.leaderless)
        for partition in sorted(leaderless | self._leaders.keys()):
            reason = self._why(partition, sight) if partition in leaderless else ""
            found, reported = _follow(self._leaders.get(partition), reason, now)
            if found is None:
                self._leaders.pop(partition, None)
            else:
                self._leaders[partition] = found
            if reported is not None and reason:
                lost.setdefault(reported.reason, []).append(partition)
            elif reported is not None and partition in sight.leaders:
                back.append((partition, now - reported.since))
        self._led_by = {**self._led_by, **sight.leaders}
        for reason, partitions in sorted(lost.items()):
            yield OutageEvent(True, "partitions=%s have no leader: %s", (named(partitions), reason))
        if back:
            took = max(seconds for _, seconds in back)
            names = named([partition for partition, _ in back])
            yield OutageEvent(False, "partitions=%s have a leader again, after %.1f s", (names, took))

    def _why(self, partition: PartitionId, sight: ClusterView) -> str:
        leader = sight.leaders.get(partition)
        if leader is not None:
            return f"server={leader} has become leader but does not answer yet"
        last = self._led_by.get(partition)
        if last is None:
            return "none was known here; wait until two bookies and a replica are up"
        if last not in sight.servers:
            return f"server={last}, the last leader, is no longer registered, and no other server has taken over"
        return f"server={last}, the last leader, gave up its leadership, and no other server has taken over"


def named(partitions: list[PartitionId]) -> str:
    """Return the first names, and the number of the other partitions."""
    rest = len(partitions) - NAMED_MAX
    return ",".join(partitions[:NAMED_MAX]) + (f" and {rest} more" if rest > 0 else "")


def _follow(known: _Outage | None, reason: str, now: float) -> tuple[_Outage | None, _Outage | None]:
    """Update an outage. `reason` is empty if there is none now. Return the updated outage, and the outage to report
    if there is one: an outage that has lasted long enough or, without a reason, one that has ended."""
    if not reason:
        return None, known if known is not None and known.is_reported else None
    if known is None:
        return _Outage(now, reason), None
    if known.is_reported or now - known.since < GONE_S:
        known.reason = known.reason if known.is_reported else reason
        return known, None
    known.is_reported, known.reason = True, reason
    return known, known
