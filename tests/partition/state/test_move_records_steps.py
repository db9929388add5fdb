"""Steps of a move are short, whatever the size and number of its records."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.partition.config import PartitionConfig
from kvstore.partition.moves import pages
from kvstore.partition.moves.pages import RETRY_IDS_MAX, page_of
from kvstore.partition.moves.source import DROP_BYTES, DROP_ROWS, drop_bound
from kvstore.partition.state.digest import BYTES_PER_STEP, RangeDigest
from kvstore.partition.state.effects import remove
from kvstore.partition.state.entry import Requests, requests_message
from kvstore.partition.state.move_records import Drop, ImportBegin, Release
from kvstore.partition.state.ownership import FrozenRange, Ownership
from kvstore.partition.state.retry_table import ROW_FORMAT, _row_head, key_hash
from kvstore.partition.state.rows import ALL_DATA, ALL_RETRY, data_key, encode_record, retry_key, token_of_data
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import EVERYTHING, NOTHING, TokenSpan
from kvstore.types import EntryId, LedgerId, PartitionId, Position
from tests.partition.state.engine_memory import MemoryEngine
from tests.ring import rings

pytestmark = pytest.mark.usefixtures("key_hash")

P1, P2 = PartitionId("p1"), PartitionId("p2")
ALL = EVERYTHING.spans[0]
AT = Position(LedgerId(1), EntryId(1))


class Reading(MemoryEngine):
    """Counts what iterators read."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.bytes = 0
        self.begins: list[bytes] = []

    def iterate(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        self.begins.append(begin)
        for key, row in super().iterate(begin, end):
            self.rows += 1
            self.bytes += len(key) + len(row)
            yield key, row


def filled(count: int, size: int) -> tuple[ReplicaState, Reading]:
    engine = Reading()
    state = ReplicaState(P1, engine, PartitionConfig(), rings.key_hash)
    batch = engine.batch()
    for number in range(count):
        batch.put(data_key(rings.key_hash, b"%d" % number), encode_record(bytes(size), 1, 1, 1, 0))
    engine.write(batch)
    state.position = AT
    engine.rows = engine.bytes = 0
    engine.begins.clear()
    return state, engine


def test_counting_large_records_reads_little_per_step() -> None:
    _, engine = filled(64, 1 << 18)
    digest = RangeDigest(engine, ALL)
    while not digest.step():
        assert engine.bytes <= BYTES_PER_STEP + (1 << 19)
        engine.bytes = 0
    assert digest.count == 64


@pytest.mark.parametrize(("count", "size"), [(2000, 10), (30, 1 << 18)], ids=("many", "large"))
def test_drop_removes_little_and_reads_no_removed_rows(count: int, size: int) -> None:
    """An engine steps over deleted rows each time that it reads there."""
    state, engine = filled(count, size)
    frozen = FrozenRange(7, P2, ALL, AT)
    state.ownership = Ownership(EVERYTHING, True, (), (frozen,), ()).after(Release(7, AT, count), AT, 1, 1)
    former = b""
    while (left := state.ownership.droppable(7)) is not None:
        until = drop_bound(state, *left)
        batch = engine.batch()
        engine.rows = engine.bytes = 0
        remove(engine, batch, left[0], until or left[1])
        engine.write(batch)
        assert engine.rows <= DROP_ROWS
        assert engine.bytes <= DROP_BYTES + size + 100
        assert min(engine.begins) >= former
        engine.begins.clear()
        former = until
        state.ownership = state.ownership.after(Drop(7, until), AT, 1, 1)
        state.ownership = Ownership.decode(state.ownership.encode())
    assert list(engine.iterate(*ALL_DATA)) == []


def test_abandoned_import_is_dropped_in_parts() -> None:
    begun = Ownership(NOTHING, True).after(ImportBegin(3, 1, P2, TokenSpan(0, 100), AT), AT, 1, 1)
    some = begun.after(Drop(3, data_key(rings.key_hash, b"x")), AT, 1, 1)
    left = some.droppable(3)
    assert left is not None
    assert left[0] == data_key(rings.key_hash, b"x")


def test_page_of_request_ids_reads_few() -> None:
    state, engine = filled(0, 0)
    batch = engine.batch()
    client = b"c" * 16
    for row in range(1, 60):
        sequences = list(range(row * 1000, row * 1000 + 1000))
        hashes = [key_hash(rings.key_hash, b"%d" % each) for each in sequences]
        requests = Requests([client], [1], [1], [0] * 1000, sequences, hashes, list(range(1000)), [], [])
        head = _row_head.pack(ROW_FORMAT, 1)
        batch.put(retry_key(row * 1000), head + requests_message(requests).SerializeToString())
    engine.write(batch)
    span, cursor, found, count = TokenSpan(0, 1 << 28), ALL_RETRY[0], 0, 0
    while cursor:
        page = page_of(state, span, cursor)
        following = page.cursor or ALL_RETRY[1]
        looked_at = sum(1000 for _ in engine.iterate(cursor, following))
        assert looked_at <= RETRY_IDS_MAX + 1000
        requests_here = pages.requests_in(page)
        found += len(requests_here.sequences) if requests_here is not None else 0
        cursor, count = page.cursor, count + 1
    wanted = sum(span.holds(token_of_data(data_key(rings.key_hash, b"%d" % each))) for each in range(1000, 60_000))
    assert found == wanted
    assert count > 10
