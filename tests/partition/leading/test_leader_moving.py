"""A leader whose ranges are frozen, released and imported: what it answers, holds and redirects."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import Corrupted, Moved, RequestExpired
from kvstore.namespaces import Book, Namespace, NamespaceTable
from kvstore.partition.config import PartitionConfig
from kvstore.partition.moves import pages
from kvstore.partition.state import rows
from kvstore.partition.state.commands import (
    Batch,
    Code,
    Count,
    Delete,
    DeleteRange,
    Flag,
    Get,
    Level,
    Put,
    RequestId,
    Scan,
)
from kvstore.partition.state.digest import RangeDigest
from kvstore.partition.state.entry import decode
from kvstore.partition.state.move_records import (
    Drop,
    Founded,
    Freeze,
    ImportBegin,
    ImportEnd,
    ImportRows,
    MoveRecord,
    Own,
    Release,
    Unfreeze,
)
from kvstore.partition.state.overlay import Layer
from kvstore.partition.state.retry_table import key_hash
from kvstore.partition.state.rows import ALL_DATA, ALL_EXPIRY, ALL_ORDER
from kvstore.partition.state.scope import bound
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import Tokens, TokenSpan
from kvstore.ring.hashing import TOKENS
from kvstore.types import EntryId, LedgerId, PartitionId, Position
from tests.partition.one_partition import TIME_MS, Partition
from tests.partition.state.engine_memory import MemoryEngine
from tests.ring import rings
from tests.sim.moving.moves import keys_in

pytestmark = pytest.mark.usefixtures("key_hash")

MOVING, STAYING = TokenSpan(0, TOKENS // 2 - 1), TokenSpan(TOKENS // 2, TOKENS - 1)
M1, M2 = keys_in(MOVING, 2, b"m")
S1, S2 = keys_in(STAYING, 2, b"s")
P2 = PartitionId("p2")
CLIENT = b"c" * 16
PIN = Position(LedgerId(9), EntryId(4))


def founded(*spans: TokenSpan, **how: Any) -> Partition:
    """Return a leader of a partition that owns these ranges."""
    p = Partition(PartitionConfig(expiry_sweep_s=0, lease_ms=100_000), **how)
    started = p.loop.create_task(p.leader.start(Founded(spans)))
    p.settle()
    p.acknowledge()
    assert started.result() is None
    return p


@pytest.fixture
def p() -> Partition:
    p = founded(MOVING, STAYING)
    p.do(Put(M1, b"1"), Put(S1, b"2"))
    return p


def send(p: Partition, record: MoveRecord) -> Any:
    """Append a record and leave it in flight."""
    task = p.loop.create_task(p.leader.append_record(record))
    p.settle()
    return task


def log(p: Partition, record: MoveRecord) -> Position:
    """Append a record and acknowledge it."""
    task = send(p, record)
    p.acknowledge(len(p.log.in_flight))
    position: Position = task.result()
    return position


def request(sequence: int) -> RequestId:
    return RequestId(CLIENT, sequence, 1, TIME_MS)


# ── what is owned ─────────────────────────────────────────────────────────────────────────────────────────────────────


# docs/protocol.md M2
def test_first_record_of_a_log_names_the_owned_tokens() -> None:
    p = founded(STAYING)
    assert p.state.ownership.is_founded
    assert p.state.ownership.owned.spans == (STAYING,)
    again = ReplicaState(p.state.partition, p.engine, p.config, rings.key_hash)
    assert again.ownership == p.state.ownership, "it is durable together with the state"


# docs/protocol.md M1
def test_key_that_is_not_owned_is_not_answered() -> None:
    p = founded(STAYING)
    reads = [Get(M1), Get(M1, Level.STRICT), Get(M1, Level.STALE)]
    writes = [Put(M1, b"1"), Delete(M1), Put(M1, b"1", request=request(1)), Batch(S1, (Put(S1, b"1"), Put(M1, b"1")))]
    assert [type(each) for each in p.do(*reads, *writes)] == [Moved] * 7
    assert p.state.key_count == 0
    assert p.do(Put(S1, b"1")) == 1


def test_moved_operation_is_redirected() -> None:
    p = Partition()
    taken: list[Any] = []
    started = p.loop.create_task(p.leader.start(Founded((STAYING,)), lambda *each: taken.append(each)))
    p.settle()
    p.acknowledge()
    assert started.done()
    tokens = p.submit(Get(M1), Put(M1, b"1"), Batch(S1, (Put(S1, b"1"), Put(M1, b"1"))))
    assert [(op.code, token) for op, _, token, _ in taken] == [
        (Code.GET, tokens[0]), (Code.PUT, tokens[1]), (Code.BATCH, tokens[2])
    ]  # fmt: skip
    assert not any(token in p.caller.results for token in tokens)


# ── the source ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_freeze_stops_writes_from_its_send_and_reads_continue(p: Partition) -> None:
    freezing = send(p, Freeze(1, P2, MOVING))
    write, other = p.submit(Put(M1, b"3"), Put(S1, b"4"))
    assert [entry.keys for entry in p.in_flight()] == [[], [S1]], "the freeze, and a write outside its range"
    p.acknowledge(2)
    assert freezing.done()
    assert (p.result(write), p.result(other)) == ("waits", p.state.seq)
    assert p.do(Get(M1)).value == b"1"
    thawing = send(p, Unfreeze(1))
    p.acknowledge()
    assert thawing.done()
    p.acknowledge()
    assert p.result(write) == p.state.seq
    assert p.do(Get(M1)).value == b"3"


def test_batch_touching_a_frozen_range_waits_as_a_whole(p: Partition) -> None:
    log(p, Freeze(1, P2, MOVING))
    both, everything = p.submit(Batch(S1, (Put(S1, b"5"), Put(M1, b"5"))), DeleteRange(b"", b""))
    assert p.result(both) == p.result(everything) == "waits"
    assert p.do(Get(S1)).value == b"2"
    log(p, Unfreeze(1))
    while p.log.in_flight:
        p.acknowledge()
    assert sorted(p.result(both)) == [3, 4]
    assert p.result(everything) == 2


def test_retry_is_recognised_in_a_frozen_or_released_range(p: Partition) -> None:
    first = p.do(Put(M1, b"7", request=request(1)))
    freeze = log(p, Freeze(1, P2, MOVING))
    assert p.do(Put(M1, b"7", request=request(1))) == first
    log(p, Release(1, freeze, 1))
    assert p.do(Put(M1, b"7", request=request(1))) == first
    assert isinstance(p.do(Put(M1, b"8", request=request(2))), Moved)


def test_expired_key_in_a_frozen_range_is_absent_and_not_deleted(p: Partition) -> None:
    p.do(Put(M1, b"short", expires_ms=TIME_MS + 1000))
    log(p, Freeze(1, P2, MOVING))
    p.wall_offset_ms = 2000
    (read,) = p.submit(Get(M1))
    assert [entry.kinds for entry in p.in_flight()] == [b"\x04"], "an entry without effect advances the time"
    p.acknowledge()
    assert p.result(read) is None
    assert p.state.key_count == 2


def test_waiting_writes_go_to_the_new_owner(p: Partition) -> None:
    freeze = log(p, Freeze(1, P2, MOVING))
    (write,) = p.submit(Put(M1, b"9"))
    log(p, Release(1, freeze, 1))
    moved = p.result(write)
    assert isinstance(moved, Moved)
    assert p.state.key_count == 1
    assert p.do(Get(M1)).partition == P2


def test_freeze_and_its_end_exclude_each_other_in_flight(p: Partition) -> None:
    freeze = log(p, Freeze(1, P2, MOVING))
    serving_ranges = p.leader.serving_ranges
    frozen = serving_ranges.ownership.frozen_by(1)
    assert frozen is not None
    assert frozen.position == freeze
    send(p, Unfreeze(1))
    assert serving_ranges.is_pending(1)
    assert not serving_ranges.may_freeze(1, MOVING)
    p.acknowledge()
    assert not serving_ranges.is_pending(1)
    assert serving_ranges.may_freeze(1, MOVING)


def test_drops_remove_rows_and_indexes(p: Partition) -> None:
    p.do(Put(M2, b"x", expires_ms=TIME_MS + 60_000))
    freeze = log(p, Freeze(1, P2, MOVING))
    log(p, Release(1, freeze, 2))
    assert p.do(Count(level=Level.LINEARIZABLE)) == 1
    log(p, Drop(1, b""))
    assert [key[5:] for key, _ in p.engine.iterate(*ALL_DATA)] == [S1]
    assert [key[1:] for key, _ in p.engine.iterate(*ALL_ORDER)] == [S1]
    assert list(p.engine.iterate(*ALL_EXPIRY)) == []
    assert not p.state.ownership.released


# ── the target ────────────────────────────────────────────────────────────────────────────────────────────────────────


def imported(p: Partition, source: Partition) -> None:
    """Copy the moving range of another partition."""
    log(p, ImportBegin(1, 1, P2, MOVING, PIN))
    cursor = pages.BEGINNING
    while cursor:
        page = pages.decode(pages.encode(pages.page_of(source.state, MOVING, cursor)))
        requests = pages.requests_in(page)
        task = p.loop.create_task(
            p.leader.append_record(ImportRows(1, page.keys, page.rows, page.cursor, PIN), requests)
        )
        p.settle()
        p.acknowledge()
        assert task.done()
        cursor = page.cursor


def owned(p: Partition, source: Partition) -> None:
    state = source.state
    log(p, ImportEnd(1, PIN, 1, 0))
    log(p, Own(1, PIN, PIN, state.seq, state.record_time_ms))


def test_imported_rows_appear_with_their_versions_once_owned(p: Partition) -> None:
    p.do(Put(M1, b"newer"), *(Put(S1, b"%d" % number) for number in range(20)))
    record = p.state.get(M1)
    target = founded(STAYING)
    target.do(Put(S2, b"own"))
    imported(target, p)
    assert isinstance(target.do(Get(M1)), Moved)
    assert [key for key, _ in target.do(Scan(b"", b"", 0)).items] == [S2]
    assert target.state.key_count == 1
    owned(target, p)
    assert target.do(Get(M1)) == record
    assert target.state.key_count == 2
    assert target.state.seq == p.state.seq, "versions continue after the source's"
    assert target.state.record_time_ms >= p.state.record_time_ms
    assert target.do(Put(M1, b"next")) == p.state.seq + 1


# docs/protocol.md N1
def test_range_that_left_and_returned_is_recounted(p: Partition) -> None:
    """The tokens are those that were counted, but the records are others."""
    usage, book = p.leader.usage, Book()
    book.take(NamespaceTable(namespaces=(Namespace(name="moving", prefix=b"m"),)))
    usage.join(book)
    while not usage.count_some():
        pass
    assert usage.amounts["moving"].bytes == len(M1) + 1
    freeze = log(p, Freeze(1, P2, MOVING))
    log(p, Release(1, freeze, 1))
    log(p, Drop(1, b""))
    other = founded(MOVING)
    other.do(Put(M1, b"longer"))
    imported(p, other)
    owned(p, other)
    assert not usage.is_counted
    while not usage.count_some():
        pass
    assert usage.amounts["moving"].bytes == len(M1) + len(b"longer")


def test_record_time_continues_behind_the_sources(p: Partition) -> None:
    """With a late clock, the target would show expired keys again (docs/protocol.md, M9)."""
    p.do(Put(M1, b"short", 1_000, Flag.RELATIVE_TTL))
    p.wait(2.0)
    p.do(Put(S1, b"later"))
    assert p.do(Get(M1)) is None
    assert rows.data_key(rings.key_hash, M1) in dict(p.engine.iterate(*ALL_DATA)), "its delete is not logged yet"
    target = founded(STAYING)
    target.wall_offset_ms = -60_000
    imported(target, p)
    owned(target, p)
    assert target.state.record_time_ms >= p.state.record_time_ms
    assert target.do(Get(M1)) is None
    assert target.do(Put(M1, b"new", flags=Flag.IF_ABSENT)) > p.state.seq


def test_results_move_with_the_keys_of_a_request_or_batch(p: Partition) -> None:
    one = p.do(Put(M1, b"a", request=request(1)))
    two = p.do(Batch(S1, (Put(S1, b"b"), Put(M1, b"b")), request=request(2)))
    p.do(Put(S1, b"c", request=request(3)))
    target = founded(MOVING)  # owns the range already; the test is about the table
    target.do(Put(M2, b"x"))
    page = pages.page_of(p.state, MOVING, b"r")
    requests = pages.requests_in(page)
    assert requests is not None
    assert sorted(requests.sequences) == [1, 2]
    table = target.state.retries
    table.apply(1000, TIME_MS, requests)
    table.apply(1001, TIME_MS, requests)
    table.check()
    found = table.find(request(1), key_hash(rings.key_hash, M1), TIME_MS)
    assert found is not None
    known = target.leader._evaluator._known
    assert known(request(1), key_hash(rings.key_hash, M1), Layer(), TIME_MS) == one
    assert known(request(2), key_hash(rings.key_hash, S1), Layer(), TIME_MS) == two
    assert table.find(request(3), key_hash(rings.key_hash, S1), TIME_MS) is None


def test_moved_client_is_forgotten_one_window_after_its_request(p: Partition) -> None:
    window_s = p.config.retry_window_ms / 1000
    source, target = p, founded(STAYING)
    p.do(Put(M1, b"a", request=request(1)))
    for each in (source, target):
        each.wait(window_s * 0.9)
    imported(target, source)
    owned(target, source)
    table = target.state.retries
    assert table.find(request(1), key_hash(rings.key_hash, M1), TIME_MS) is not None
    target.wait(window_s * 0.2)
    target.do(Put(S2, b"later"))
    assert len(table) == 0
    assert isinstance(target.do(Put(M1, b"again", request=request(1))), RequestExpired)
    again = ReplicaState(target.state.partition, target.engine, target.config, rings.key_hash)
    assert len(again.retries) == 0, "nor after a restart"


def test_moved_client_is_remembered_over_restart_by_its_request_time(p: Partition) -> None:
    target = founded(STAYING)
    p.do(Put(M1, b"a", request=request(1)))
    imported(target, p)
    owned(target, p)
    again = ReplicaState(target.state.partition, target.engine, target.config, rings.key_hash)
    assert again.retries.find(request(1), key_hash(rings.key_hash, M1), TIME_MS) is not None
    again.retries.check()
    assert [since for since, _ in again.retries.idle] == [since for since, _ in target.state.retries.idle]


def test_range_delete_at_one_partition_is_not_taken_for_another() -> None:
    """A client with one numbering for all partitions sends each of them the same id. The answer of one partition moves
    to another with the range of the first key."""
    source, target = founded(MOVING, partition=P2), founded(STAYING)
    source.do(Put(M1, b"1"))
    target.do(Put(S1, b"2"))
    assert source.do(DeleteRange(b"", b"", request=request(1))) == 1
    assert source.do(DeleteRange(b"", b"", request=request(1))) == 1, "sent again, and recognised"
    source.do(Put(M1, b"3"))
    imported(target, source)
    owned(target, source)
    assert target.do(DeleteRange(b"", b"", request=request(1))) == 2
    assert target.do(Get(S1)) is None


def test_restarted_import_begins_empty(p: Partition) -> None:
    target = founded(STAYING)
    imported(target, p)
    log(target, ImportBegin(1, 2, P2, MOVING, PIN))
    assert list(target.engine.iterate(*ALL_DATA)) == []
    assert target.state.ownership.imports[0].cursor == pages.BEGINNING


def test_replicas_agree_on_an_import_byte_for_byte(p: Partition) -> None:
    target = founded(STAYING)
    imported(target, p)
    owned(target, p)
    follower = ReplicaState(target.state.partition, MemoryEngine(), target.config, rings.key_hash)
    for entry in target.log.acknowledged:
        follower.apply(entry)
    assert follower.fingerprint() == target.state.fingerprint()
    assert (follower.crc, follower.key_count, follower.seq) == (
        target.state.crc, target.state.key_count, target.state.seq
    )  # fmt: skip


@pytest.mark.parametrize(
    "record",
    [
        ImportRows(1, [], [], b"", PIN),
        ImportEnd(1, PIN, 0, 0),
        Own(1, PIN, PIN, 9, 9),
        Unfreeze(1),
        Release(1, PIN, 0),
        Drop(1, b""),
        Founded((MOVING,)),
        ImportBegin(1, 1, P2, MOVING, PIN),
    ],
    ids=lambda record: type(record).__name__,
)
def test_contradicting_move_record_is_corruption(p: Partition, record: MoveRecord) -> None:
    with pytest.raises(Corrupted):
        p.state.ownership.after(record, PIN, 1, 1)


def test_own_requires_the_freeze_of_its_import(p: Partition) -> None:
    target = founded(STAYING)
    imported(target, p)
    log(target, ImportEnd(1, PIN, 1, 0))
    with pytest.raises(Corrupted):
        target.state.ownership.after(Own(1, Position(LedgerId(9), EntryId(5)), PIN, 1, 1), PIN, 1, 1)
    after = target.state.ownership.after(ImportRows(1, [], [], b"", PIN), PIN, 1, 1)
    with pytest.raises(Corrupted):
        after.after(Own(1, PIN, PIN, 1, 1), PIN, 1, 1)


# ── what follows the log, and what is counted ─────────────────────────────────────────────────────────────────────────


def test_range_changes_contain_deletes(p: Partition) -> None:
    p.do(Put(M1, b"a"), Put(M2, b"b"), Put(S1, b"c"))
    p.do(Delete(M1))
    changes = pages.RangeChanges(MOVING, rings.key_hash)
    for logged in p.log.acknowledged:
        entry = decode(logged.payload)
        if not entry.is_control:
            changes.add(entry)
    assert {key[5:]: bool(row) for key, row in zip(changes.keys, changes.rows, strict=True)} == {M1: False, M2: True}


def test_early_count_equals_the_final_count(p: Partition) -> None:
    early = RangeDigest(p.engine, MOVING)
    p.state.watch(early)
    p.do(Put(M1, b"changed"), Put(M2, b"new"), Put(S2, b"other"))
    p.do(Delete(M1))
    while not early.step():
        pass
    late = RangeDigest(p.engine, MOVING)
    while not late.step():
        pass
    assert (early.count, early.hash) == (late.count, late.hash)
    assert late.count == 1


# ── what concerns all keys ────────────────────────────────────────────────────────────────────────────────────────────


def test_scans_and_counts_cover_the_assigned_tokens() -> None:
    p = founded(STAYING)
    p.do(Put(S1, b"1"))
    assert isinstance(p.do(bound(Count(), Tokens([MOVING, STAYING]))), Moved)
    assert isinstance(p.do(bound(Scan(b"", b"", 0), Tokens([MOVING, STAYING]))), Moved)
    assert isinstance(p.do(bound(DeleteRange(b"", b""), Tokens([MOVING, STAYING]))), Moved)
    half = Tokens([TokenSpan(STAYING.first, rings.key_hash.token_of(S1) - 1)])
    assert p.do(bound(Scan(b"", b"", 0), half)).items == []
    assert p.do(bound(Count(), Tokens([STAYING]))) == 1
    p.submit(Put(S1, b"under way"))
    assert p.do(bound(DeleteRange(b"", b""), half)) == 0, "nor operations in flight in the other half"
    assert p.do(bound(Count(), Tokens([STAYING]))) == 1


def test_operations_behind_a_waiting_batch_wait(p: Partition) -> None:
    """On any of its keys: otherwise the batch would undo later writes."""
    freeze = log(p, Freeze(1, P2, MOVING))
    first, second, other = p.submit(
        Batch(M1, (Put(M1, b"first"), Put(S1, b"first"))), Put(S1, b"second"), Put(S2, b"other")
    )
    also = Batch(S2, (Put(S2, b"third"), Put(S1, b"third")))
    (third, last) = p.submit(also, Put(S2, b"last"))
    p.acknowledge(len(p.log.in_flight))
    assert [p.result(each) for each in (first, second, third, last)] == ["waits"] * 4
    assert isinstance(p.result(other), int)
    assert freeze is not None
    log(p, Unfreeze(1))
    p.settle()
    p.acknowledge(len(p.log.in_flight))
    assert p.do(Get(S1)).value == b"third"
    assert p.do(Get(S2)).value == b"last"
    assert not p.leader.serving_ranges.blocked_keys
    assert isinstance(p.do(Put(S1, b"after")), int)
