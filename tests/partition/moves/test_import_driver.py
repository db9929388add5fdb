"""A target's requests to its source."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import versions
from kvstore.errors import LedgerError, NoSuchEntry, NoSuchLedger, NotLeader, Unavailable
from kvstore.partition.config import PartitionConfig
from kvstore.partition.moves import pages, source
from kvstore.partition.moves.catch_up import STEADY_READS, SourceFollower
from kvstore.partition.moves.import_driver import ImportDriver, MoveProgress
from kvstore.partition.moves.import_steps import ImportStep
from kvstore.partition.state import move_records
from kvstore.partition.state.commands import Delete, Flag, Put, RequestId
from kvstore.partition.state.entry import EntryKind, control
from kvstore.partition.state.move_records import ImportRows, LogVersion
from kvstore.partition.state.ownership import ImportedRange, Ownership
from kvstore.partition.state.retry_table import decode_row
from kvstore.partition.state.rows import ALL_RETRY
from kvstore.partition.state.tokens import EVERYTHING, NOTHING, TokenSpan
from kvstore.ring import Pace
from kvstore.ring.hashing import TOKENS
from kvstore.ring.moves import Move, MoveId
from kvstore.types import EntryId, LedgerId, PartitionId, Position
from kvstore.wal.ledger_list import BEGINNING
from tests.partition.one_partition import TIME_MS, Partition
from tests.partition.state.engine_memory import MemoryEngine
from tests.ring import rings

P1, P2 = PartitionId("p1"), PartitionId("p2")
MOVE = Move(MoveId(1), P1, P2, TOKENS - 1, 99)
PIN = Position(LedgerId(1), EntryId(5))


class Copying(ImportDriver):
    """A driver whose source gives these pages."""

    def __init__(self, *given: pages.RangePage) -> None:
        self.given, self.asked = list(given), list[tuple[Position, bytes]]()
        self.logged: list[ImportRows] = []
        self.cursor = pages.BEGINNING
        self.now, self.pace = 100.0, Pace(bytes_per_s=0)
        rings = SimpleNamespace(ring=SimpleNamespace(pace=self.pace, moves={}))
        state = SimpleNamespace(engine=MemoryEngine(), log_version=versions.FIRST, partition=P2)
        means: Any = SimpleNamespace(
            env=SimpleNamespace(clock=SimpleNamespace(now=lambda: self.now)),
            leading=lambda: self,
            rings=rings,
            state=state,
            server_env=None,
            pins=None,
            pin_numbers=iter(()),
            partition=P2,
            logs=None,
        )
        super().__init__(means, MOVE.id)
        self._pin._held = (P1, "held")

    def _import(self) -> ImportedRange:
        return ImportedRange(1, 1, P1, TokenSpan(0, 99), PIN, self.cursor, PIN, None)

    async def _call(self, move: Move, method: str, **asked: Any) -> bytes:
        self.asked.append((asked["position"], asked["cursor"]))
        return pages.encode(self.given.pop(0))

    async def append_record(self, record: ImportRows, requests: Any = None) -> None:
        self.logged.append(record)
        self.cursor = record.cursor

    def copy(self) -> None:
        while self.given:
            asyncio.run(self._copy(self, MOVE))  # type: ignore[arg-type]


def page(entry: int, cursor: bytes) -> pages.RangePage:
    return pages.RangePage([], [], b"", cursor, Position(LedgerId(1), EntryId(entry)))


def test_pages_never_come_from_an_earlier_position() -> None:
    copying = Copying(page(7, pages.RETRIES), page(8, b"r3"), page(9, b""))
    copying.copy()
    assert [position.entry for position, _ in copying.asked] == [5, 7, 8]
    assert [cursor for _, cursor in copying.asked] == [pages.BEGINNING, pages.RETRIES, b"r3"]


@pytest.mark.parametrize(("left_at", "again_at"), [(b"d5", b"d5"), (b"r3", pages.RETRIES)])
def test_new_leader_keeps_rows_and_restarts_request_ids(left_at: bytes, again_at: bytes) -> None:
    copying = Copying(page(7, b""))
    copying.cursor = left_at
    copying.copy()
    assert copying.asked == [(PIN, again_at)]


def test_throttled_copy_does_not_spin_when_it_wakes_early(monkeypatch: pytest.MonkeyPatch) -> None:
    copying, waits = Copying(), list[float]()
    means: Any = copying._m
    means.rings.ring, means.copied_until = SimpleNamespace(pace=Pace(bytes_per_s=1000), moves={MOVE.id: MOVE}), 0.0

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)
        copying.now += delay_s - 1e-12
        assert len(waits) < 10

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(copying._hold_back(100))
    assert [round(each, 4) for each in waits] == [0.1, 0.0001]


def test_acknowledgement_is_only_in_the_clients_latest_row() -> None:
    """So a page of an older state after one of a newer state could lack both the result and the acknowledgement."""
    part = Partition(PartitionConfig(expiry_sweep_s=0)).start()
    client = b"c" * 16
    part.do(Put(b"k", b"1", request=RequestId(client, 5, 5, TIME_MS)))
    before = dict(part.engine.iterate(*ALL_RETRY))
    part.do(Put(b"other", b"1", request=RequestId(client, 9, 6, TIME_MS)))
    after = dict(part.engine.iterate(*ALL_RETRY))
    assert not before.keys() & after.keys()
    assert min(after) > max(before)
    assert [decode_row(row)[1].first_unacked for row in after.values()] == [[6]]
    span = EVERYTHING.spans[0]
    assert pages.page_of(part.state, TokenSpan(*span), max(before)).requests


@pytest.mark.parametrize("is_in_range", [True, False])
def test_page_of_request_ids_bounds_large_results(is_in_range: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Partition(PartitionConfig(expiry_sweep_s=0)).start()
    for number in range(8):
        request = RequestId(bytes((number,)) * 16, 1, 1, TIME_MS)
        part.do(Put(b"k", bytes(400_000)), Delete(b"k", flags=Flag.RETURN_OLD, request=request))
    iterate, read = part.engine.iterate, list[int]()

    def counted(begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        for key, row in iterate(begin, end):
            read.append(len(row))
            yield key, row

    monkeypatch.setattr(part.engine, "iterate", counted)
    token = rings.key_hash.token_of(b"k")
    cursor, span = pages.RETRIES, TokenSpan(token, token) if is_in_range else TokenSpan(token + 1, token + 1)
    found = 0
    while cursor:
        read.clear()
        given = pages.page_of(part.state, span, cursor)
        assert sum(read) < pages.RETRY_BYTES_MAX + 2 * max(read), "the last step, and the step that succeeds"
        requests, cursor = pages.requests_in(given), given.cursor
        found += len(requests.sequences) if requests is not None else 0
    assert found == 8 * is_in_range


class Stepping(Copying):
    """A driver whose steps succeed or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.error = ""
        ring: Any = SimpleNamespace(pace=self.pace, moves={MOVE.id: MOVE})
        means: Any = self._m
        means.rings.ring, means.state.ownership = ring, Ownership(NOTHING, True)
        means.reached = lambda *_: None

    async def _perform(self, step: ImportStep, leader: Any, move: Move) -> None:
        if self.error:
            raise Unavailable(self.error)

    def step_after(self, passed_s: float, error: str = "") -> None:
        """Take a step as the mover does."""
        self.now, self.error = self.now + passed_s, error
        try:
            assert not asyncio.run(self.advance())
        except Unavailable as failed:
            self.failure = str(failed)


def test_move_reports_failure_until_a_step_succeeds() -> None:
    move = Stepping()
    move.step_after(5)
    assert move.progress(0.0) == MoveProgress(0.0)
    move.step_after(1, "no leader")
    move.step_after(8, "no answer")
    assert move.progress(0.5) == MoveProgress(0.5, "no answer", 9.0), "and the remaining time is still unknown"
    move.step_after(1)
    assert move.progress(0.0) == MoveProgress(0.0)


def test_eta_counts_from_when_the_leader_took_up_the_move() -> None:
    move = Stepping()
    move._began_with = 0.25
    move.step_after(10)
    assert move.progress(0.5).eta_s == 20.0
    move._m.rings.ring.pace = Pace(paused=True)  # type: ignore[misc]
    assert move.progress(0.5).eta_s is None


# docs/protocol.md V4
def test_rows_of_a_later_version_wait_for_the_targets_log() -> None:
    copying = Copying(later := page(7, b"")._replace(version=2))
    with pytest.raises(Unavailable, match=r"written by cluster version 1, rows of version 2 wait"):
        copying.copy()
    assert (copying.logged, copying._paged_to) == ([], BEGINNING)
    copying.given, copying._m.state.log_version = [later], 2
    copying.copy()
    assert len(copying.logged) == 1


def test_entries_behind_the_sources_version_wait() -> None:
    state: Any = SimpleNamespace(log_version=1, partition=P2, hash=rings.key_hash)
    following = SourceFollower(state, None, None)  # type: ignore[arg-type]
    record = control(P1, 1, 1, TIME_MS, EntryKind.LOG_VERSION, move_records.encode(LogVersion(2)))
    logged: Any = SimpleNamespace(position=PIN, payload=record.encode())
    found = Copying()._import()
    with pytest.raises(Unavailable, match="rows of version 2 wait"):
        following._take(pages.RangeChanges(TokenSpan(0, 99), rings.key_hash), logged, found)
    state.log_version = 2
    following._take(pages.RangeChanges(TokenSpan(0, 99), rings.key_hash), logged, found)


def test_page_of_version_one_has_golden_bytes() -> None:
    first = pages.encode(page(7, b"r"))
    assert first.hex() == "959090c400c40172920107"
    assert pages.decode(first) == page(7, b"r")
    later = page(7, b"r")._replace(version=2)
    assert pages.decode(pages.encode(later)) == later


class Asking(Copying):
    """A driver whose source has three replicas: the first is on a machine that is off, the last leads."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []
        means: Any = self._m
        means.silent_until, means.peers = {}, self
        means.rings.ring.partitions = {P1: SimpleNamespace(replicas=("off", "follows", "leads"))}

    async def call(self, server: str, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        self.called.append(server)
        if server == "off":
            self.now += 2.0
            raise Unavailable("connecting took too long")
        if server != "leads" and method != source.PAGE:
            raise NotLeader(partition)
        return b""

    def ask(self, method: str) -> list[str]:
        """Return the servers that were asked, in order."""
        self.called = []
        asyncio.run(ImportDriver._call(self, MOVE, method))
        return self.called


def test_silent_replica_delays_one_page_a_minute() -> None:
    asking = Asking()
    assert asking.ask(source.PIN) == ["off", "follows", "leads"]
    assert [asking.ask(source.PAGE) for _ in range(3)] == [["follows"]] * 3, "and the leader is asked last"
    assert asking.ask(source.FREEZE) == ["leads"]
    asking.now += 61.0
    assert [asking.ask(source.PAGE) for _ in range(2)] == [["off", "follows"], ["follows"]]


def test_refusing_replica_is_asked_first_again() -> None:
    """It may only lag a moment behind; otherwise the leader would give all pages."""
    asking = Asking()
    asking.ask(source.PIN)
    asking.now += 61.0

    async def refuses(server: str, *_: Any) -> bytes:
        asking.called.append(server)
        if server != "leads":
            raise Unavailable("stands before the pin")
        return b""

    asking._m.peers = SimpleNamespace(call=refuses)  # type: ignore[assignment]
    assert [asking.ask(source.PAGE) for _ in range(2)] == [["off", "follows", "leads"]] * 2


async def test_pin_is_released_when_a_replica_stops_during_a_read() -> None:
    copying, ends, given_back = Copying(), asyncio.Event(), list[str]()

    async def forget() -> None:
        await ends.wait()

    async def release() -> None:
        given_back.append("pin")

    copying._following.forget = forget  # type: ignore[method-assign]
    copying._pin.release = release  # type: ignore[method-assign]
    closing = asyncio.ensure_future(copying.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert given_back == ["pin"]


# docs/protocol.md M3, A14
@pytest.mark.parametrize("error", [NoSuchLedger, NoSuchEntry])
async def test_copy_begins_again_if_the_log_cannot_be_followed(error: type[LedgerError]) -> None:
    """A later pin is behind what was trimmed, or marked as lost: the replicas of the source have applied it."""
    copying, dropped = Copying(), list[MoveId]()

    async def fails(found: ImportedRange) -> bool:
        raise error("gone")

    async def succeeds(*_: Any) -> None:
        dropped.extend(_[1:])

    copying._following = SimpleNamespace(count=succeeds, read_on=fails, forget=succeeds)  # type: ignore[assignment]
    copying._m.source = SimpleNamespace(drop_some=succeeds)  # type: ignore[assignment]
    with pytest.raises(Unavailable, match="starts over"):
        await copying._follow(copying, MOVE)  # type: ignore[arg-type]
    assert dropped == [MOVE.id]


class Busy:
    """The log of a source that always has more: reads of this many entries of this many bytes."""

    def __init__(self, entries: int, size: int) -> None:
        self.payload, self.entries, self.read_so_far = b"x" * size, entries, 0

    def reader(self, partition: PartitionId, after: Position) -> Busy:
        return self

    async def read(self, wait_ms: int) -> list[Any]:
        first = self.read_so_far
        self.read_so_far += self.entries
        positions = (Position(LedgerId(1), EntryId(entry)) for entry in range(first, self.read_so_far))
        return [SimpleNamespace(position=position, payload=self.payload) for position in positions]

    def confirm(self, position: Position) -> None:
        pass


class Followed(SourceFollower):
    """A driver that follows a busy log without changes to the range."""

    def __init__(self, busy: Busy) -> None:
        async def append_record(record: ImportRows, requests: Any) -> None:
            pass

        state: Any = SimpleNamespace(engine=MemoryEngine(), hash=rings.key_hash)
        super().__init__(state, busy, lambda: SimpleNamespace(append_record=append_record))  # type: ignore[arg-type, return-value]
        self.found = Copying()._import()

    def _take(self, changes: pages.RangeChanges, logged: Any, found: ImportedRange) -> None:
        pass

    async def is_close(self, reads: int) -> list[bool]:
        return [await self.read_on(self.found) for _ in range(reads)]


@pytest.mark.parametrize(("entries", "size"), [(1, 300_000), (20, 100), (4, 300_000)])
async def test_busy_source_is_frozen_eventually(entries: int, size: int) -> None:
    following = Followed(Busy(entries, size))
    first = await following.is_close(STEADY_READS + 1)
    assert first == [False] * (STEADY_READS - 1) + [True, True]
    await following.read_up_to(following.read_to, following.found)
    assert await following.is_close(STEADY_READS) == first[:-1], "an early freeze is not requested again at once"


@pytest.mark.parametrize(("entries", "size"), [(64, 100), (14, 300_000)])
async def test_target_that_is_far_behind_follows_on(entries: int, size: int) -> None:
    assert not any(await Followed(Busy(entries, size)).is_close(3 * STEADY_READS))


async def test_target_that_reads_little_is_close() -> None:
    assert await Followed(Busy(2, 100)).is_close(2) == [True, True]
