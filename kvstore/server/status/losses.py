"""Losses of a node's cluster, and their ends: the metadata store, an ack quorum of bookies, leaders. Decides
only; loss_watch.py looks and writes it to the log (docs/how-to/read-logs.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.types import PartitionId, ServerId

GONE_S = 2.0
"""From when on something is lost: leads change hands and sessions move in less, as often as nodes are restarted."""
NAMED_MAX = 10
"""Partitions that a line names; of the others it says how many they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The view that the node has at one moment."""

    metadata: str = "connected"
    """The state of the session: connected, suspended or lost."""
    writable: int = 0
    """Bookies that are registered as writable."""
    readonly: int = 0
    ack: int = 0
    """How many of them an acknowledged write needs."""
    leaders: Mapping[PartitionId, ServerId] = field(default_factory=dict)
    """Of the partitions that have one."""
    leaderless: Iterable[PartitionId] = ()
    """Those that nobody is known to lead."""
    servers: frozenset[ServerId] = frozenset()
    """Those that are registered."""


class News(NamedTuple):
    """A line for the log: a message and its arguments."""

    is_loss: bool
    """It is a warning; else something is back."""
    message: str
    arguments: tuple[object, ...]


@dataclass(slots=True)
class _Loss:
    since: float
    reason: str
    is_told: bool = False


class Losses:
    """Each loss is told once, when it has lasted for GONE_S, and so is its end."""

    def __init__(self) -> None:
        self._metadata: _Loss | None = None
        self._quorum: _Loss | None = None
        self._leaders: dict[PartitionId, _Loss] = {}
        self._led_by: dict[PartitionId, ServerId] = {}
        """Who led last."""

    def look(self, now: float, sight: Sight) -> list[News]:
        """Return what is to be told of what is seen `now`."""
        return [*self._of_metadata(now, sight), *self._of_quorum(now, sight), *self._of_leaders(now, sight)]

    def _of_metadata(self, now: float, sight: Sight) -> Iterable[News]:
        reason = "" if sight.metadata == "connected" else sight.metadata
        self._metadata, told = _follow(self._metadata, reason, now)
        if told is not None and reason:
            yield News(
                True,
                "metadata=%s the metadata store is away: reads and writes go on, nothing is elected, rolled or "
                "repaired until it is back",
                (reason,),
            )
        elif told is not None:
            yield News(False, "metadata=%s the metadata store is back after %.1f s", (sight.metadata, now - told.since))

    def _of_quorum(self, now: float, sight: Sight) -> Iterable[News]:
        reason = "" if sight.writable >= sight.ack or sight.metadata != "connected" else "few"
        if sight.metadata != "connected" and self._quorum is not None:
            return  # which bookies there are is not known now
        self._quorum, told = _follow(self._quorum, reason, now)
        if told is not None and reason:
            yield News(
                True,
                "writable=%d readonly=%d ack=%d the ack quorum is lost: too few bookies are writable, logs that need "
                "another ledger take no writes",
                (sight.writable, sight.readonly, sight.ack),
            )
        elif told is not None:
            text = "writable=%d readonly=%d ack=%d the ack quorum is back after %.1f s"
            yield News(False, text, (sight.writable, sight.readonly, sight.ack, now - told.since))

    def _of_leaders(self, now: float, sight: Sight) -> Iterable[News]:
        lost: dict[str, list[PartitionId]] = {}
        back: list[tuple[PartitionId, float]] = []
        leaderless = set(sight.leaderless)
        for partition in sorted(leaderless | self._leaders.keys()):
            reason = self._why(partition, sight) if partition in leaderless else ""
            found, told = _follow(self._leaders.get(partition), reason, now)
            if found is None:
                self._leaders.pop(partition, None)
            else:
                self._leaders[partition] = found
            if told is not None and reason:
                lost.setdefault(told.reason, []).append(partition)
            elif told is not None and partition in sight.leaders:
                back.append((partition, now - told.since))
        self._led_by = {**self._led_by, **sight.leaders}
        for reason, partitions in sorted(lost.items()):
            yield News(True, "partitions=%s have no leader: %s", (named(partitions), reason))
        if back:
            took = max(seconds for _, seconds in back)
            names = named([partition for partition, _ in back])
            yield News(False, "partitions=%s have a leader again, after %.1f s", (names, took))

    def _why(self, partition: PartitionId, sight: Sight) -> str:
        leader = sight.leaders.get(partition)
        if leader is not None:
            return f"server={leader} has the lead and does not answer yet"
        last = self._led_by.get(partition)
        if last is None:
            return "none was known here; wait until two bookies and a replica of theirs are up"
        if last not in sight.servers:
            return f"server={last}, the last one, is not registered any more, and no other has taken over"
        return f"server={last}, the last one, gave it up, and no other has taken over"


def named(partitions: list[PartitionId]) -> str:
    """The first of them, and how many there are beside these."""
    rest = len(partitions) - NAMED_MAX
    return ",".join(partitions[:NAMED_MAX]) + (f" and {rest} more" if rest > 0 else "")


def _follow(known: _Loss | None, reason: str, now: float) -> tuple[_Loss | None, _Loss | None]:
    """Return a loss as it is known by now, and the same if it is to be told: that it is lost or, without a reason, that
    it is back."""
    if not reason:
        return None, known if known is not None and known.is_told else None
    if known is None:
        return _Loss(now, reason), None
    if known.is_told or now - known.since < GONE_S:
        known.reason = known.reason if known.is_told else reason
        return known, None
    known.is_told, known.reason = True, reason
    return known, known
