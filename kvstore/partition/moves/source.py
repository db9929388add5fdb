"""Carries out the source's part in moves: serves pages, freezes, releases and unfreezes, as far as the source's log
allows.

Any replica serves pages; the leader does everything else (docs/protocol.md M5 to M8). This file logs the records.
`leading/serving_ranges.py` stops the writes or reads of the range as soon as a record is sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Container
from typing import NamedTuple

import msgspec

from kvstore.env import Env
from kvstore.env.nursery import shielded
from kvstore.errors import InvalidRequest, NotLeader, OutcomeUnknown, StoreError, Unavailable
from kvstore.partition.in_time import in_time
from kvstore.partition.leading.leader import Leader
from kvstore.partition.moves import pages
from kvstore.partition.moves.counting import Counts
from kvstore.partition.state.move_records import Drop, Freeze, Release, Unfreeze
from kvstore.partition.state.ownership import ReleasedRange
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import TokenSpan
from kvstore.types import PartitionId, Position
from kvstore.wal.ledger_list import BEGINNING

log = logging.getLogger(__name__)

FREEZE_S = 0.15
"""Seconds after which a freeze ends by itself, so that writes wait no longer than users accept."""
FREEZE_DOUBLINGS = 3
"""Each further freeze of a move lasts twice as long as the one before, up to this many doublings, so that moves
complete even if everything is slow."""
POLL_S = 0.005
LAPSE_AGAIN_S = 0.05
DROP_ROWS, DROP_BYTES = 500, 1 << 20
"""Limits of one DROP, which takes some milliseconds on every replica, because it reads the rows that it removes."""

PIN, PAGE, FREEZE, RELEASE, CANCEL = "move-pin", "move-page", "move-freeze", "move-release", "move-cancel"
METHODS = frozenset((PIN, PAGE, FREEZE, RELEASE, CANCEL))
FLIPPED = "move-flipped"
"""Sent to any replica of source or target: the version of the ring that the flip has created."""
ROUTED_BYTES = 8
"""Size of that version in bytes."""


class MoveRequest(NamedTuple):
    """A target's request. The method determines which fields are used."""

    move: int
    target: PartitionId
    span: TokenSpan
    position: Position = BEGINNING
    """For a page: the pin. For a release: the freeze."""
    cursor: bytes = b""
    records: int = 0
    hash: int = 0


class ReleaseVerdict(NamedTuple):
    """The answer to RELEASE and to CANCEL: whether the range was released or is kept. While that is unknown, the call
    raises an error."""

    released: ReleasedRange | None
    differs: bool = False
    """True if the range was not released because the copy is wrong. The target must not request the release of this
    copy again."""


request_of = msgspec.msgpack.Decoder(MoveRequest).decode
_encode = msgspec.msgpack.Encoder().encode


class Source:
    """The source side of the moves of one replica. `leading` returns the leader of the replica, or None if the replica
    is not serving."""

    def __init__(
        self,
        env: Env,
        partition: PartitionId,
        state: ReplicaState,
        leading: Callable[[], Leader | None],
        freeze_s: float,
    ) -> None:
        self._env, self._partition, self._state, self._leading = env, partition, state, leading
        self._freeze_s = freeze_s
        self._lapses: Counter[int] = Counter()
        """Number of freezes of each move that have lapsed."""
        self.counts = Counts(env.nursery, partition, state)
        self._counts_for: Leader | None = None
        """The leader whose counts these are. Counts of another leader may not fit what it froze."""
        self.pages = 0

    async def answer(self, method: str, body: bytes) -> bytes:
        """Answer a request from the target of a move. Raises StoreError."""
        return await in_time(self._answer(method, body), self._partition, method)

    async def _answer(self, method: str, body: bytes) -> bytes:
        try:
            asked = request_of(body)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"expected a request of a target, got {body[:64].hex()}: {error}") from error
        if method == PIN:
            return _encode(await self._pin(asked))
        if method == PAGE:
            return pages.encode(self._page(asked))
        if method == FREEZE:
            return _encode(await self._freeze(asked))
        if method == RELEASE:
            return _encode(await self._release(asked))
        if method == CANCEL:
            return _encode(await self._cancel(asked))
        raise InvalidRequest(f"expected one of {', '.join(sorted(METHODS))}, got {method!r}")

    def keep(self, moves: Container[int]) -> None:
        """Stop all counts except those of these moves."""
        self.counts.keep_only(moves)
        for move in [each for each in self._lapses if each not in moves]:
            del self._lapses[move]

    # ── what any replica gives ────────────────────────────────────────────────────────────────────────────────────────

    async def _pin(self, asked: MoveRequest) -> Position:
        """Return the leader's position. The state of another replica may be older than a release of the range and
        its return: it owns the range there too, and a pin there would miss what was written elsewhere meanwhile."""
        await self._lead().prove()
        return self._where(asked)

    def _where(self, asked: MoveRequest) -> Position:
        """Return this replica's position, if it owns the range there. Raises Unavailable."""
        state = self._state
        if (
            state.position is None
            or state.is_suspect
            or not state.ownership.is_founded
            or not state.ownership.owned.covers(asked.span)
        ):
            raise Unavailable(f"partition {self._partition}: this replica does not own {asked.span} at its position")
        return state.position

    def _page(self, asked: MoveRequest) -> pages.RangePage:
        if self._where(asked) < asked.position:
            raise Unavailable(f"partition {self._partition}: this replica has not reached the pin {asked.position}")
        self.pages += 1
        return pages.page_of(self._state, asked.span, asked.cursor)

    # ── what the leader does ──────────────────────────────────────────────────────────────────────────────────────────

    def _lead(self) -> Leader:
        leader = self._leading()
        if leader is None:
            raise NotLeader(self._partition)
        if leader is not self._counts_for:
            self.keep(())
            self._counts_for = leader
        return leader

    # docs/protocol.md M5, M12
    async def _freeze(self, asked: MoveRequest) -> Position:
        """Freeze the range and return the position of the freeze. Raises Unavailable if that is not possible now, or
        the range is still being counted."""
        leader = self._lead()
        found = leader.serving_ranges.ownership.frozen_by(asked.move)
        is_counted = self.counts.find(asked.move) is not None
        if found is not None and is_counted and not leader.serving_ranges.is_pending(asked.move):
            return found.position
        # The answer may be abandoned while the record is in flight, and the freeze must lapse all the same.
        freezing = self._env.nursery.spawn(self._frozen(asked), name=f"{self._partition} freeze")
        try:
            position_or_error: Position | StoreError = await shielded(freezing)
        except asyncio.CancelledError:
            if freezing.done():  # the replica stops
                raise OutcomeUnknown(f"partition {self._partition}: stopped while {asked.span} was frozen") from None
            raise
        if isinstance(position_or_error, StoreError):
            raise position_or_error
        return position_or_error

    async def _frozen(self, asked: MoveRequest) -> Position | StoreError:
        """Log a freeze that lapses in time. Return the error if it cannot be logged."""
        try:
            leader = self._lead()
            if not leader.serving_ranges.may_freeze(asked.move, asked.span):
                return Unavailable(f"partition {self._partition}: {asked.span} cannot be frozen now")
            self.counts.start(asked.move, asked.span)
            position = await leader.append_record(Freeze(asked.move, asked.target, asked.span))
        except StoreError as error:
            return error
        log.info("partition=%s move=%d frozen at %s", self._partition, asked.move, position)
        self._env.nursery.spawn(self._lapse(leader, asked.move, position), name=f"{self._partition} unfreeze")
        return position

    async def _release(self, asked: MoveRequest) -> ReleaseVerdict:
        """Release the range, or report that its freeze has lapsed. Raises Unavailable, or OutcomeUnknown, if that is
        not known yet."""
        released = self._released(asked)
        if released is not None:
            return ReleaseVerdict(released)
        leader = self._lead()
        serving_ranges, move = leader.serving_ranges, asked.move
        if serving_ranges.is_pending(move):
            raise Unavailable(f"partition {self._partition}: a record of move {move} is in flight; retry later")
        found, digest = serving_ranges.ownership.frozen_by(move), self.counts.find(move)
        if found is None or found.position != asked.position:
            await leader.prove()  # a deposed leader does not know what was released since
            return ReleaseVerdict(None)
        if digest is None:  # another leader froze the range, and has counted it
            await self._unfreeze(leader, move)
            return ReleaseVerdict(None)
        if (digest.count, digest.hash) != (asked.records, asked.hash):
            counted = (digest.count, digest.hash)
            is_copy_wrong = self.counts.doubt(move)
            log.error("partition=%s move=%d copy %s differs from %s", self._partition, move, asked[-2:], counted)
            await self._unfreeze(leader, move)
            return ReleaseVerdict(None, differs=is_copy_wrong)
        await leader.append_record(Release(move, asked.position, asked.records, found.target, found.span))
        log.info("partition=%s move=%d released to %s", self._partition, move, asked.target)
        self._forget(move)
        return ReleaseVerdict(self._released(asked))

    def _released(self, asked: MoveRequest) -> ReleasedRange | None:
        """Return the release, also from a follower's state. Raises InvalidRequest if the range was released under
        another freeze."""
        found = self._state.ownership.released_by(asked.move)
        if found is not None and found.freeze != asked.position and asked.position != BEGINNING:
            raise InvalidRequest(f"move {asked.move} was released at freeze {found.freeze}, not {asked.position}")
        return found

    async def _cancel(self, asked: MoveRequest) -> ReleaseVerdict:
        """Report the range as released, or keep it for good: no earlier request of the target will then be
        performed."""
        leader = self._lead()
        while leader.serving_ranges.is_pending(asked.move):
            await asyncio.sleep(POLL_S)
            leader = self._lead()
        found = self._released(asked._replace(position=BEGINNING))
        if found is None:
            if leader.serving_ranges.ownership.frozen_by(asked.move) is not None:
                await self._unfreeze(leader, asked.move)
            self._forget(asked.move)
            await leader.prove()
        return ReleaseVerdict(found)

    def _forget(self, move: int) -> None:
        self.counts.stop(move)
        self._lapses.pop(move, None)

    async def _unfreeze(self, leader: Leader, move: int) -> None:
        log.info("partition=%s move=%d unfreezing the range", self._partition, move)
        await leader.append_record(Unfreeze(move))

    async def _lapse(self, leader: Leader, move: int, freeze: Position) -> None:
        """End a freeze when its time is up, unless it has ended or another leader has begun, which unfreezes the
        range."""
        await asyncio.sleep(self._freeze_s * 2 ** min(self._lapses[move], FREEZE_DOUBLINGS))
        # None: also while a leader that tries to release the lead may continue
        while self._leading() in (leader, None):
            found = leader.serving_ranges.ownership.frozen_by(move)
            if found is None or found.position != freeze:
                return
            if self._leading() is leader and not leader.serving_ranges.is_pending(move):
                self._lapses[move] += 1
                try:
                    return await self._unfreeze(leader, move)
                except StoreError as error:
                    log.info("partition=%s move=%d unfreezing failed, retrying: %r", self._partition, move, error)
            await asyncio.sleep(LAPSE_AGAIN_S)

    # ── after the flip, and after a takeover ──────────────────────────────────────────────────────────────────────────

    async def unfreeze_all(self, leader: Leader) -> None:
        """Unfreeze the ranges that a former leader froze, because this leader has not counted them."""
        self._lead()
        serving_ranges = leader.serving_ranges
        for move in [each.move for each in serving_ranges.ownership.frozen]:
            # A request that arrived while another range was unfrozen may have ended this freeze.
            if (
                serving_ranges.ownership.frozen_by(move)
                and self.counts.find(move) is None
                and not serving_ranges.is_pending(move)
            ):
                await self._unfreeze(leader, move)

    async def drop_some(self, leader: Leader, move: int) -> bool:
        """Log the removal of some rows of a range that the partition no longer owns. Returns True once no rows are
        left. A deposed leader may not know of some rows yet, so the leader proves that it leads before it returns
        True."""
        going = leader.serving_ranges.ownership.droppable(move)
        if going is None:
            await leader.prove()
            return leader.serving_ranges.ownership.droppable(move) is None
        until = drop_bound(self._state, *going)
        await leader.append_record(Drop(move, until))
        return not until


def drop_bound(state: ReplicaState, begin: bytes, end: bytes) -> bytes:
    """Return the row key up to which one DROP removes rows; empty if one DROP removes all rows."""
    size = 0
    for number, (row_key, row) in enumerate(state.engine.iterate(begin, end)):
        if number == DROP_ROWS or size >= DROP_BYTES:
            return row_key
        size += len(row_key) + len(row)
    return b""
