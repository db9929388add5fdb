"""Chooses the partitions whose feeds make up one watch, and those that wait for another's. Decides only.

All changes of a key stand in the log of whoever owned it then. So a watch of a range follows all partitions, and a
watch of one key whoever owns that; a range that moves is followed from its RELEASE at the source to its OWN at the
target. What the target logs behind OWN waits until everything up to RELEASE has been given out: so the changes of one
key come in the order of their versions (docs/protocol.md F3, F4).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvstore.errors import InvalidRequest
from kvstore.partition.state.changes import FeedEntry, Handed, Interest
from kvstore.ring import Ring
from kvstore.ring.hashing import token_of
from kvstore.types import PartitionId

NEW = 0
"""Where the feed of a partition begins that has joined since."""


class FeedToFollow(NamedTuple):
    """A feed to be read, from one of these places on."""

    partition: PartitionId
    after: int | None = None
    """Neither this nor a time: from now on."""
    time_ms: int | None = None


class WatchPlan:
    """The plan of one watch. `positions` are those of the feeds that are followed; whoever reads them keeps them up to
    date."""

    def __init__(self, interest: Interest) -> None:
        self.interest = interest
        self.positions: dict[PartitionId, int] = {}
        key = interest.key
        self._token = token_of(key) if key is not None else None
        self._ended: set[PartitionId] = set()
        """Of a range: partitions of which the reader has had everything, or that had left when he began."""
        self._doubtful: set[PartitionId] = set()
        """Of a range: partitions that had left and that his positions do not name. He has had such a one to its end, or
        nothing of it, if it joined and left while he was away."""
        self._perhaps_missed: set[PartitionId] = set()
        """Of those: a RELEASE to it stands right at a position, which does not tell whether he has passed it."""
        self._after: Mapping[str, int] = {}
        self._given: dict[PartitionId, int] = {}
        """Of one key: up to where all has been had of an owner that is not followed any more."""
        self._begun_by = 0
        """Version of the ring that the watch began by: what its server knows may lag behind that."""
        self._non_owners: set[PartitionId] = set()
        """Of one key: partitions that were named and did not own it, or not any more, when the watch began."""

    def begin(self, ring: Ring, after: Mapping[str, int]) -> list[FeedToFollow]:
        """Choose the feeds to follow first. `ring`: as it is now, read after the watch was asked for. Raises
        InvalidRequest."""
        self._begun_by = ring.version
        known = {*ring.partitions, *ring.retired}
        unknown = sorted(set(after) - known)
        if unknown:
            raise InvalidRequest(f"`after` names {unknown}; want partitions of this cluster, as {sorted(known)}")
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
        """Those who may log changes of interest from now on, but for whoever gets a range by a move that is planned
        later. Of one key, its owner comes first."""
        if self._token is None:
            return [each for each in sorted(ring.partitions) if not ring.has_left(each)]
        owners = [ring.owner_of(self._token)]
        for move in ring.moves.values():
            if move.first <= self._token <= move.end:
                owners += [move.source, move.target]
        return list(dict.fromkeys(owners))

    def joined(self, ring: Ring) -> list[FeedToFollow]:
        """Partitions that are new in the ring. One from before the watch began says nothing: who has left since would
        be shown from its beginning (docs/protocol.md, F4)."""
        if self._token is not None or ring.version < self._begun_by:
            return []
        new = [each for each in self._owners(ring) if each not in self.positions and each not in self._ended]
        return [FeedToFollow(each, NEW) for each in new]

    # ── entries ───────────────────────────────────────────────────────────────────────────────────────────────────────

    # docs/protocol.md F3
    def is_held(self, entry: FeedEntry) -> bool:
        """Whether the entry must wait: what the range's former owner logged comes first."""
        handed = entry.handed
        if handed is None or not handed.is_owned:
            return False
        reached = self.positions.get(handed.peer)
        if reached is not None:
            return reached < handed.peer_seq
        if self._token is None:
            return handed.peer not in self._ended
        is_alone = len(self.positions) < 2  # nothing else is followed that could lead to the former owner
        return not is_alone and handed.span.holds(self._token) and self._given.get(handed.peer, 0) < handed.peer_seq

    def missed(self, entry: FeedEntry) -> FeedToFollow | None:
        """Choose the feed that an entry which is held waits for, if nobody follows that yet."""
        handed = entry.handed
        if handed is None or self._token is not None or handed.peer in self.positions:
            return None
        # In the feed of one that was perhaps missed there may be a RELEASE to any other.
        is_new = handed.peer not in self._doubtful or self._perhaps_missed - self.positions.keys() - self._ended
        return FeedToFollow(handed.peer, NEW) if is_new else None

    def is_in_doubt(self, entry: FeedEntry) -> bool:
        """Whether an entry that is held waits for a feed that is not followed, and that the reader may have had."""
        return entry.handed is not None and entry.handed.peer not in self.positions

    def had(self, entry: FeedEntry) -> None:
        """Take note that no feed leads to the former owner whom a held entry names: the reader has had all of it."""
        handed = entry.handed
        assert handed is not None, "no entry is held but an OWN"
        if self._token is None:
            self._doubtful.discard(handed.peer)
            self._ended.add(handed.peer)
        else:
            self._given[handed.peer] = handed.peer_seq

    def goes_on_at(self, entry: FeedEntry, partition: PartitionId) -> FeedToFollow | None:
        """A feed that has to be followed from now on, because of a range that goes there. The entry is `partition`'s,
        and none that the reader has had for certain."""
        handed = entry.handed
        if handed is None or handed.is_owned or handed.peer in self.positions:
            return None
        if self._token is not None:
            return FeedToFollow(handed.peer, time_ms=entry.time_ms) if handed.span.holds(self._token) else None
        if handed.peer in self._ended:
            return None
        if handed.peer in self._doubtful and entry.after <= self._after.get(partition, NEW):
            self._perhaps_missed.add(handed.peer)
            return None
        return FeedToFollow(handed.peer, NEW)

    def is_over(self, entry: FeedEntry) -> bool:
        """Whether what follows in this feed does not matter: the one key has gone elsewhere."""
        handed = entry.handed
        return self._gives_away(handed) if handed is not None else False

    def _gives_away(self, handed: Handed) -> bool:
        return not handed.is_owned and self._token is not None and handed.span.holds(self._token)

    # ── ends ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def may_end(self, ring: Ring, partition: PartitionId) -> bool:
        """Whether nothing of interest can follow, once the feed has been read to its end."""
        return partition in self._non_owners or ring.has_left(partition)

    def ended(self, partition: PartitionId) -> None:
        self._given[partition] = self.positions.pop(partition, NEW)
        self._non_owners.discard(partition)
        if self._token is None:
            self._ended.add(partition)
