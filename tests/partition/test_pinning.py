"""A replica's work on pins while no server asks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore import versions
from kvstore.env.beat import Beat
from kvstore.env.real import real_env
from kvstore.errors import OutcomeUnknown, Unavailable
from kvstore.meta.memory import MemoryStore
from kvstore.partition import in_time, pinning
from kvstore.partition.config import PartitionConfig
from kvstore.partition.pinning import EXPIRE_S, IDLE_S, NUMBERED_SINCE, Pinning
from kvstore.partition.state.marks import MarkRecord
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import EVERYTHING
from kvstore.types import EntryId, LedgerId, PartitionId, Position, Seq
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pins
from tests.partition.state.engine_memory import MemoryEngine
from tests.ring import rings

P1 = PartitionId("p1")


class Noting(Beat):
    """Records the delays that are requested, and never ends one."""

    def __init__(self) -> None:
        self.rests: list[float] = []

    async def pause(self, seconds: float) -> None:
        self.rests.append(seconds)
        await asyncio.get_running_loop().create_future()


async def test_replica_without_views_checks_less_often(tmp_path: Path) -> None:
    for is_held in (False, True):
        beat = Noting()
        env = replace(real_env(tmp_path), beat=beat)
        state = ReplicaState(P1, MemoryEngine(), PartitionConfig(), rings.key_hash)
        if is_held:
            stand: dict[str, Any] = {"position": Position(LedgerId(1), EntryId(0)), "seq": Seq(1), "time_ms": 1}
            state.pinned_views.apply(MarkRecord("pin", 1 << 60, takes=True), **stand, owned=EVERYTHING, records=0)
        Pinning(env, P1, state, lambda: None, cast(Any, None)).start()
        await asyncio.sleep(0)
        assert (EXPIRE_S in beat.rests, IDLE_S in beat.rests) == (is_held, not is_held)
        await env.nursery.close()


async def test_answer_ends_when_it_waits_for_a_stuck_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that renews a pin retries again and again: the answers would use up all calls from its server."""
    monkeypatch.setattr(in_time, "ANSWER_S", 0.01)
    state = ReplicaState(P1, MemoryEngine(), PartitionConfig(), rings.key_hash)

    async def extend(*_: object) -> bool:
        return True

    async def append_record(record: MarkRecord) -> None:
        await asyncio.get_running_loop().create_future()

    leader, pins = SimpleNamespace(append_record=append_record), SimpleNamespace(extend=extend)
    one = Pinning(real_env(tmp_path), P1, state, *cast(Any, (lambda: leader, pins)))
    with pytest.raises(OutcomeUnknown, match="p1: pin-renew took longer"):
        await one.answer(pinning.RENEW, pinning.encode(pinning.PinRequest("pin", 1_000)))


# docs/protocol.md Tx13
@pytest.mark.parametrize(
    ("before", "version", "number"),
    [(versions.FIRST, versions.FIRST, 5), (NUMBERED_SINCE, NUMBERED_SINCE, 0), (versions.FIRST, NUMBERED_SINCE, 0)],
)
async def test_pin_has_a_number_exactly_if_the_log_may_have_transactions(
    tmp_path: Path, before: int, version: int, number: int
) -> None:
    """The version counts that the log has when the MARK is sent. It may rise while the log is held. A MARK without a
    number behind that would keep the effects of a transaction here whose other part another partition lacks."""
    state = ReplicaState(P1, MemoryEngine(), PartitionConfig(), rings.key_hash)
    state.log_version, state.position = before, Position(LedgerId(1), EntryId(0))

    async def hold_until(*_: object) -> None:
        state.log_version = version

    async def append_record(record: MarkRecord) -> None:
        pytest.fail(f"sent {record}")

    leader, pins = SimpleNamespace(append_record=append_record), SimpleNamespace(hold_until=hold_until)
    one = Pinning(real_env(tmp_path), P1, state, *cast(Any, (lambda: leader, pins)))
    with pytest.raises(Unavailable, match="take it again"):
        await one.answer(pinning.TAKE, pinning.encode(pinning.PinRequest("pin", 1_000, 0, number)))


# docs/protocol.md K3
async def test_pin_that_is_taken_again_holds_nothing_before_its_new_position(tmp_path: Path) -> None:
    """A job that takes its pin again under one id, before the deadline, kept the log from its first run on."""
    store = MemoryStore()
    lists = LedgerLists(store)
    listed, version = await lists.make(P1)
    for ledger in (1, 7):
        listed = listed.with_ledger(LedgerId(ledger), Seq(ledger), epoch=ledger, lease_ms=0)
    await lists.write(P1, listed, version)
    state, pins = ReplicaState(P1, MemoryEngine(), PartitionConfig(), rings.key_hash), Pins(store, lists)

    async def append_record(record: MarkRecord) -> Position:
        assert state.position is not None
        state.pinned_views.apply(record, position=state.position, seq=Seq(1), time_ms=1, owned=EVERYTHING, records=0)
        return state.position

    leader = SimpleNamespace(append_record=append_record)
    one = Pinning(real_env(tmp_path), P1, state, cast(Any, lambda: leader), pins)
    for ledger in (1, 7):
        state.position = Position(LedgerId(ledger), EntryId(3))
        await one.answer(pinning.TAKE, pinning.encode(pinning.PinRequest("pin", 60_000)))
        assert await pins.oldest(P1, 0) == ledger
