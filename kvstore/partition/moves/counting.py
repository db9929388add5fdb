"""Keeps the counts and hashes of the ranges that move away, on the leader of the source. If a copy differs, the range
is counted again from the engine, which shows which side is wrong (docs/protocol.md, M6)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Container

from kvstore.env import Nursery
from kvstore.errors import Unavailable
from kvstore.os_errors import is_passing
from kvstore.partition.state.digest import RangeDigest
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import TokenSpan
from kvstore.types import PartitionId

log = logging.getLogger(__name__)

COPIES_MAX = 3
"""Number of copies of one move that may differ from what was counted twice. After that an operator must act."""


class Counts:
    """The counts of one replica, across successive leaderships."""

    def __init__(self, nursery: Nursery, partition: PartitionId, state: ReplicaState) -> None:
        self.corrected = self.copies_wrong = 0
        """Number of wrong counts here, and of wrong copies."""
        self._nursery, self._partition, self._state = nursery, partition, state
        self._kept: dict[int, RangeDigest] = {}
        self._again: dict[int, RangeDigest] = {}
        """Recounts from the beginning, besides the counts that were kept current."""
        self._certain: set[int] = set()
        """Moves that were recounted since a copy differed."""
        self._wrong: Counter[int] = Counter()

    @property
    def stuck(self) -> list[int]:
        """The moves that are no longer frozen, because their copies have differed repeatedly."""
        return sorted(move for move, copies in self._wrong.items() if copies >= COPIES_MAX)

    def keep_only(self, moves: Container[int]) -> None:
        """Stop all counts except those of these moves."""
        for move in {**self._kept, **self._wrong}:
            if move not in moves:
                self.stop(move)

    def find(self, move: int) -> RangeDigest | None:
        """Return the count of the move if it is complete. Returns None if it is not complete or not known here."""
        found = self._kept.get(move)
        return found if found is not None and found.is_complete else None

    def start(self, move: int, span: TokenSpan) -> None:
        """Start to count the range, unless it has been counted. Raises Unavailable while the count is in progress, and
        for a move that is stuck."""
        if self._wrong[move] >= COPIES_MAX:
            raise Unavailable(
                f"partition {self._partition}: {COPIES_MAX} copies by move {move} differ from two counts of the range: "
                f"cancel it (`kvstore ring cancel {move}`) and compare the replicas"
            )
        if move not in self._kept:
            self._begin(self._kept, move, span)
        counting = self._again.get(move) or self._kept[move]
        if move in self._again or not counting.is_complete:
            raise Unavailable(f"partition {self._partition}: still counting {span}, {counting.count} so far")

    def doubt(self, move: int) -> bool:
        """Handle a copy that differs from the count. Returns True if the copy is wrong. Otherwise, the range is counted
        again, which will show which side is wrong."""
        if move not in self._certain:
            if move not in self._again:
                self._begin(self._again, move, self._kept[move].span)
            return False
        self._certain.discard(move)  # next time this side may be wrong again
        self._wrong[move] += 1
        self.copies_wrong += 1
        return True

    def stop(self, move: int) -> None:
        for digests in (self._kept, self._again):
            digest = digests.pop(move, None)
            if digest is not None:
                self._state.unwatch(digest)
        self._certain.discard(move)
        del self._wrong[move]

    def _begin(self, into: dict[int, RangeDigest], move: int, span: TokenSpan) -> None:
        try:
            digest = into[move] = RangeDigest(self._state.engine, span)
        except OSError as error:
            if not is_passing(error):
                raise
            raise Unavailable(f"partition {self._partition}: cannot count {span} now: {error}") from error
        self._state.watch(digest)
        self._nursery.spawn(self._count(into, move, digest), name=f"{self._partition} count")

    async def _count(self, into: dict[int, RangeDigest], move: int, digest: RangeDigest) -> None:
        while into.get(move) is digest:  # otherwise it was stopped, perhaps before the first step
            try:
                is_complete = digest.step()
            except OSError as error:
                if not is_passing(error):
                    raise
                log.warning("partition=%s move=%d cannot count now: %s", self._partition, move, error)
                self._state.unwatch(digest)
                del into[move]  # the next request begins again
                return
            if is_complete:
                if into is self._again:
                    self._compare(move)
                return
            await asyncio.sleep(0)

    def _compare(self, move: int) -> None:
        """Compare the recount with the count, and keep the recount."""
        kept, again = self._kept[move], self._again.pop(move)
        if (kept.count, kept.hash) == (again.count, again.hash):
            log.warning("partition=%s move=%d recounted, %d records as before", self._partition, move, kept.count)
        else:
            self.corrected += 1
            was, now = (kept.count, kept.hash), (again.count, again.hash)
            log.error("partition=%s move=%d wrong count %s, corrected to %s", self._partition, move, was, now)
        self._state.unwatch(kept)
        self._kept[move] = again
        self._certain.add(move)
