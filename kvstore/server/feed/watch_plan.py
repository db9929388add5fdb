"""Chooses the partitions whose feeds make up a watch, and those that wait for another feed. Decides only.

Every change of a key is in the log of the partition that owned the key at that time. So a watch of a range follows all
partitions, and a watch of one key follows its owner. A range that moves is followed from its RELEASE at the source to
its OWN at the target. The target's entries after OWN wait until everything up to RELEASE has been delivered, so that
the changes of one key arrive in the order of their versions (docs/protocol.md F3, F4).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvstore.errors import InvalidRequest
from kvstore.partition.state.changes import FeedEntry, Interest
from kvstore.ring import Ring
from kvstore.types import PartitionId

NEW = 0
"""Sequence at which the feed of a new partition begins."""


class FeedToFollow(NamedTuple):
    """A feed to follow, and the place from which to read it."""

    partition: PartitionId
    after: int | None = None
    """Sequence after which to read. Without it and without a time, the feed is read from now on."""
    time_ms: int | None = None


class WatchPlan:
    """Decides which feeds one watch follows. `positions` has the sequence of each followed feed, which the reader
    keeps up to date."""

    def __init__(self, interest: Interest) -> None:
        self.interest = interest
        self.positions: dict[PartitionId, int] = {}
        self._token: int | None = None
        """For one key: its token, from `begin` on."""
        self._ended: set[PartitionId] = set()
        """For a range: partitions of which the reader has everything, or that had left when it began."""
        self._doubtful: set[PartitionId] = set()
        """For a range: partitions that had left and that the reader's positions do not contain. The reader has had such
        a partition to its end, or has had nothing of it if it joined and left while the reader was absent."""
        self._perhaps_missed: set[PartitionId] = set()
        """Those of them with a RELEASE exactly at a position, which does not show whether the reader has passed it."""
        self._after: Mapping[str, int] = {}
        self._given: dict[PartitionId, int] = {}
        """For one key: up to where everything is delivered of an owner that is no longer followed."""
        self._begun_by = 0
        """Version of the ring with which the watch began. The server's own view may lag behind it."""
        self._non_owners: set[PartitionId] = set()
        """For one key: named partitions that did not own the key when the watch began. Empty once the watch has left
        the feed of an owner, because the key may have moved to any of them."""

    def begin(self, ring: Ring, after: Mapping[str, int]) -> list[FeedToFollow]:
        """Return the feeds to follow first. `ring` must be read after the watch was requested. Raises
        InvalidRequest."""
        self._begun_by = ring.version
        if self.interest.key is not None:
            self._token = ring.hash.token_of(self.interest.key)
        known = {*ring.partitions, *ring.retired}
        unknown = sorted(set(after) - known)
        if unknown:
            raise InvalidRequest(f"`after` contains {unknown}; expected partitions of this cluster: {sorted(known)}")
        owners = self._owners(ring)
        left = {PartitionId(each) for each in known} - set(owners)
        if self._token is None:
            self._after = after
            self._doubtful, self._ended = (left - set(after), set()) if after else (set(), left)
        if after:
            named = [PartitionId(each) for each in sorted(after)]
            self._non_owners = set(named) - set(owners) if self._token is not None and owners[0] in after else set()
            more = [] if self._token is not None else [each for each in owners if each not in after]
            return [FeedToFollow(each, after[each]) for each in named] + [FeedToFollow(each, NEW) for each in more]
        return [FeedToFollow(each) for each in owners]

    def _owners(self, ring: Ring) -> list[PartitionId]:
        """Return the partitions that may log changes of interest from now on, except targets of moves planned later.
        For one key, its owner comes first."""
        if self._token is None:
            return [each for each in sorted(ring.partitions) if not ring.has_left(each)]
        owners = [ring.owner_of(self._token)]
        for move in ring.moves.values():
            if move.first <= self._token <= move.end:
                owners += [move.source, move.target]
        return list(dict.fromkeys(owners))

    def joined(self, ring: Ring) -> list[FeedToFollow]:
        """Return the feeds of partitions that are new in the ring. A ring that is older than the beginning of the
        watch is ignored: a partition that has left since would be followed from its beginning (docs/protocol.md,
        F4)."""
        if self._token is not None or ring.version < self._begun_by:
            return []
        new = [each for each in self._owners(ring) if each not in self.positions and each not in self._ended]
        return [FeedToFollow(each, NEW) for each in new]

    # ── entries ───────────────────────────────────────────────────────────────────────────────────────────────────────

    # docs/protocol.md F3
    def is_held(self, entry: FeedEntry) -> bool:
        """Return True if the entry must wait until all changes that the range's former owner logged have been
        delivered."""
        handed = entry.handed
        if handed is None or not handed.is_owned:
            return False
        reached = self.positions.get(handed.peer)
        if reached is not None:
            return reached < handed.peer_seq
        if self._token is None:
            return handed.peer not in self._ended
        is_alone = len(self.positions) < 2  # no other followed feed could lead to the former owner
        return not is_alone and handed.span.holds(self._token) and self._given.get(handed.peer, 0) < handed.peer_seq

    def missed(self, entry: FeedEntry) -> FeedToFollow | None:
        """Return the feed that a held entry waits for, or None if it is already followed."""
        handed = entry.handed
        if handed is None or self._token is not None or handed.peer in self.positions:
            return None
        # The feed of a perhaps missed partition may contain a RELEASE to any other partition.
        is_new = handed.peer not in self._doubtful or self._perhaps_missed - self.positions.keys() - self._ended
        return FeedToFollow(handed.peer, NEW) if is_new else None

    def is_in_doubt(self, entry: FeedEntry) -> bool:
        """Return True if a held entry waits for a feed that is not followed, and which the reader may already have
        read."""
        return entry.handed is not None and entry.handed.peer not in self.positions

    def had(self, entry: FeedEntry) -> None:
        """Record that the reader has every change of the former owner that a held entry names, because no followed
        feed leads to that owner."""
        handed = entry.handed
        assert handed is not None, "no entry is held but an OWN"
        if self._token is None:
            self._doubtful.discard(handed.peer)
            self._ended.add(handed.peer)
        else:
            self._given[handed.peer] = handed.peer_seq

    def continues_at(self, entry: FeedEntry, partition: PartitionId) -> FeedToFollow | None:
        """Return the feed to follow from now on because the entry moves a range there, or None. The entry belongs to
        `partition`, and it must not be an entry that the reader certainly has had."""
        handed = entry.handed
        if handed is None or handed.is_owned or handed.peer in self.positions:
            return None
        if self._token is not None:
            # sequences rise along owners: a feed that ended above this RELEASE was read after it already
            is_new = handed.span.holds(self._token) and self._given.get(handed.peer, NEW) <= handed.seq
            return FeedToFollow(handed.peer, time_ms=entry.time_ms) if is_new else None
        if handed.peer in self._ended:
            return None
        if handed.peer in self._doubtful and entry.after <= self._after.get(partition, NEW):
            self._perhaps_missed.add(handed.peer)
            return None
        return FeedToFollow(handed.peer, NEW)

    # docs/protocol.md F3
    def replaces(self, entry: FeedEntry) -> PartitionId | None:
        """Return the feed that is over because the entry takes the watched key over from it, or None. The RELEASE there
        need not be read: it would lead to this feed, perhaps after this one has ended."""
        handed = entry.handed
        if handed is None or not handed.is_owned or self._token is None or not handed.span.holds(self._token):
            return None
        return handed.peer if self.positions.get(handed.peer) == handed.peer_seq else None

    # docs/protocol.md F4
    def is_over(self, entry: FeedEntry) -> bool:
        """Return True if the rest of this feed does not matter, because the watched key has moved to a partition that
        is followed. Otherwise the watch has read that partition already, and the key may have come back since."""
        handed = entry.handed
        if handed is None or handed.is_owned or self._token is None or not handed.span.holds(self._token):
            return False
        return handed.peer in self.positions

    # ── ends ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def may_end(self, ring: Ring, partition: PartitionId) -> bool:
        """Return True if no change of interest can follow once the feed has been read to its end."""
        return partition in self._non_owners or ring.has_left(partition)

    def ended(self, partition: PartitionId) -> None:
        self._given[partition] = self.positions.pop(partition, NEW)
        if partition not in self._non_owners:
            self._non_owners.clear()
        self._non_owners.discard(partition)
        if self._token is None:
            self._ended.add(partition)
