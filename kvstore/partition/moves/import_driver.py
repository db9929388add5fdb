"""Carries out one move. On the leader of the target, it performs the steps that import_steps.py decides; on the leader
of the source, it drops the moved rows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, NoReturn, assert_never

import msgspec

from kvstore.env import Env
from kvstore.errors import NoSuchEntry, NoSuchLedger, NotLeader, StoreError, Unavailable
from kvstore.partition.leading.leader import Leader
from kvstore.partition.moves import import_steps, pages, source
from kvstore.partition.moves.catch_up import SourceFollower
from kvstore.partition.moves.import_steps import ImportStep, span_of
from kvstore.partition.moves.move_pin import MovePin
from kvstore.partition.moves.source import MoveRequest, ReleaseVerdict, Source
from kvstore.partition.ports import Peers
from kvstore.partition.state.engine import wait_caught_up
from kvstore.partition.state.move_records import ImportBegin, ImportEnd, ImportRows, Own
from kvstore.partition.state.ownership import ImportedRange
from kvstore.partition.state.state import ReplicaState
from kvstore.ring import Rings, steps
from kvstore.ring.moves import Move, MoveId, MoveState
from kvstore.types import PartitionId, Position, ServerId
from kvstore.wal.ledger_list import BEGINNING
from kvstore.wal.log import PartitionLogs
from kvstore.wal.pins import Pins

log = logging.getLogger(__name__)

CALL_S = 5.0
SILENT_S, ASKED_LAST_S = 1.0, 60.0
"""A replica of the source that fails only after SILENT_S seconds is asked last for ASKED_LAST_S seconds. Otherwise a
machine that is off would delay every page."""
PAUSED_S = 1.0
"""Seconds between two checks whether a pause has ended."""
HELD_S = 600.0
"""Seconds for which a paused move pins the source's log. After that, the copy may have to start again if the log has
been trimmed meanwhile."""
PACE_S = 1.0
"""Seconds between two checks whether the pace has changed, during a throttled copy."""
WAIT_MIN_S = 0.0001
"""Minimum wait in seconds of a throttled copy. Clocks are not fine enough to wake exactly at its end: the copy would
spin until then."""


@dataclass
class Means:
    """The parts of a replica that its moves use."""

    env: Env
    server_env: Env
    """Tasks started with it outlive the replica."""
    partition: PartitionId
    state: ReplicaState
    leading: Callable[[], Leader | None]
    rings: Rings
    pins: Pins
    logs: PartitionLogs
    peers: Peers
    source: Source
    reached: Callable[[str, MoveId], None] = lambda *_: None
    """Called before and after every step."""
    copied_until: float = 0.0
    """Time before which no move may copy another page."""
    silent_until: dict[ServerId, float] = field(default_factory=dict)
    """Servers that did not answer, and the time until which every move asks them last."""
    pin_numbers: Iterator[int] = field(default_factory=lambda: count(1))


class MoveProgress(NamedTuple):
    """The progress of one move, as reported by its target."""

    part: float
    """The fraction of the range that has been copied, from 0 to 1."""
    failure: str = ""
    """The reason why the last step failed; empty if it succeeded."""
    failing_s: float = 0.0
    """Seconds since a step last succeeded; 0 if the move is not failing."""
    eta_s: float | None = None
    """Estimated seconds until the complete range has been copied, at the pace so far; None if unknown."""


class Halted(Exception):
    """Raised if this replica no longer leads, or the move is gone. The next leader continues the move."""


class ImportDriver:
    """Drives one move during one leadership."""

    def __init__(self, means: Means, move: MoveId) -> None:
        self.move = move
        self.failure = ""
        self._m = means
        self._leader = means.leading()
        self._step: ImportStep | None = None
        self._pin = MovePin(means.server_env, means.pins, means.pin_numbers)
        self._answered: ServerId | None = None
        """The server that answered the last request other than a page: the source's leader."""
        self._following = SourceFollower(means.state, means.logs, self._lead)
        self._rows = self._bytes = 0
        """Rows and bytes copied in pages."""
        self._has_owned = False
        """True once OWN, logged by this leader, is acknowledged."""
        self._waited_s = 0.0
        self._paged_to = BEGINNING
        """Position of the source's replica that gave the last page."""
        self._began_at = self._went_on_at = means.env.clock.now()
        self._began_with = self._part()

    def statistics(self) -> dict[str, Any]:
        rows, size = self._rows + self._following.rows, self._bytes + self._following.bytes
        return {"step": self._step, "rows": rows, "bytes": size, "failure": self.failure}

    def progress(self, part: float) -> MoveProgress:
        """Return the progress of the move. `part` is the fraction of the range that has been copied."""
        passed_s, come = self._m.env.clock.now() - self._began_at, part - self._began_with
        failing_s = self._m.env.clock.now() - self._went_on_at if self.failure else 0.0
        is_on_its_way = come > 0 and not self.failure and not self._m.rings.ring.pace.paused
        return MoveProgress(part, self.failure, failing_s, passed_s * (1 - part) / come if is_on_its_way else None)

    def _part(self) -> float:
        move = self._m.rings.ring.moves.get(self.move)
        return import_steps.copied_part(self._m.state.ownership, move) if move is not None else 0.0

    async def close(self) -> None:
        """Release everything that the move holds, such as its pin."""
        try:
            await self._following.forget()
        finally:  # the task that waits for the reader may be cancelled
            await self._pin.release()

    # ── deciding ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def advance(self) -> bool:
        """Carry out the next step. Returns True if this partition has no step to carry out. Raises StoreError, or
        Halted if this replica no longer leads."""
        leader = self._lead()
        ring = self._m.rings.ring
        move = ring.moves.get(self.move)
        if move is None:
            return True
        if move.source == self._m.partition:
            return await self._drop(leader, move)
        step = self._step = import_steps.next_step(self._m.state.ownership, move, is_paused=ring.pace.paused)
        if step is ImportStep.DONE:
            return True
        acts_by_state = step is ImportStep.FORGET or (step is ImportStep.FLIP and not self._has_owned)
        if acts_by_state and not await _is_still_next(step, leader, self._m, move):
            return False
        if step is not ImportStep.WAIT:
            self._waited_s = 0.0
        self._m.reached(f"before {step}", self.move)
        await self._perform(step, leader, move)
        self._m.reached(f"after {step}", self.move)
        self.failure, self._went_on_at = "", self._m.env.clock.now()
        return False

    async def _perform(self, step: ImportStep, leader: Leader, move: Move) -> None:
        match step:
            case ImportStep.WAIT:
                await self._wait()
            case ImportStep.BEGIN:
                await self._begin(leader, move)
            case ImportStep.COPY:
                await self._copy(leader, move)
            case ImportStep.FOLLOW:
                await self._follow(leader, move)
            case ImportStep.ASK:
                await self._ask(leader, move)
            case ImportStep.FLIP:
                await self._flip(move)
            case ImportStep.GIVE_UP:
                await self._cancel_move(leader, move)
            case ImportStep.WIPE:
                await self._m.source.drop_some(leader, self.move)
            case ImportStep.FORGET:
                await self._m.rings.change(lambda ring: steps.cancelled(ring, self.move))
            case ImportStep.DONE:
                raise AssertionError("done is no work")
            case _:
                assert_never(step)

    async def _wait(self) -> None:
        """Wait because moves are paused."""
        await asyncio.sleep(PAUSED_S)
        self._waited_s += PAUSED_S
        if self._waited_s >= HELD_S and self._pin.is_held:
            log.info("partition=%s move=%d is paused, releasing the source's log", self._m.partition, self.move)
            await self._following.stop_reading()
            await self._pin.release()

    def _lead(self) -> Leader:
        leader = self._m.leading()
        if leader is None or leader is not self._leader:
            raise Halted(f"partition {self._m.partition} has a new leader or a new epoch")
        return leader

    def _import(self) -> ImportedRange:
        found = self._m.state.ownership.import_of(self.move)
        if found is None:
            raise Halted(f"move {self.move} is gone from the ring or its import has ended")
        return found

    # ── as target ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _begin(self, leader: Leader, move: Move) -> None:
        pin = msgspec.msgpack.decode(await self._call(move, source.PIN), type=Position)
        attempt = move.attempt + 1
        await self._hold(move, pin, attempt)
        await self._m.rings.change(lambda ring: steps.begin(ring, self.move, attempt))
        self._lead()
        await leader.append_record(ImportBegin(self.move, attempt, move.source, span_of(move), pin))
        log.info("partition=%s move=%d attempt=%d begins at %s", self._m.partition, self.move, attempt, pin)

    async def _hold(self, move: Move, position: Position, attempt: int) -> None:
        """Pin the source's log from `position` on. Raises NoSuchLedger if part of it is gone."""
        assert self._leader is not None
        await self._pin.hold(move.source, f"move-{self.move}-{self._leader.epoch}-{attempt}", position.ledger)

    async def _copy(self, leader: Leader, move: Move) -> None:
        found = self._import()
        await self._restore_pin(move, found)
        await wait_caught_up(self._m.state.engine)
        # Pages never go back, and a new leader starts again with the request ids (docs/protocol.md M4).
        cursor = min(found.cursor, pages.RETRIES) if self._paged_to == BEGINNING else found.cursor
        position = max(found.pin, self._paged_to)
        page = pages.decode(await self._call(move, source.PAGE, position=position, cursor=cursor))
        pages.admit(self._m.state, page.version)
        self._paged_to = page.position
        self._lead()
        rows = ImportRows(self.move, page.keys, page.rows, page.cursor, found.tail)
        await leader.append_record(rows, pages.requests_in(page))
        size = sum(map(len, page.keys)) + sum(map(len, page.rows))
        self._rows += len(page.keys)
        self._bytes += size
        await self._hold_back(size)

    async def _hold_back(self, size: int) -> None:
        """Wait as long as the copied bytes take at the configured pace. The wait ends early if the pace changes or the
        move is cancelled."""
        means, ring = self._m, self._m.rings.ring
        if not ring.pace.bytes_per_s:
            return
        now, state = means.env.clock.now(), ring.moves[self.move].state if self.move in ring.moves else None
        until = means.copied_until = max(means.copied_until, now) + size / ring.pace.bytes_per_s
        while (left_s := until - means.env.clock.now()) > 0:
            await asyncio.sleep(min(max(left_s, WAIT_MIN_S), PACE_S))
            self._lead()
            latest = means.rings.ring
            move = latest.moves.get(self.move)
            if latest.pace != ring.pace or move is None or move.state is not state:
                means.copied_until = 0.0
                return

    async def _restore_pin(self, move: Move, found: ImportedRange) -> None:
        """Pin the log as the former leader did, or start over if the log has been trimmed."""
        if not self._pin.is_held:
            try:
                await self._hold(move, found.tail, found.attempt)
            except NoSuchLedger:
                await self._start_over()

    async def _start_over(self) -> NoReturn:
        """Drop a copy that cannot be completed, so that the move starts over with another pin."""
        log.warning("partition=%s move=%d starts over", self._m.partition, self.move)
        await self._following.forget()
        await self._m.source.drop_some(self._lead(), self.move)
        raise Unavailable(f"move {self.move} starts over")

    async def _follow(self, leader: Leader, move: Move) -> None:
        """Follow the source's log until the target is close, then up to a freeze, and log that everything has come."""
        found = self._import()
        await self._restore_pin(move, found)
        digest = await self._following.count(found)
        try:
            if not await self._following.read_on(found):
                return
            await self._reach_ring()
            if not await self._following.read_on(self._import()):
                return
            freeze = msgspec.msgpack.decode(await self._call(move, source.FREEZE), type=Position)
            self._m.reached("after freeze", self.move)
            await self._following.read_up_to(freeze, self._import())
        except (NoSuchLedger, NoSuchEntry):  # trimmed, or marked as lost (docs/protocol.md A14)
            await self._start_over()
        self._lead()
        await leader.append_record(ImportEnd(self.move, freeze, digest.count, digest.hash))

    # docs/protocol.md M10
    async def _reach_ring(self) -> None:
        """Raise StoreError while the metadata store is unavailable: the range would be released, and no one would learn
        who owns it. Called before the last read of the source's log, so that operations do not wait longer for the
        freeze."""
        await self._m.rings.change(lambda ring: ring)

    async def _ask(self, leader: Leader, move: Move) -> None:
        """Have the source release the range, and own it (docs/protocol.md, M9). Without a definite answer the source is
        asked again."""
        end = self._import().end
        assert end is not None
        answer = await self._call(move, source.RELEASE, position=end.freeze, records=end.records, hash_of_rows=end.hash)
        verdict = msgspec.msgpack.decode(answer, type=ReleaseVerdict)
        self._lead()
        released = verdict.released
        if released is not None:
            self._m.reached("after release", self.move)
            await leader.append_record(Own(self.move, end.freeze, *released[4:7], move.source, span_of(move)))
            self._has_owned = True
            log.info("partition=%s move=%d owns the range", self._m.partition, self.move)
        elif verdict.differs:
            self._m.reached("differs", self.move)
            await self._start_over()
        else:
            found = self._import()
            await leader.append_record(ImportRows(self.move, [], [], b"", found.tail))

    # docs/protocol.md M10
    async def _flip(self, move: Move) -> None:
        """Change the ring, and have all servers with replicas of source or target read it, because operations wait
        there."""
        seq = self._m.state.seq
        ring = await self._m.rings.change(lambda ring: steps.flip(ring, self.move, seq), soon=True)
        log.info("partition=%s move=%d the ring is flipped", self._m.partition, self.move)
        data = ring.routed.to_bytes(source.ROUTED_BYTES, "big")
        of_target = dict.fromkeys(ring.partitions[move.target].replicas, move.target)
        hosts = {**of_target, **dict.fromkeys(ring.partitions[move.source].replicas, move.source)}
        for server, partition in sorted(hosts.items()):
            self._m.env.nursery.spawn(self._notify(server, partition, data), name=f"move {self.move} tells {server}")

    async def _notify(self, server: ServerId, partition: PartitionId, routed: bytes) -> None:
        try:
            await self._m.peers.call(server, partition, source.FLIPPED, routed, CALL_S)
        except StoreError as error:
            log.debug("server=%s was not notified of the flip of move %d: %r", server, self.move, error)

    # docs/protocol.md M11
    async def _cancel_move(self, leader: Leader, move: Move) -> None:
        """Cancel the move, unless the source has released the range."""
        verdict = msgspec.msgpack.decode(await self._call(move, source.CANCEL), type=ReleaseVerdict)
        self._lead()
        if verdict.released is not None:
            await self._ask(leader, move)
        else:
            await self._following.forget()
            await self._m.source.drop_some(leader, self.move)

    # ── as source ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _drop(self, leader: Leader, move: Move) -> bool:
        """Drop some of the moved rows. Return True once the move has left the ring."""
        if move.state is not MoveState.FLIPPED or self._m.rings.ring.owner_of(move.end) != move.target:
            return True
        self._m.reached("before drop", self.move)
        await wait_caught_up(self._m.state.engine)
        is_last = await self._m.source.drop_some(leader, self.move)
        self._m.reached("after drop", self.move)
        if not is_last:
            return False
        await self._m.rings.change(lambda ring: steps.finish(ring, self.move))
        log.info("partition=%s move=%d is done", self._m.partition, self.move)
        return True

    # ── asking ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _call(
        self,
        move: Move,
        method: str,
        *,
        position: Position = BEGINNING,
        cursor: bytes = b"",
        records: int = 0,
        hash_of_rows: int = 0,
    ) -> bytes:
        """Ask the replicas of the source in turn until one answers. Otherwise raise the first error that a replica
        returned, if any."""
        asked = MoveRequest(self.move, self._m.partition, span_of(move), position, cursor, records, hash_of_rows)
        body = msgspec.msgpack.encode(asked)
        member = self._m.rings.ring.partitions.get(move.source)
        failure: StoreError | None = None
        replicas = member.replicas if member is not None else ()
        for server in self._in_order(replicas, is_page=method == source.PAGE):
            asked_at = self._m.env.clock.now()
            try:
                answer = await self._m.peers.call(server, move.source, method, body, CALL_S)
            except NotLeader:
                continue
            except StoreError as error:
                failure = failure or error
                if (now := self._m.env.clock.now()) - asked_at >= SILENT_S:
                    self._m.silent_until[server] = now + ASKED_LAST_S
                continue
            self._m.silent_until.pop(server, None)
            if method != source.PAGE:
                self._answered = server
            return answer
        raise failure or Unavailable(f"partition {move.source} has no leader among its {len(replicas)} replicas")

    def _in_order(self, replicas: Iterable[ServerId], *, is_page: bool) -> list[ServerId]:
        """Order the replicas. For a page the leader comes last, since it has other work; otherwise it comes first,
        since only it can do the rest. Silent replicas come last in any case."""
        now, silent_until = self._m.env.clock.now(), self._m.silent_until
        return sorted(
            replicas, key=lambda server: (now < silent_until.get(server, 0.0), (server == self._answered) is is_page)
        )


# docs/protocol.md M10
async def _is_still_next(step: ImportStep, leader: Leader, means: Means, move: Move) -> bool:
    """Return True if the state still calls for this step after an append of this moment. The state of a
    deposed leader may be older than the release of the range, or than its import. Raises StoreError."""
    await leader.prove()
    return means.leading() is leader and import_steps.next_step(means.state.ownership, move, is_paused=False) is step
