"""States that are kept at MARKs."""

from collections.abc import Iterator

import pytest

from kvstore.errors import NoSuchPin, Overloaded
from kvstore.partition.state import move_records, rows
from kvstore.partition.state.engine import ViewClosed
from kvstore.partition.state.entry import EntryKind, control
from kvstore.partition.state.marks import MarkRecord
from kvstore.partition.state.pinned_views import HELD_MAX, PinnedView
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.transfer import StateImport
from kvstore.proto import entry_pb2
from kvstore.types import Position, ServerId
from tests.partition.effects import P1, TIME_MS, Writer, state_over
from tests.partition.state.engine_memory import MemoryEngine
from tests.ring import rings


class Replica:
    """A state that applies what a writer logs."""

    def __init__(self) -> None:
        self.writer = Writer(1)
        self.state = state_over(MemoryEngine())

    def catch_up(self) -> None:
        for entry in self.writer.log:
            self.state.apply(entry)

    def mark(self, pin: str, *, after_ms: int = 1_000, takes: bool = True) -> Position:
        """Log a MARK whose deadline is `ttl_ms` after its record time; 0 releases the pin."""
        deadline_ms = self.writer.time_ms + after_ms if after_ms else 0
        entry = control(P1, self.writer.epoch, self.writer.seq + 1, self.writer.time_ms, EntryKind.MARK)
        entry.control = move_records.encode(MarkRecord(pin, deadline_ms, takes))
        self.writer.add(entry)
        self.catch_up()
        assert self.state.position is not None
        return self.state.position


@pytest.fixture
def replica() -> Iterator[Replica]:
    made = Replica()
    yield made
    made.state.pinned_views.close()


def records(held: PinnedView) -> dict[bytes, bytes]:
    keys, found = held.view.cursor(*rows.ALL_DATA).take(1000, 1 << 20)
    return {rows.key_of_data(key): rows.record_of(row).value for key, row in zip(keys, found, strict=True)}


def test_mark_has_golden_bytes() -> None:
    said = move_records.encode(MarkRecord("nightly", 1_700_000_600_000, True))
    assert said.hex() == "93a76e696768746c79cf0000018bcfee8fc0c3"
    assert move_records.decode(EntryKind.MARK, said) == MarkRecord("nightly", 1_700_000_600_000, True)
    assert EntryKind.MARK == 28


# docs/protocol.md K1
def test_state_is_kept_as_of_its_mark(replica: Replica) -> None:
    replica.writer.put(a="1", b="1")
    position = replica.mark("pin")
    replica.writer.put(a="2", c="2")
    replica.writer.delete("b")
    replica.catch_up()
    held = replica.state.pinned_views.get("pin", position)
    assert records(held) == {b"a": b"1", b"b": b"1"}
    assert (held.seq, held.records, held.time_ms) == (2, 2, TIME_MS)


def test_mark_takes_no_sequence_and_changes_no_state(replica: Replica) -> None:
    replica.writer.put(a="1")
    replica.catch_up()
    state = replica.state
    before = (state.seq, state.crc, state.key_count, state.ownership, state.fingerprint())
    replica.mark("pin")
    assert (state.seq, state.crc, state.key_count, state.ownership, state.fingerprint()) == before
    assert ReplicaState(P1, state.engine, state._config, rings.key_hash).position == state.position


def test_view_at_another_position_is_not_returned(replica: Replica) -> None:
    first = replica.mark("pin")
    second = replica.mark("pin")
    with pytest.raises(NoSuchPin):
        replica.state.pinned_views.get("pin", first)
    assert replica.state.pinned_views.get("pin", second).position == second
    with pytest.raises(NoSuchPin):
        replica.state.pinned_views.get("other", second)


def test_released_pin_ends_its_view_only(replica: Replica) -> None:
    first, second = replica.mark("one"), replica.mark("two")
    cursor = replica.state.pinned_views.get("one", first).view.cursor(*rows.ALL_DATA)
    replica.mark("one", after_ms=0, takes=False)
    with pytest.raises(NoSuchPin):
        replica.state.pinned_views.get("one", first)
    with pytest.raises(ViewClosed):
        cursor.take(1, 1)
    assert replica.state.pinned_views.get("two", second)


def test_view_ends_with_its_deadline_by_record_time(replica: Replica) -> None:
    position = replica.mark("pin", after_ms=1_000)
    replica.writer.time_ms += 999
    replica.mark("other")
    assert replica.state.pinned_views.get("pin", position)
    replica.writer.time_ms += 1
    replica.mark("another")
    with pytest.raises(NoSuchPin):
        replica.state.pinned_views.get("pin", position)


def test_renewed_pin_lives_until_its_new_deadline(replica: Replica) -> None:
    position = replica.mark("pin", after_ms=1_000)
    replica.writer.time_ms += 900
    replica.mark("pin", after_ms=1_000, takes=False)
    replica.writer.time_ms += 999
    replica.mark("other")
    assert replica.state.pinned_views.get("pin", position).position == position


def test_renewal_does_not_restore_an_ended_view(replica: Replica) -> None:
    replica.mark("pin", takes=False)
    assert not replica.state.pinned_views.by_pin


def test_mark_replayed_after_its_deadline_keeps_nothing(replica: Replica) -> None:
    replica.mark("old", after_ms=1_000)
    position = replica.mark("young", after_ms=10_000)
    again = state_over(MemoryEngine())
    again.pinned_views.passed_ms = lambda: TIME_MS + 5_000
    for entry in replica.writer.log:
        again.apply(entry)
    assert [held.pin for held in again.pinned_views.all] == ["young"]
    assert again.pinned_views.get("young", position)


def test_number_of_views_is_bounded_and_the_oldest_stay(replica: Replica) -> None:
    for number in range(HELD_MAX + 2):
        replica.mark(f"pin{number:03}")
    assert [held.pin for held in replica.state.pinned_views.all] == [f"pin{number:03}" for number in range(HELD_MAX)]
    assert replica.state.pinned_views.refused == 2


def test_pin_beyond_the_limit_raises_overloaded(replica: Replica) -> None:
    """Two pins that were requested together have both found a free slot."""
    for number in range(HELD_MAX):
        replica.mark(f"pin{number:03}")
    replica.state.pinned_views.check_capacity("pin000")
    with pytest.raises(Overloaded, match="32 of at most 32 pins"):
        replica.state.pinned_views.taken("late", replica.mark("late"))


def test_replaced_state_keeps_no_views(replica: Replica) -> None:
    position = replica.mark("pin")
    StateImport(replica.state, frozenset({ServerId("donor")})).add(entry_pb2.Chunk(format=1).SerializeToString())
    with pytest.raises(NoSuchPin):
        replica.state.pinned_views.get("pin", position)


# docs/protocol.md K6
def test_view_knows_whether_it_hides_expired_records(replica: Replica) -> None:
    writer, state = replica.writer, replica.state
    writer.put(a="1")
    assert not state.pinned_views.get("pin", replica.mark("pin")).hides_expired
    batch = state.engine.batch()
    batch.put(rows.expiry_key(TIME_MS + 1, b"a"), b"")
    state.engine.write(batch)
    assert not state.pinned_views.get("pin", replica.mark("pin")).hides_expired
    batch = state.engine.batch()
    batch.put(rows.expiry_key(TIME_MS, b"a"), b"")
    state.engine.write(batch)
    assert state.pinned_views.get("pin", replica.mark("pin")).hides_expired
