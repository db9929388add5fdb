"""A pinned view shows a transaction as a whole or not at all (docs/protocol.md, Tx13)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest

from kvstore.errors import NoSuchPin
from kvstore.partition.state import move_records, rows
from kvstore.partition.state.changes import DELETED, EXPIRED, feed_entry_of
from kvstore.partition.state.entry import EntryKind, control
from kvstore.partition.state.intents import Intent
from kvstore.partition.state.marks import MarkRecord
from kvstore.partition.state.pinned_scan import PinnedScan
from kvstore.partition.state.pinned_views import PinnedView
from kvstore.partition.state.tokens import TokenSpan
from kvstore.partition.state.transfer import StateExport, StateImport
from kvstore.proto import pinned_page
from kvstore.ring.hashing import TOKENS
from kvstore.types import EntryId, LedgerId, Position, ServerId
from kvstore.wal.ports import LogEntry
from tests.partition.effects import P1, state_over
from tests.partition.state.engine_memory import MemoryEngine
from tests.partition.transaction_log import TransactionLog
from tests.ring import rings

ALL = TokenSpan(0, TOKENS - 1)


def mark(log: TransactionLog, number: int = 1, *, pin: str = "pin", takes: bool = True) -> PinnedView:
    record = MarkRecord(pin, 1 << 60 if takes else 0, takes, number)
    entry = control(P1, 1, log.state.seq + 1, log.time_ms, EntryKind.MARK, move_records.encode(record))
    position = Position(LedgerId(1), EntryId(len(log.log)))
    log.log.append(LogEntry(position, entry.encode()))
    log.state.apply(log.log[-1])
    return log.state.pinned_views.by_pin.get(pin)  # type: ignore[return-value]


def read(held: PinnedView, *, page_bytes: int = 1 << 20, **options: bytes) -> dict[bytes, tuple[bytes, int]]:
    scan = PinnedScan(held, ALL, page_bytes=page_bytes, **options)
    found: list[tuple[bytes, tuple[bytes, int]]] = []
    ends, last = False, b""
    while not ends:
        while not scan.step():
            pass
        page = scan.page()
        assert page.last >= last
        ends, last = page.ends, page.last
        found += [(row.key, (row.value, row.version)) for row in pinned_page.rows_of(pinned_page.columns_of(page))]
    assert [key for key, _ in found] == sorted(dict(found), key=partial(rows.data_key, rings.key_hash)), (
        "each key once, in order"
    )
    return dict(found)


def committed(held: PinnedView, *keys: bytes) -> Iterable[Intent]:
    return [each for each in held.intents if each.key in keys]


def test_committed_intents_are_shown_and_others_are_not() -> None:
    log = TransactionLog(0)
    for key in (b"a", b"b", b"c", b"d"):
        log.put(key, b"old")
    put, _ = log.intent(b"a", b"new"), log.intent(b"b", b"never")
    deleted, created = log.intent(b"c", None), log.intent(b"e", b"new")
    log.intent(b"d", is_exclusive=False)
    log.intent(b"f", b"never")
    held = mark(log)
    log.resolve(put, is_committed=True)
    log.put(b"g", b"later")
    assert not held.is_resolved
    held.resolve(committed(held, b"a", b"c", b"e"))
    assert deleted in held.intents
    for page_bytes in (1, 60, 1 << 20):
        assert read(held, page_bytes=page_bytes) == {
            b"a": (b"new", put.seq),
            b"b": (b"old", 2),
            b"d": (b"old", 4),
            b"e": (b"new", created.seq),
        }
    assert read(held, start=b"a", end=b"b") == {b"a": (b"new", put.seq)}
    assert set(read(held, start=b"b", end=b"f")) == {b"b", b"d", b"e"}
    assert read(held, start=b"e", end=b"f") == {b"e": (b"new", created.seq)}
    assert read(held, start=b"c", end=b"d") == {}


def changes(held: PinnedView, page_bytes: int = 1 << 20) -> dict[bytes, pinned_page.PinnedRow]:
    """Return what the committed intents of the view write."""
    scan, found, ends = PinnedScan(held, ALL, intents_only=True, page_bytes=page_bytes), [], False
    while not ends:
        while not scan.step():
            pass
        page = scan.page()
        ends = page.ends
        found += pinned_page.rows_of(pinned_page.columns_of(page))
    assert [row.key for row in found] == sorted(
        {row.key for row in found}, key=partial(rows.data_key, rings.key_hash)
    ), "each key once, in order"
    return {row.key: row for row in found}


def test_changes_of_committed_intents_can_be_read_alone() -> None:
    log = TransactionLog(0)
    for key in (b"a", b"b", b"c"):
        log.put(key, b"old")
    put, deleted = log.intent(b"a", b"new"), log.intent(b"c", None)
    expiring = log.intent(b"e", b"new", expires_ms=log.time_ms + 1)
    log.intent(b"b", b"never")
    log.time_ms += 10
    log.put(b"z", b"1")
    held = mark(log)
    held.resolve(committed(held, b"a", b"c", b"e"))
    for page_bytes in (1, 1 << 20):
        found = changes(held, page_bytes)
        assert {key: (row.value, row.version, row.is_deleted) for key, row in found.items()} == {
            b"a": (b"new", put.seq, False),
            b"c": (b"", deleted.seq, True),
            b"e": (b"new", expiring.seq, False),
        }
    assert found[b"e"].expires_ms, "a record that has expired takes the place of the one before it, too"
    assert {row.written_ms for row in found.values()} == {held.time_ms}


def test_changes_of_intents_on_keys_without_ownership_are_not_read() -> None:
    log = TransactionLog(0)
    log.intent(b"a", b"1")
    held = mark(log)
    held.resolve(held.intents)
    held.owned = held.owned.without(ALL)
    assert changes(held) == {}


@pytest.mark.parametrize("seed", range(20))
def test_log_with_changes_of_intents_equals_the_view(seed: int) -> None:
    log = TransactionLog(seed)
    for _ in range(100):
        log.any()
    held = mark(log)
    held.resolve([each for each in held.intents if log.random.random() < 0.5])
    last: dict[bytes, tuple[int, bytes | None]] = {}
    for entry in log.log:
        feed = feed_entry_of(entry)
        for key, value, seq, kind in zip(feed.keys, feed.values, feed.sequences, feed.kinds, strict=True):
            last[key] = (seq, None if kind in (DELETED, EXPIRED) else value)
    for key, row in changes(held, 300).items():
        assert row.version > last.get(key, (0, None))[0]
        last[key] = (row.version, None if row.is_deleted else row.value)
    assert {key: (value, seq) for key, (seq, value) in last.items() if value is not None} == read(held)


@pytest.mark.parametrize("seed", range(20))
def test_view_equals_the_state_after_the_committed_intents(seed: int) -> None:
    log = TransactionLog(seed)
    for _ in range(100):
        log.any()
    held = mark(log)
    going = [each for each in held.intents if log.random.random() < 0.5]
    held.resolve(going)
    for intent in going:
        log.resolve(intent, is_committed=True)
    for page_bytes in (1, 300, 1 << 20):
        assert {key: value for key, (value, _) in read(held, page_bytes=page_bytes).items()} == log.values
    after = b""
    again: dict[bytes, tuple[bytes, int]] = {}
    while True:
        scan = PinnedScan(held, ALL, after=after, page_bytes=50)
        while not scan.step():
            pass
        page = scan.page()
        again.update((row.key, (row.value, row.version)) for row in pinned_page.rows_of(pinned_page.columns_of(page)))
        after = page.last
        if page.ends:
            break
    assert again == read(held)


def test_unresolved_view_is_not_read() -> None:
    log = TransactionLog(0)
    log.intent(b"a", b"1")
    with pytest.raises(AssertionError, match="not resolved"):
        PinnedScan(mark(log), ALL, page_bytes=1)


def test_view_without_effects_needs_no_answers() -> None:
    log = TransactionLog(0)
    log.intent(b"a", is_exclusive=False)
    log.intent(b"b", None)
    assert mark(log).is_resolved


def test_view_keeps_the_decisions_of_its_mark() -> None:
    log = TransactionLog(0)
    decision = log.decide(b"h", b"1")
    [name] = decision.intents
    held = mark(log)
    log.end(decision)
    later = log.decide(b"h", b"2")
    assert held.outcome(b"h", decision.attempt, *name) is True
    assert held.outcome(b"h", decision.attempt, name.key, name.seq + 1) is False
    assert held.outcome(b"h", later.attempt, *later.intents[0]) is False
    held.owned = held.owned.without(ALL)
    assert held.outcome(b"h", decision.attempt, *name) is None


def test_committed_row_that_has_expired_at_the_mark_is_absent() -> None:
    log = TransactionLog(0)
    log.intent(b"a", b"1", expires_ms=log.time_ms + 1)
    log.time_ms += 10
    log.put(b"b", b"1")
    held = mark(log)
    assert not held.hides_expired
    held.resolve(held.intents)
    assert set(read(held)) == {b"b"}


def test_pin_taken_again_under_its_id_has_another_number() -> None:
    log = TransactionLog(0)
    mark(log, 3)
    held = mark(log, 7)
    assert log.state.pinned_views.numbered("pin", 7) is held
    with pytest.raises(NoSuchPin):
        log.state.pinned_views.numbered("pin", 3)


def test_highest_pin_number_survives_restart_and_transfer() -> None:
    log = TransactionLog(0)
    mark(log, 7)
    mark(log, 9, pin="other", takes=False)
    mark(log, 0, takes=False)
    assert log.state.mark == 9
    assert state_over(log.state.engine).mark == 9
    target = state_over(MemoryEngine())
    export, arriving = StateExport(log.state), StateImport(target, frozenset({ServerId("donor")}))
    while (chunk := export.next_chunk(100)) is not None:
        arriving.add(chunk)
    assert target.mark == 9
    assert target.fingerprint() == log.state.fingerprint()


def test_numbered_mark_has_golden_bytes() -> None:
    said = move_records.encode(MarkRecord("nightly", 1_700_000_600_000, True, 7))
    assert said.hex() == "94a76e696768746c79cf0000018bcfee8fc0c307"
    assert move_records.decode(EntryKind.MARK, said) == MarkRecord("nightly", 1_700_000_600_000, True, 7)
    assert rows.encode_mark(7).hex() == "010000000000000007"
