"""The records that the source of a move logs about its freezes: each freeze ends once, whatever ends it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from errno import EMFILE
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from kvstore.env.nursery import TaskNursery
from kvstore.errors import NotLeader, OutcomeUnknown, StoreError, Unavailable
from kvstore.partition.config import PartitionConfig
from kvstore.partition.in_time import ANSWER_S
from kvstore.partition.leading.leader import Leader
from kvstore.partition.moves import source
from kvstore.partition.moves.counting import COPIES_MAX
from kvstore.partition.moves.source import MoveRequest, ReleaseVerdict, Source
from kvstore.partition.partition import Partition as Stopping
from kvstore.partition.state.commands import Put
from kvstore.partition.state.digest import ROWS_PER_STEP, RangeDigest
from kvstore.partition.state.engine_rocks import RocksEngine
from kvstore.partition.state.move_records import (
    Drop,
    Founded,
    Freeze,
    ImportBegin,
    ImportRows,
    MoveRecord,
    Release,
    Unfreeze,
)
from kvstore.partition.state.rows import data_key
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import EVERYTHING, TokenSpan
from kvstore.ring.hashing import TOKENS
from kvstore.types import EntryId, LedgerId, PartitionId, Position
from kvstore.wal.ledger_list import BEGINNING as NOWHERE
from tests.partition.one_partition import UNKNOWN, Partition
from tests.ring import rings

P2 = PartitionId("p2")
SPAN, OTHER = TokenSpan(0, 1 << 30), TokenSpan((1 << 30) + 1, 1 << 31)
FREEZE_S = 1.0


class Moving:
    """A partition whose leader has ranges to give away."""

    def __init__(self) -> None:
        self.partition = part = Partition(PartitionConfig(expiry_sweep_s=0))
        self.failed: list[BaseException] = []
        self.nursery = TaskNursery("test", on_error=lambda _, error: self.failed.append(error))
        env = replace(part.leader._env, nursery=self.nursery)
        self.is_serving = True
        self.source = Source(env, part.state.partition, part.state, self.leading, FREEZE_S)

    def leading(self) -> Leader | None:
        return self.partition.leader if self.is_serving else None

    def start(self) -> Moving:
        part = self.partition
        founded = None if part.state.ownership.is_founded else Founded(EVERYTHING.spans)
        started = part.loop.create_task(part.leader.start(founded))
        part.settle()
        part.acknowledge()
        assert started.done()
        return self

    def ask(self, method: str, asked: MoveRequest) -> asyncio.Task[bytes]:
        return self.partition.loop.create_task(self.source.answer(method, msgspec.msgpack.encode(asked)))

    def finish(self) -> None:
        part = self.partition
        part.settle()
        while part.log.in_flight:
            part.acknowledge()
        part.settle()

    def freeze(self, asked: MoveRequest) -> Position:
        """Freeze, retrying until the range is counted."""
        while True:
            task = self.ask(source.FREEZE, asked)
            self.finish()
            if task.exception() is None:
                return msgspec.msgpack.decode(task.result(), type=Position)
            assert isinstance(task.exception(), StoreError)

    def freeze_once(self, asked: MoveRequest) -> None:
        """Request a freeze once, and wait for the answer."""
        task = self.ask(source.FREEZE, asked)
        self.finish()
        task.result()

    def release(self, asked: MoveRequest, freeze: Position) -> asyncio.Task[bytes]:
        digest = self.source.counts.find(asked.move)
        count, hash_ = (digest.count, digest.hash) if digest else (0, 0)
        return self.ask(source.RELEASE, asked._replace(position=freeze, records=count, hash=hash_))


def verdict(answer: asyncio.Task[bytes]) -> ReleaseVerdict:
    return msgspec.msgpack.decode(answer.result(), type=ReleaseVerdict)


def test_lapsing_freeze_ends_once_when_its_release_arrives() -> None:
    moving = Moving().start()
    part = moving.partition
    part.do(Put(b"a", b"1"))
    answers: list[asyncio.Task[bytes]] = []
    # In the turn in which the time is up, the request is read from its connection.
    part.loop.call_later(FREEZE_S, lambda: answers.append(moving.release(MoveRequest(1, P2, SPAN), freeze)))
    freeze = moving.freeze(MoveRequest(1, P2, SPAN))
    part.wait(FREEZE_S)
    moving.finish()
    assert not part.fatal
    assert len(answers) == 1


def test_each_freeze_lasts_twice_as_long_as_the_one_before() -> None:
    """Users wait little normally, and moves end even if everything is slow."""
    moving = Moving().start()
    part = moving.partition
    for lasts_s in (FREEZE_S, 2 * FREEZE_S, 4 * FREEZE_S, 8 * FREEZE_S, 8 * FREEZE_S):
        moving.freeze(MoveRequest(1, P2, SPAN))
        part.wait(lasts_s - 0.05)
        moving.finish()
        assert part.state.ownership.frozen_by(1) is not None
        part.wait(0.1)
        moving.finish()
        assert part.state.ownership.frozen_by(1) is None


def test_new_leader_unfreezes_once() -> None:
    moving = Moving().start()
    part = moving.partition
    freezes = {}
    for move, span in ((1, SPAN), (2, OTHER)):
        freezes[move] = moving.freeze(MoveRequest(move, P2, span))
    moving.source.keep(())
    part.leader.stop(StoreError("deposed"))
    part.open()
    moving.start()
    unfreezing = part.loop.create_task(moving.source.unfreeze_all(part.leader))
    part.settle()
    answer = moving.release(MoveRequest(2, P2, OTHER), freezes[2])
    part.settle()
    part.log.acknowledge(len(part.log.in_flight))  # both in one turn
    moving.finish()
    assert not part.fatal
    assert unfreezing.done()
    assert msgspec.msgpack.decode(answer.result(), type=ReleaseVerdict).released is None
    assert part.state.ownership.frozen == ()


def test_former_leaders_freezes_end_when_it_leads_again() -> None:
    """The leader has counted the range, but not the changes in the log since."""
    moving = Moving().start()
    part = moving.partition
    moving.freeze(MoveRequest(1, P2, SPAN))
    part.leader.stop(StoreError("deposed"))
    part.open()
    moving.start()
    part.loop.create_task(moving.source.unfreeze_all(part.leader))
    moving.finish()
    assert part.state.ownership.frozen == ()


def test_freeze_lapses_when_a_leader_fails_to_release_the_lead() -> None:
    moving = Moving().start()
    part = moving.partition
    moving.freeze(MoveRequest(1, P2, SPAN))
    part.wait(FREEZE_S - 0.01)
    moving.is_serving = False
    part.wait(0.1)
    assert not part.in_flight()
    moving.is_serving = True
    part.wait(0.1)
    moving.finish()
    assert part.state.ownership.frozen == ()


def test_pin_comes_from_a_proved_leader() -> None:
    """A follower may have a state from before the range went away and came back: it owns the range there, and lacks the
    writes of others."""
    moving = Moving().start()
    part = moving.partition
    asked = moving.ask(source.PIN, MoveRequest(1, P2, SPAN))
    part.settle()
    assert not asked.done()
    part.acknowledge()
    assert msgspec.msgpack.decode(asked.result(), type=Position) == part.state.position
    deposed = moving.ask(source.PIN, MoveRequest(1, P2, SPAN))
    part.settle()
    part.log.fail(UNKNOWN)
    part.settle()
    assert isinstance(deposed.exception(), StoreError)
    moving.is_serving = False
    follower = moving.ask(source.PIN, MoveRequest(1, P2, SPAN))
    part.settle()
    assert isinstance(follower.exception(), NotLeader)


@pytest.mark.parametrize("method", [source.RELEASE, source.CANCEL])
def test_only_a_proved_leader_keeps_the_range(method: str) -> None:
    """A deposed leader does not know what its successor has released: the target would drop its copy, and nobody would
    own the range."""
    moving = Moving().start()
    part = moving.partition
    answers = []
    for is_deposed in (False, True):
        answers.append(moving.ask(method, MoveRequest(1, P2, SPAN, position=Position(LedgerId(1), EntryId(7)))))
        part.settle()
        assert not answers[-1].done(), "it waits for a proof"
        if is_deposed:
            part.log.fail(UNKNOWN)
        moving.finish()
    kept, unknown = answers
    assert verdict(kept) == ReleaseVerdict(None)
    assert isinstance(unknown.exception(), StoreError)


@pytest.mark.parametrize("second", [Freeze(2, P2, TokenSpan(5, 9)), Unfreeze(1), Release(1, NOWHERE, 0), Drop(1, b"")])
def test_record_that_contradicts_records_in_flight_is_not_sent(second: MoveRecord) -> None:
    """No replica could apply it, or anything behind it: the partition would be lost."""
    moving = Moving().start()
    part = moving.partition
    freeze = moving.freeze(MoveRequest(1, P2, SPAN))
    first = Release(1, freeze, 0) if isinstance(second, Unfreeze) else Unfreeze(1)
    sent = part.loop.create_task(part.leader.append_record(first))
    part.settle()
    refused = part.loop.create_task(part.leader.append_record(second))
    part.settle()
    if isinstance(second, Freeze):
        assert refused.done() is False, "the range is free once the record is applied"
    else:
        assert isinstance(refused.exception(), Unavailable)
    moving.finish()
    assert sent.result() is not None
    assert not part.fatal


def test_writes_waiting_for_a_frozen_range_are_refused_in_time() -> None:
    """Rows that arrive from elsewhere change nothing for it, so it is not evaluated again for each of them."""
    part = Partition(PartitionConfig(expiry_sweep_s=0, queue_wait_max_s=1.0))
    started = part.loop.create_task(part.leader.start(Founded((SPAN,))))
    part.settle()
    part.acknowledge()
    assert started.done()
    for record in (ImportBegin(1, 1, P2, OTHER, NOWHERE), Freeze(2, P2, SPAN)):
        part.loop.create_task(part.leader.append_record(record))
        part.settle()
        part.acknowledge()
    key = next(key for number in range(100) if SPAN.holds(rings.key_hash.token_of(key := b"%d" % number)))
    (waiting,) = part.submit(Put(key, b"1"))
    for _ in range(10):
        part.loop.create_task(part.leader.append_record(ImportRows(1, [], [], b"", NOWHERE)))
        part.settle()
        part.acknowledge()
        part.wait(0.2)
    assert isinstance(part.result(waiting), Unavailable)


def test_unfrozen_writes_that_cannot_be_sent_are_refused_in_time() -> None:
    """It keeps its arrival time (docs/protocol.md, P10)."""
    part = Partition(PartitionConfig(expiry_sweep_s=0, queue_wait_max_s=1.0))
    started = part.loop.create_task(part.leader.start(Founded((SPAN,))))
    part.settle()
    part.acknowledge()
    assert started.done()
    key = next(key for number in range(100) if SPAN.holds(rings.key_hash.token_of(key := b"%d" % number)))
    part.loop.create_task(part.leader.append_record(Freeze(1, P2, SPAN)))
    part.settle()
    part.acknowledge()
    (waiting,) = part.submit(Put(key, b"1"))
    part.wait(0.8)
    part.loop.create_task(part.leader.append_record(Unfreeze(1)))
    for _ in range(part.config.entries_in_flight_max):
        part.loop.create_task(part.leader.prove())
    part.settle()
    part.acknowledge()
    assert part.state.ownership.frozen == ()
    part.wait(0.6)
    assert isinstance(part.result(waiting), Unavailable)


# ── a copy that differs from what was counted (docs/protocol.md, M6) ──────────────────────────────────────────────────


@pytest.fixture
def moving() -> Moving:
    moving = Moving().start()
    keys = [key for number in range(40) if SPAN.holds(rings.key_hash.token_of(key := b"%d" % number))]
    moving.partition.do(*(Put(key, b"1") for key in keys))
    return moving


def ask_release(moving: Moving, *, records: int, hash_of_rows: int) -> ReleaseVerdict:
    asked = MoveRequest(1, P2, SPAN)
    freeze = moving.freeze(asked)
    answer = moving.ask(source.RELEASE, asked._replace(position=freeze, records=records, hash=hash_of_rows))
    moving.finish()
    return verdict(answer)


def counted(moving: Moving) -> tuple[int, int]:
    digest = RangeDigest(moving.partition.state.engine, SPAN)
    while not digest.step():
        continue
    return digest.count, digest.hash


def test_wrong_count_is_corrected_and_the_range_moves(moving: Moving) -> None:
    moving.freeze(MoveRequest(1, P2, SPAN))
    kept = moving.source.counts.find(1)
    assert kept is not None
    kept.count += 1
    records, hash_of_rows = counted(moving)
    first = ask_release(moving, records=records, hash_of_rows=hash_of_rows)
    assert (first.released, first.differs) == (None, False), "it takes writes again, and recounts"
    assert moving.partition.state.ownership.frozen == ()
    moving.partition.do(Put(b"0", b"2"), Put(b"1", b"2"))
    records, hash_of_rows = counted(moving)
    assert ask_release(moving, records=records, hash_of_rows=hash_of_rows).released is not None
    assert (moving.source.counts.corrected, moving.source.counts.copies_wrong) == (1, 0)


def test_wrong_copy_is_repeated_and_then_needs_an_operator(moving: Moving) -> None:
    counts = moving.source.counts
    for copies in range(COPIES_MAX):
        assert counts.copies_wrong == copies
        records, hash_of_rows = counted(moving)
        first, again = (ask_release(moving, records=records, hash_of_rows=hash_of_rows + 1) for _ in range(2))
        assert (first.differs, again.differs) == (False, True), "only a recount proves that a copy is wrong"
    assert (counts.corrected, counts.copies_wrong, counts.stuck) == (0, COPIES_MAX, [1])
    refused = moving.ask(source.FREEZE, MoveRequest(1, P2, SPAN))
    moving.finish()
    assert "ring cancel 1" in str(refused.exception())
    assert moving.partition.state.ownership.frozen == (), "the range serves, whatever becomes of the move"
    cancelled = moving.ask(source.CANCEL, MoveRequest(1, P2, SPAN))
    moving.finish()
    assert verdict(cancelled).released is None
    assert counts.stuck == []


def test_count_stopped_before_its_first_step_compares_nothing(moving: Moving) -> None:
    """The move may be cancelled in the turn in which its copy proves to differ."""
    counts = moving.source.counts
    moving.freeze(MoveRequest(1, P2, SPAN))

    async def differ_and_stop() -> None:
        assert not counts.doubt(1)
        counts.stop(1)

    moving.partition.run(differ_and_stop())
    moving.finish()
    assert not moving.failed


# docs/protocol.md M8
@pytest.mark.parametrize("step", ["__init__", "step"])
def test_count_begins_again_if_the_engine_could_not_be_read(
    step: str, moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error ended the process."""

    def broken(*_: Any) -> None:
        raise OSError(EMFILE, "too many open files")

    asked = MoveRequest(1, P2, SPAN)
    monkeypatch.setattr(RangeDigest, step, broken)
    task = moving.ask(source.FREEZE, asked)
    moving.finish()
    assert isinstance(task.exception(), Unavailable)
    assert not moving.failed
    monkeypatch.undo()
    moving.freeze(asked)


def test_freeze_lapses_when_its_answer_times_out_on_a_stuck_entry() -> None:
    moving = Moving().start()
    part = moving.partition
    with pytest.raises(StoreError, match="counting"):
        moving.freeze_once(MoveRequest(1, P2, SPAN))
    asked = []
    for method in (source.FREEZE, source.PIN, source.CANCEL):
        asked.append(moving.ask(method, MoveRequest(1, P2, SPAN)))
        part.settle()
    part.wait(ANSWER_S - 0.1)
    assert not any(each.done() for each in asked)
    part.wait(0.2)
    assert [type(each.exception()) for each in asked] == [OutcomeUnknown] * 3
    again = moving.ask(source.FREEZE, MoveRequest(1, P2, SPAN))
    part.settle()
    assert isinstance(again.exception(), Unavailable), "it is in flight"
    moving.finish()
    assert part.state.ownership.frozen_by(1) is not None
    part.wait(FREEZE_S + 0.1)
    moving.finish()
    assert part.state.ownership.frozen_by(1) is None
    assert not moving.failed


def test_freeze_of_a_stopping_replica_is_unknown() -> None:
    moving = Moving().start()
    part = moving.partition
    with pytest.raises(StoreError, match="counting"):
        moving.freeze_once(MoveRequest(1, P2, SPAN))
    asked = moving.ask(source.FREEZE, MoveRequest(1, P2, SPAN))
    part.settle()
    part.run(moving.nursery.close())
    part.settle()
    assert isinstance(asked.exception(), OutcomeUnknown)


async def test_running_count_holds_no_files_of_a_stopped_replica(tmp_path: Path) -> None:
    path, nursery = str(tmp_path / "engine"), TaskNursery("test")
    engine = RocksEngine(path)
    state = ReplicaState(P2, engine, PartitionConfig(), rings.key_hash)
    batch = engine.batch()
    for number in range(4 * ROWS_PER_STEP):
        batch.put(data_key(rings.key_hash, b"%d" % number), bytes(20))
    engine.write(batch)
    env: Any = SimpleNamespace(nursery=nursery)
    counting = Source(env, P2, state, lambda: None, FREEZE_S)
    with pytest.raises(Unavailable, match="still counting"):
        counting.counts.start(1, TokenSpan(0, TOKENS - 1))
    await asyncio.sleep(0)

    async def stopped(**_: bool) -> None:
        pass

    replica = SimpleNamespace(stop=stopped)
    rest: dict[str, Any] = {
        "_peers": MagicMock(),
        "_exports": MagicMock(),
        "_nursery": nursery,
        "close_state": engine.close,
    }
    stopping: Any = SimpleNamespace(id=P2, mover=MagicMock(), _replica=replica, _source=counting, state=state, **rest)
    await Stopping.stop(stopping, hand_over=False)
    RocksEngine(path).close()
