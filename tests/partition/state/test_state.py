"""A state is its log, folded into an engine, whatever crashes in between."""

import asyncio
from random import Random

import pytest

from kvstore.errors import Corrupted, WrittenByNewer
from kvstore.partition.state import rows
from kvstore.partition.state.checksum import Doubt
from kvstore.partition.state.entry import EntryKind, decode
from kvstore.partition.state.state import ReplicaState
from kvstore.ring.hashing import MURMUR3
from kvstore.types import EntryId, Position, Seq
from kvstore.wal.ports import LogEntry
from tests.partition.effects import P1, TIME_MS, Writer, all_records, check_indexes, state_over
from tests.partition.state.engine_memory import MemoryEngine

every_seed = pytest.mark.parametrize("seed", range(30))


def check(state: ReplicaState, writer: Writer, entries: int) -> None:
    """Assert that the state equals the model after this many entries, and that its indexes agree with its records."""
    model = writer.models[entries]
    assert all_records(state) == model
    check_indexes(state)


@every_seed
def test_state_is_its_folded_log(seed: int) -> None:
    writer, state = Writer(seed), state_over(MemoryEngine())
    for number in range(60):
        state.apply(writer.any())
        check(state, writer, number + 1)
    assert (state.position, state.seq, state.epoch) == (writer.log[-1].position, writer.seq, writer.epoch)
    assert state.record_time_ms == writer.time_ms


@every_seed
def test_state_after_a_crash_continues_from_its_position(seed: int) -> None:
    writer, engine, random = Writer(seed), MemoryEngine(), Random(seed)
    reference = state_over(MemoryEngine())
    for _ in range(80):
        reference.apply(writer.any())
    state = state_over(engine)
    applied = 0
    while applied < 80:
        for logged in writer.log[applied : applied + random.randrange(1, 20)]:
            state.apply(logged)
        engine.crash(keep=random.randrange(12))
        state = state_over(engine)
        applied = 0 if state.position is None else state.position.entry + 1
        check(state, writer, applied)
        for logged in writer.log[applied : applied + 12]:
            state.apply(logged)
        applied = min(80, applied + 12)
        engine.crash(keep=10_000)
        state = state_over(engine)
    assert (state.fingerprint(), state.crc) == (reference.fingerprint(), reference.crc)
    check(state, writer, 80)


def test_entry_applied_before_is_ignored() -> None:
    writer, state = Writer(0), state_over(MemoryEngine())
    first, second = writer.put(a="1"), writer.put(a="2")
    for logged in (first, second, first, second):
        state.apply(logged)
    check(state, writer, 2)
    assert state.seq == 2


# docs/protocol.md P3
def test_gap_in_sequences_is_refused_without_changes() -> None:
    writer, state = Writer(0), state_over(MemoryEngine())
    state.apply(writer.put(a="1"))
    writer.put(b="2")
    with pytest.raises(Corrupted, match="begins at 3, the state is at 1"):
        state.apply(writer.put(c="3"))
    check(state, writer, 1)
    assert state.seq == 1


def test_epoch_never_falls() -> None:
    writer, state = Writer(0), state_over(MemoryEngine())
    writer.epoch = 5
    state.apply(writer.control(EntryKind.EPOCH_START))
    late = writer.put(a="1")
    message = decode(late.payload)
    message.epoch = 4
    with pytest.raises(Corrupted, match="goes back from epoch 5"):
        state.apply(LogEntry(late.position, message.encode()))


def test_record_time_never_goes_back() -> None:
    writer, state = Writer(0), state_over(MemoryEngine())
    state.apply(writer.put(a="1"))
    writer.time_ms -= 1
    with pytest.raises(Corrupted, match="goes back"):
        state.apply(writer.put(a="2"))


def test_entry_of_another_partition_is_refused() -> None:
    writer, state = Writer(0), state_over(MemoryEngine())
    message = decode(writer.put(a="1").payload)
    message.partition = type(P1)("p2")
    with pytest.raises(Corrupted, match=r"the log of p1 contains entry .* of p2"):
        state.apply(LogEntry(writer.log[0].position, message.encode()))


def with_check(logged: LogEntry, seq: int, crc: int) -> LogEntry:
    entry = decode(logged.payload)
    entry.check_seq, entry.check_crc = seq, crc
    return LogEntry(logged.position, entry.encode())


# docs/protocol.md P5
def test_check_record_reveals_a_difference() -> None:
    writer, state, other = Writer(0), state_over(MemoryEngine()), state_over(MemoryEngine())
    state.apply(writer.put(a="1"))
    other.apply(Writer(0).put(a="2"))
    checked = with_check(writer.put(b="3"), 1, state.crc)
    told: list[int] = []
    other.on_doubt = lambda: told.append(other.seq)
    mine = other.crc
    state.apply(checked)
    other.apply(checked)
    assert state.doubt is None
    assert other.doubt == Doubt(Seq(1), mine, decode(checked.payload).check_crc)
    assert told == [2], "it continues: any later check shows which state is right"


def test_check_may_name_a_recent_entry_but_not_its_middle() -> None:
    writer, state = Writer(0), state_over(MemoryEngine())
    state.apply(writer.put(a="1", b="2"))
    crc = state.crc
    state.apply(writer.put(c="3"))
    state.apply(with_check(writer.put(d="4"), 2, crc))
    with pytest.raises(Corrupted, match="check at 1, where no entry ended"):
        state.apply(with_check(writer.put(e="5"), 1, crc))


def test_check_from_before_a_restart_is_ignored() -> None:
    writer, engine = Writer(0), MemoryEngine()
    state = state_over(engine)
    for _ in range(3):
        state.apply(writer.put(a="1"))
    state = state_over(engine)
    state.apply(with_check(writer.put(a="2"), 2, 12345))
    assert state.doubt is None
    state.apply(with_check(writer.put(a="2"), 3, 12345))
    assert state.doubt is not None


def test_state_knows_whether_its_last_entry_is_a_release() -> None:
    writer, engine = Writer(0), MemoryEngine()
    state = state_over(engine)
    state.apply(writer.put(a="1"))
    assert not state.released
    state.apply(writer.control(EntryKind.RELEASE_LEAD))
    assert state.released
    assert state_over(engine).released
    state.apply(writer.control(EntryKind.EPOCH_START))
    assert not state.released


def test_key_is_absent_once_record_time_reaches_its_expiry() -> None:
    writer, state = Writer(0), state_over(MemoryEngine())
    entry = writer._begin()
    writer._put(entry, b"a", b"1", TIME_MS + 100)
    state.apply(writer.add(entry))
    writer.time_ms = TIME_MS + 99
    state.apply(writer.control(EntryKind.EMPTY))
    assert state.get(b"a") is not None
    writer.time_ms = TIME_MS + 100
    state.apply(writer.control(EntryKind.EMPTY))
    assert state.get(b"a") is None
    assert state.key_count == 1


async def test_durable_sequence_is_that_of_a_completed_flush() -> None:
    writer, engine = Writer(0), MemoryEngine()
    state = state_over(engine)
    state.apply(writer.put(a="1"))
    done = asyncio.get_running_loop().create_future()
    state.submit_flush(done.set_result)
    state.apply(writer.put(a="2"))
    assert state.durable_seq == 0
    await done
    assert state.durable_seq == 1
    engine.crash()
    assert state_over(engine).seq == 1


async def test_flush_of_a_replaced_state_makes_nothing_durable() -> None:
    """Otherwise the log would be trimmed up to a position that only the former state had reached."""
    writer, state = Writer(1), state_over(MemoryEngine())
    log = [writer.any() for _ in range(20)]
    for logged in log:
        state.apply(logged)
    done = asyncio.get_running_loop().create_future()
    state.submit_flush(done.set_result)
    state.engine.clear()
    state.load()
    assert await done is None
    assert state.durable_seq == 0


def test_rows_of_an_unknown_format_are_refused_by_number() -> None:
    writer, engine = Writer(0), MemoryEngine()
    state_over(engine).apply(writer.put(a="1"))
    meta = engine.get(rows.META_KEY)
    assert meta is not None
    batch = engine.batch()
    batch.put(rows.META_KEY, bytes((9,)) + meta[1:])
    engine.write(batch)
    with pytest.raises(WrittenByNewer, match="format 9"):
        state_over(engine)


def test_rows_without_a_position_are_removed() -> None:
    engine = MemoryEngine()
    batch = engine.batch()
    batch.put(rows.data_key(MURMUR3, b"a"), rows.encode_record(b"1", 1, 1, TIME_MS, 0))
    engine.write(batch)
    state = state_over(engine)
    assert (state.position, state.seq, all_records(state)) == (None, 0, {})


@pytest.mark.parametrize("value", [b"", b"v"])
@pytest.mark.parametrize("expires_ms", [0, 9])
@pytest.mark.parametrize("created", [3, 5])
def test_record_round_trips_through_its_row(value: bytes, created: int, expires_ms: int) -> None:
    row = rows.encode_record(value, 5, created, 7, expires_ms)
    assert rows.record_of(row) == (value, 5, created, 7, expires_ms)


def test_engine_rows_have_golden_bytes() -> None:
    def u64(*numbers: int) -> str:
        return "".join(f"{number:016x}" for number in numbers)

    assert rows.data_key(MURMUR3, b"a").hex() == "643c2569b2" + "61"
    assert rows.expiry_key(258, b"a").hex() == "78" + u64(258) + "61"
    assert rows.retry_key(258).hex() == "72" + u64(258)
    assert rows.encode_record(b"v", 5, 5, 7, 0).hex() == "00" + u64(5, 7) + "76"
    assert rows.encode_record(b"v", 5, 3, 7, 0).hex() == "01" + u64(5, 7, 3) + "76"
    assert rows.encode_record(b"v", 5, 5, 7, 9).hex() == "02" + u64(5, 7, 9) + "76"
    assert rows.encode_record(b"v", 5, 3, 7, 9).hex() == "03" + u64(5, 7, 3, 9) + "76"
    meta = rows.StateMeta(Position(rows.LedgerId(1), EntryId(2)), rows.Seq(3), 4, 5, 6, 0x0A0B0C0D, True)
    assert rows.encode_meta(*meta).hex() == "01" + u64(1, 2, 3, 4, 5, 6) + "0a0b0c0d" + "01"
    assert rows.meta_of(rows.encode_meta(*meta)) == meta
