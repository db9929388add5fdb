"""A tail gives its taker several entries in one batch if they follow each other quickly (docs/protocol.md, T13)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvstore.proto.digest import PAYLOAD_AT
from kvstore.types import DigestType, EntryId, Seq
from kvstore.wal.ports import LogEntry
from kvstore.wal.tailing.fresh import REST_BYTES_MAX, FreshEntries
from kvstore.wal.tailing.tail import GATHER_S, GIVEN_MAX, TailReader
from tests.sim.ledgers_and_logs.bench import B2, B3, Bench, run
from tests.sim.ledgers_and_logs.logs import Writer
from tests.sim.ledgers_and_logs.model_bookies import DELAY_S
from tests.sim.ledgers_and_logs.test_tail_polls import Taker, listening
from tests.wal.ledgers import e

pytestmark = pytest.mark.sim

NO_DELAY_S = 0.0001


class Groups(Taker):
    """Records the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[list[int]] = []

    def take(self, entries: Any) -> None:
        super().take(entries)
        self.groups.append([each.position.entry for each in entries])


class Scene:
    """A tail whose taker waits, and a writer that appends without waiting."""

    def __init__(self, bench: Bench, writer: Writer, reader: TailReader) -> None:
        self.bench, self.writer, self.reader, self.taker = bench, writer, reader, Groups()
        self.reading = bench.env.nursery.spawn(reader.read(60_000, self.taker), name="read")

    def append(self, payload: bytes = b"x") -> None:
        self.writer.log.append(payload, Seq(self.writer.seq), self.writer.entries.done)
        self.writer.seq += 1

    async def append_each(self, count: int, gap_s: float, payload: bytes = b"x") -> None:
        for _ in range(count):
            self.append(payload)
            await self.bench.pass_time(gap_s)

    @property
    def given(self) -> list[int]:
        return [entry for group in self.taker.groups for entry in group]


def in_scene(case: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    async def with_bench(bench: Bench) -> None:
        scene = Scene(bench, *await listening(bench))
        await bench.pass_time(1.0)
        await case(scene)
        if not scene.reader._is_closed:
            await scene.reader.close()
        scene.reading.cancel()

    run(with_bench)


def test_tail_batches_fast_entries_in_order_without_duplicates() -> None:
    async def case(scene: Scene) -> None:
        await scene.append_each(100, GATHER_S / 4)
        await scene.bench.pass_time(1.0)
        assert scene.given == list(range(1, 101))
        assert len(scene.taker.groups) < 50
        assert not scene.reading.done()

    in_scene(case)


def test_tail_gives_an_entry_after_a_pause_at_once() -> None:
    async def case(scene: Scene) -> None:
        for number in range(1, 6):
            scene.append()
            while len(scene.writer.entries.confirmed) <= number:
                await scene.bench.pass_time(NO_DELAY_S)
            scene.writer.log.handle._send_lac(e(number))
            await scene.bench.pass_time(2 * DELAY_S)
            assert scene.given == list(range(1, number + 1))
            await scene.bench.pass_time(1.0)

    in_scene(case)


def test_tail_gives_confirmed_entries_at_once_on_request() -> None:
    async def case(scene: Scene) -> None:
        asked = 0
        for _ in range(60):
            scene.append()
            await scene.bench.pass_time(GATHER_S / 8)
            before = len(scene.taker.got)
            scene.reader.give_now()
            asked += len(scene.taker.got) - before
            assert scene.reader._gathering is None
            confirmed = [each.entry for each in scene.writer.entries.confirmed]
            assert set(scene.given) <= set(confirmed)
        assert asked > 10
        await scene.bench.pass_time(1.0)
        assert scene.given == list(range(1, 61))

    in_scene(case)


def rested(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the batching delay endless."""
    monkeypatch.setattr("kvstore.wal.tailing.tail.GATHER_S", 1e6)


def test_tail_batches_a_limited_number_of_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(scene: Scene) -> None:
        rested(scene, monkeypatch)
        await scene.append_each(3 * GIVEN_MAX, 5 * DELAY_S)
        assert len(scene.given) >= 2 * GIVEN_MAX
        assert max(map(len, scene.taker.groups)) == GIVEN_MAX
        assert scene.given == list(range(1, len(scene.given) + 1))

    in_scene(case)


def test_tail_does_not_hold_back_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(scene: Scene) -> None:
        rested(scene, monkeypatch)
        monkeypatch.setattr(scene.bench.bookies, "read", lambda *_args, **_rest: pytest.fail("it was read back"))
        await scene.append_each(40, 5 * DELAY_S, b"x" * (REST_BYTES_MAX // 3))
        assert len(scene.given) >= 30
        assert max(map(len, scene.taker.groups)) <= 6
        assert not scene.reading.done()

    in_scene(case)


def test_tail_loses_nothing_when_a_read_ends_during_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(scene: Scene) -> None:
        rested(scene, monkeypatch)
        await scene.append_each(5, 5 * DELAY_S)
        assert scene.reader._gathering is not None
        scene.reading.cancel()
        await scene.bench.pass_time()
        found: list[LogEntry] = [*scene.taker.got]
        while len(found) < 4:
            found += await scene.reader.read(1_000)
        assert [each.position.entry for each in found] == list(range(1, len(found) + 1))

    in_scene(case)


def test_tail_never_gives_stored_entries_before_confirmation() -> None:
    async def case(scene: Scene) -> None:
        for bookie in (B2, B3):
            scene.bench.bookies.at[bookie].holds_adds = True
        for _ in range(20):
            scene.append()
            await scene.bench.pass_time(GATHER_S / 2)
            scene.reader.give_now()
        assert scene.given == []

    in_scene(case)


def test_tail_gives_nothing_after_close_during_the_delay() -> None:
    async def case(scene: Scene) -> None:
        await scene.append_each(9, GATHER_S / 8)
        while scene.reader._gathering is None:
            await scene.append_each(1, NO_DELAY_S)
        before = scene.given
        await scene.reader.close()
        await scene.bench.pass_time(1.0)
        scene.reader.give_now()
        assert scene.given == before

    in_scene(case)


def test_fresh_entries_report_many_bytes_until_they_are_taken() -> None:
    fresh = FreshEntries(DigestType.CRC32C, EntryId(0))
    fresh.keep(0, b"p" * REST_BYTES_MAX)
    assert not fresh.are_many
    fresh.keep(1, b"p" * 100)
    assert fresh.are_many
    assert fresh.take(EntryId(0)) is not None
    assert not fresh.are_many
    fresh.keep(2, b"p" * REST_BYTES_MAX)
    assert fresh.are_many
    fresh.forget_before(EntryId(3))
    assert not fresh.are_many


def test_fresh_entries_take_a_run_and_forget_it() -> None:
    fresh = FreshEntries(DigestType.CRC32C, EntryId(5))
    for entry in (4, 5, 6, 7, 9):
        fresh.keep(entry, bytes(PAYLOAD_AT) + b"%d" % entry)
    assert fresh.take_run(EntryId(5), 6) == [(5, b"5"), (6, b"6")]
    fresh.keep(6, bytes(PAYLOAD_AT))
    assert fresh.take_run(EntryId(6), 9) == []
    assert fresh.take_run(EntryId(7), 99) == [(7, b"7")]
    assert fresh.take_run(EntryId(9), 99) == [(9, b"9")]
    assert (fresh._bytes, fresh._packets) == (0, {})
