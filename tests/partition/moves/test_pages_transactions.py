"""Intents and decisions move with their range (docs/protocol.md, Transactions)."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from kvstore.errors import Corrupted
from kvstore.partition.moves import pages
from kvstore.partition.moves.source import drop_bound
from kvstore.partition.state import move_records, rows
from kvstore.partition.state.digest import RangeDigest
from kvstore.partition.state.entry import Requests, control, decode
from kvstore.partition.state.move_records import (
    KIND_OF,
    Drop,
    Founded,
    Freeze,
    ImportBegin,
    ImportEnd,
    ImportRows,
    MoveRecord,
    Own,
    Release,
)
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import TokenSpan
from kvstore.ring.hashing import TOKENS
from kvstore.types import EntryId, LedgerId, PartitionId, Position
from kvstore.wal.ports import LogEntry
from tests.partition.effects import CONFIG, P1, all_records
from tests.partition.state.engine_memory import MemoryEngine
from tests.partition.transaction_log import KEYS, TransactionLog
from tests.ring import rings

P2 = PartitionId("p2")
SPAN = TokenSpan(0, TOKENS // 2)
KEPT = TokenSpan(SPAN.last + 1, TOKENS - 1)
PIN = Position(LedgerId(1), EntryId(0))


class Target:
    """The target of a move, and its log."""

    def __init__(self) -> None:
        self.state = ReplicaState(P2, MemoryEngine(), CONFIG, rings.key_hash)
        self.log: list[LogEntry] = []

    def record(self, record: MoveRecord, requests: Requests | None = None) -> None:
        kind = KIND_OF[type(record)]
        entry = control(P2, 1, self.state.seq + 1, 10**13, kind, move_records.encode(record))
        entry.requests = requests
        self.log.append(LogEntry(Position(LedgerId(9), EntryId(len(self.log))), entry.encode()))
        self.state.apply(self.log[-1])


def source_record(log: TransactionLog, record: MoveRecord) -> Position:
    entry = control(P1, 1, log.state.seq + 1, log.time_ms, KIND_OF[type(record)], move_records.encode(record))
    position = Position(LedgerId(1), EntryId(len(log.log)))
    log.log.append(LogEntry(position, entry.encode()))
    log.state.apply(log.log[-1])
    return position


def moving_rows(state: ReplicaState, span: TokenSpan) -> list[tuple[bytes, bytes]]:
    every = (rows.ALL_DATA, rows.ALL_INTENTS, rows.ALL_DECISIONS)
    found = [pair for begin, end in every for pair in state.engine.iterate(begin, end)]
    return [pair for pair in found if span.holds(rows.token_of_data(pair[0]))]


def digest_of(state: ReplicaState) -> RangeDigest:
    digest = RangeDigest(state.engine, SPAN)
    while not digest.step():
        pass
    return digest


def follow(target: Target, logged: Sequence[LogEntry]) -> None:
    changes = pages.RangeChanges(SPAN, rings.key_hash)
    for each in logged:
        entry = decode(each.payload)
        if not entry.is_control:
            changes.add(entry)
    target.record(ImportRows(1, changes.keys, changes.rows, b"", logged[-1].position), changes.requests)


def moved(seed: int, *, until_owned: bool = True) -> tuple[TransactionLog, Target, RangeDigest]:
    """Move SPAN while transactions continue. Return the source, the target, and the source's digest, which was kept
    current."""
    log, target, random = TransactionLog(seed), Target(), Random(seed)
    source_record(log, Founded((TokenSpan(0, TOKENS - 1),)))
    for _ in range(60):
        log.any()
    target.record(Founded(()))
    pin = log.log[-1].position
    target.record(ImportBegin(1, 1, P1, SPAN, pin))
    digest = digest_of(log.state)
    log.state.watch(digest)
    cursor = pages.BEGINNING
    while cursor:
        page = pages.page_of(log.state, SPAN, cursor)
        target.record(ImportRows(1, page.keys, page.rows, page.cursor, pin), pages.requests_in(page))
        cursor = page.cursor
        log.any()
    copied = digest_of(target.state)
    target.state.watch(copied)
    for _ in range(40):
        log.any()
    at = pin.entry + 1
    while at < len(log.log):
        until = at + random.randrange(1, 9)
        follow(target, log.log[at:until])
        at = until
    freeze = source_record(log, Freeze(1, P2, SPAN))
    follow(target, log.log[-1:])
    target.record(ImportEnd(1, freeze, copied.count, copied.hash))
    assert (copied.count, copied.hash) == (digest.count, digest.hash)
    if until_owned:
        seq, time_ms = log.state.seq, log.time_ms
        release = source_record(log, Release(1, freeze, digest.count, P2, SPAN))
        target.record(Own(1, freeze, release, seq, time_ms, P1, SPAN))
    return log, target, digest


@pytest.mark.parametrize("seed", range(20))
def test_range_moves_with_its_intents_and_decisions(seed: int) -> None:
    log, target, _ = moved(seed)
    assert moving_rows(target.state, SPAN) == moving_rows(log.state, SPAN)
    inside = {each.name: each for each in log.intents.values() if SPAN.holds(rings.key_hash.token_of(each.key))}
    assert {each.name: each for each in target.state.intents} == inside
    assert {each.name: each for each in log.state.intents} == {
        name: each for name, each in log.intents.items() if name not in inside
    }
    ruled = {each.attempt: each for each in log.decisions.values() if SPAN.holds(rings.key_hash.token_of(each.home))}
    assert {each.attempt: each for each in target.state.decisions} == ruled
    assert {each.attempt for each in log.state.decisions} == set(log.decisions) - set(ruled)
    assert target.state.key_count == len(moving_records(target.state))


def moving_records(state: ReplicaState) -> list[bytes]:
    return [key for key in all_records(state) if SPAN.holds(rings.key_hash.token_of(key))]


@pytest.mark.parametrize("seed", range(10))
def test_indexes_of_both_owners_are_the_same_after_a_restart(seed: int) -> None:
    log, target, _ = moved(seed)
    for state in (log.state, target.state):
        again = ReplicaState(state.partition, state.engine, CONFIG, rings.key_hash)
        assert {each.name: each for each in again.intents} == {each.name: each for each in state.intents}
        assert again.decisions.by_attempt == state.decisions.by_attempt


def test_imported_intents_lock_nothing_before_the_range_is_owned() -> None:
    for seed in range(10):
        _, target, _ = moved(seed, until_owned=False)
        stored = [*target.state.engine.iterate(*rows.ALL_INTENTS)]
        assert not target.state.intents.by_key
        assert not ReplicaState(P2, target.state.engine, CONFIG, rings.key_hash).intents.by_key
        if stored:
            return
    raise AssertionError("no seed has intents in the range")


@pytest.mark.parametrize("seed", range(5))
def test_dropped_range_leaves_no_intents_and_decisions(seed: int) -> None:
    log, target, _ = moved(seed)
    rest = moving_rows(log.state, KEPT)
    until = b"?"
    while until:
        going = log.state.ownership.droppable(1)
        assert going is not None
        until = drop_bound(log.state, *going)
        source_record(log, Drop(1, until))
    assert moving_rows(log.state, SPAN) == []
    assert moving_rows(log.state, KEPT) == rest
    target.record(Freeze(2, P1, SPAN))


def test_restarted_import_begins_without_intents() -> None:
    for seed in range(10):
        _, target, _ = moved(seed, until_owned=False)
        if any(target.state.engine.iterate(*rows.ALL_INTENTS)):
            target.record(ImportBegin(1, 2, P1, SPAN, PIN))
            assert moving_rows(target.state, SPAN) == []
            return
    raise AssertionError("no seed has intents in the range")


def test_digest_covers_intents_and_decisions() -> None:
    log = TransactionLog(0)
    key = next(each for each in KEYS if SPAN.holds(rings.key_hash.token_of(each)))
    before = digest_of(log.state)
    log.state.watch(before)
    empty = (before.count, before.hash)
    intent = log.intent(key, None)
    assert before.count == 0, "an intent is no record"
    assert before.hash != empty[1]
    log.resolve(intent, is_committed=False)
    assert (before.count, before.hash) == empty
    draft = log.draft()
    decision = draft.decision(key, log.attempt(), [])
    log.append(draft)
    assert before.hash != empty[1]
    again = digest_of(log.state)
    assert (again.count, again.hash) == (before.count, before.hash)
    log.decisions[decision.attempt] = decision
    log.end(decision)
    assert (before.count, before.hash) == empty


@pytest.mark.parametrize("prefix", [b"i", b"j", b"d", b"x"])
def test_imported_row_outside_of_the_range_is_refused(prefix: bytes) -> None:
    target = Target()
    target.record(Founded(()))
    target.record(ImportBegin(1, 1, P1, SPAN, PIN))
    outside = b"\xff" if prefix != b"x" else b"\0"
    with pytest.raises(Corrupted, match="is not in"):
        target.record(ImportRows(1, [prefix + outside * 4 + b"k" + bytes(8)], [b"\1"], b"", PIN))


def test_pages_bring_intents_and_decisions_behind_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_ROWS_MAX", 3)
    log = TransactionLog(3)
    for _ in range(100):
        log.any()
    cursor, found, span = pages.BEGINNING, list[bytes](), TokenSpan(0, TOKENS - 1)
    while cursor < pages.RETRIES:
        page = pages.page_of(log.state, span, cursor)
        assert len(page.keys) <= 3
        found += page.keys
        cursor = page.cursor
    assert found == [key for key, _ in moving_rows(log.state, span)] == sorted(found)
    assert {key[:1] for key in found} == {b"d", b"i", b"j"}
