"""A state that arrives at another replica equals the one that left."""

from collections.abc import Iterator
from errno import ENOSPC
from random import Random
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from kvstore.errors import Corrupted, WrittenByNewer
from kvstore.partition.state.rows import META_KEY, ORIGINS_KEY, encode_meta, meta_of, origins_of
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.transfer import StateExport, StateImport
from kvstore.proto import entry_pb2
from kvstore.types import ServerId
from tests.partition.effects import Writer, all_records, state_over
from tests.partition.state.engine_memory import MemoryEngine
from tests.partition.transaction_log import TransactionLog

DONOR = ServerId("donor")


def exported(seed: int, entries: int) -> tuple[Writer, ReplicaState]:
    writer, state = Writer(seed), state_over(MemoryEngine())
    for _ in range(entries):
        state.apply(writer.any())
    return writer, state


def chunks(export: StateExport, limit_bytes: int = 200) -> Iterator[bytes]:
    while (chunk := export.next_chunk(limit_bytes)) is not None:
        yield chunk


@pytest.mark.parametrize("seed", range(10))
def test_transferred_state_equals_the_original_and_follows_the_log(seed: int) -> None:
    writer, source = exported(seed, 60)
    _, target = exported(seed + 100, 5)
    export = StateExport(source)
    sent = list(chunks(export))
    arriving = StateImport(target, frozenset({DONOR}))
    assert [arriving.add(chunk) for chunk in sent] == [False] * (len(sent) - 1) + [True]
    assert (target.position, target.seq, target.crc) == (source.position, source.seq, source.crc)
    assert target.durable_seq == 0
    for _ in range(20):
        logged = writer.any()
        source.apply(logged)
        target.apply(logged)
    assert target.fingerprint() == source.fingerprint()
    assert all_records(target) == writer.model
    assert target.retries.rows() == source.retries.rows()


# docs/protocol.md P16
@pytest.mark.parametrize("seed", range(5))
def test_transfer_carries_request_ids(seed: int) -> None:
    """They are compared before anything else is applied: twenty entries later all transferred ids are forgotten."""
    _, source = exported(seed, 60)
    _, target = exported(seed + 100, 5)
    arriving = StateImport(target, frozenset({DONOR}))
    for chunk in chunks(StateExport(source)):
        arriving.add(chunk)
    assert target.retries.rows() == source.retries.rows() != []
    assert remembered(target) == remembered(source)
    target.retries.check()


def remembered(state: ReplicaState) -> dict[bytes, tuple[int, int, dict[int, Any]]]:
    """Return each client with its acknowledgement, the time it has seen, and its results."""
    clients = state.retries._clients.items()
    return {client: (each.first_unacked, each.seen_ms, each.results) for client, each in clients}


# docs/protocol.md Tx14
@pytest.mark.parametrize("seed", range(5))
def test_transfer_carries_intents_and_decisions(seed: int) -> None:
    log, target = TransactionLog(seed), state_over(MemoryEngine())
    for _ in range(80):
        log.any()
    arriving = StateImport(target, frozenset({DONOR}))
    for chunk in chunks(StateExport(log.state)):
        arriving.add(chunk)
    assert {each.name: each for each in target.intents} == log.intents != {}
    assert target.decisions.by_attempt == log.decisions
    assert target.fingerprint() == log.state.fingerprint()


def test_export_shows_the_state_as_of_its_start() -> None:
    writer, source = exported(0, 30)
    model, seq = dict(writer.model), source.seq
    export = StateExport(source)
    sent = [export.next_chunk(200)]
    while sent[-1] is not None:
        source.apply(writer.any())
        sent.append(export.next_chunk(200))
    target = state_over(MemoryEngine())
    arriving = StateImport(target, frozenset({DONOR}))
    for chunk in sent[:-1]:
        assert chunk is not None
        arriving.add(chunk)
    assert (all_records(target), target.seq, export.meta.seq) == (model, seq, seq)


def test_interrupted_import_leaves_an_empty_state() -> None:
    _, source = exported(0, 60)
    engine = MemoryEngine()
    target = state_over(engine)
    arriving = StateImport(target, frozenset({DONOR}))
    sent = list(chunks(StateExport(source)))
    for chunk in sent[:-1]:
        arriving.add(chunk)
    assert target.position is None
    target = state_over(engine)
    assert (target.position, all_records(target)) == (None, {})


def test_state_that_may_be_lost_is_not_durable() -> None:
    """The leader trims the log up to what replicas say is durable."""

    class Full(MemoryEngine):
        def clear(self) -> None:
            raise OSError(ENOSPC, "no space is left for the files of an empty engine")

    _, source = exported(0, 60)
    target = state_over(Full())
    target.apply(Writer(seed=2).put(old="gone"))
    target.durable_seq = target.seq
    with pytest.raises(OSError, match="no space"):
        StateImport(target, frozenset({DONOR})).add(next(chunks(StateExport(source))))
    assert target.durable_seq == 0


@pytest.mark.parametrize("lost", [0, 1])
def test_lost_repeated_or_damaged_chunk_is_detected(lost: int) -> None:
    _, source = exported(0, 60)
    sent = list(chunks(StateExport(source)))
    arriving = StateImport(state_over(MemoryEngine()), frozenset({DONOR}))
    if lost:
        arriving.add(sent[0])
    with pytest.raises(Corrupted):
        arriving.add(sent[lost + 1])
    arriving = StateImport(state_over(MemoryEngine()), frozenset({DONOR}))
    arriving.add(sent[0])
    with pytest.raises(Corrupted):
        arriving.add(sent[0])
    damaged = bytearray(sent[0])
    damaged[len(damaged) // 2] ^= 1
    with pytest.raises(Corrupted):
        StateImport(state_over(MemoryEngine()), frozenset({DONOR})).add(bytes(damaged))


@pytest.mark.parametrize("seed", range(6))
def test_damaged_chunk_is_refused_and_the_first_costs_no_state(seed: int) -> None:
    random = Random(seed)
    _, source = exported(seed, 30)
    _, target = exported(seed + 100, 10)
    sent = list(chunks(StateExport(source)))
    stood = all_records(target), target.position
    for _ in range(150):
        number = random.choice((0, len(sent) - 1))
        arriving = StateImport(target if number == 0 else state_over(MemoryEngine()), frozenset({DONOR}))
        for chunk in sent[:number]:
            arriving.add(chunk)
        damaged = bytearray(sent[number])
        damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
        if not says_the_same(bytes(damaged), sent[number]):
            with pytest.raises(Corrupted):
                arriving.add(bytes(damaged))
    assert (all_records(target), target.position) == stood


def says_the_same(one: bytes, other: bytes) -> bool:
    """Return True if it is only another encoding of the same values."""
    try:
        found, wanted = entry_pb2.Chunk.FromString(one), entry_pb2.Chunk.FromString(other)
    except DecodeError:
        return False
    found.DiscardUnknownFields()
    return found == wanted


def test_state_with_a_wrong_key_count_is_refused() -> None:
    _, source = exported(0, 30)
    row = source.engine.get(META_KEY)
    assert row is not None
    position, seq, epoch, record_time_ms, key_count, crc, released = meta_of(row)
    batch = source.engine.batch()
    batch.put(META_KEY, encode_meta(position, seq, epoch, record_time_ms, key_count + 1, crc, released))
    source.engine.write(batch)
    arriving = StateImport(state_over(MemoryEngine()), frozenset({DONOR}))
    *sent, last = chunks(StateExport(source))
    for chunk in sent:
        arriving.add(chunk)
    with pytest.raises(Corrupted, match=f"{key_count + 1} keys, got {key_count}"):
        arriving.add(last)


def test_closed_export_returns_nothing() -> None:
    _, source = exported(0, 60)
    export = StateExport(source)
    export.next_chunk(100)
    export.close()
    assert export.next_chunk(100) is None


def test_copy_remembers_its_origins_over_restart_until_confirmed() -> None:
    _, source = exported(0, 20)
    engine = MemoryEngine()
    arriving = StateImport(state_over(engine), frozenset({DONOR, ServerId("an-earlier-one")}))
    for chunk in chunks(StateExport(source)):
        arriving.add(chunk)
    assert engine.get(ORIGINS_KEY) == b"\x01an-earlier-one\x00donor", "docs/reference/formats.md, State store"
    again = state_over(engine)
    assert again.origins == {DONOR, "an-earlier-one"}
    again.mark_confirmed()
    assert (again.origins, state_over(engine).origins) == (frozenset(), frozenset())
    with pytest.raises(WrittenByNewer):
        origins_of(b"\x02donor")
