"""A log records the cluster version that writes it (docs/protocol.md V4, V5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvstore import versions
from kvstore.env import Env
from kvstore.env.real import real_env
from kvstore.errors import ClusterTooNew, Corrupted, StoreError, WrittenByNewer
from kvstore.partition import versioning
from kvstore.partition.config import PartitionConfig
from kvstore.partition.election.following import LogFollower
from kvstore.partition.election.publishing import TAKEN_S, Publishing
from kvstore.partition.election.ranking import Published
from kvstore.partition.election.role_machine import ReplicaRole
from kvstore.partition.election.tail import Tail
from kvstore.partition.state import entry as entries
from kvstore.partition.state import move_records, rows
from kvstore.partition.state.entry import EntryKind, control
from kvstore.partition.state.move_records import Founded, Freeze, ImportEnd, LogVersion
from kvstore.partition.state.ownership import Ownership
from kvstore.partition.state.retry_table import decode_row
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import Tokens, TokenSpan
from kvstore.partition.state.transfer import StateExport, StateImport
from kvstore.partition.versioning import Versioning
from kvstore.proto import entry_pb2
from kvstore.ring.hashing import TOKENS
from kvstore.types import EntryId, LedgerId, PartitionId, Position, Seq, ServerId
from tests.partition.effects import P1, Writer, state_over
from tests.partition.one_partition import Partition
from tests.partition.state.engine_memory import MemoryEngine
from tests.ring import rings
from tests.waiting import wait_until

CONFIG, PIN = PartitionConfig(), Position(LedgerId(1), EntryId(2))


def raised(version: int, release: str = "") -> Writer:
    """Make a log that raises its version to `version` between two puts."""
    writer = Writer(1)
    writer.put(a="1")
    record = control(P1, writer.epoch, writer.seq + 1, writer.time_ms, EntryKind.LOG_VERSION)
    record.control = move_records.encode(LogVersion(version, release))
    writer.add(record)
    writer.put(b="2")
    return writer


def applied(writer: Writer, state: ReplicaState) -> ReplicaState:
    for entry in writer.log:
        state.apply(entry)
    return state


def test_version_record_and_row_have_golden_bytes() -> None:
    said = move_records.encode(LogVersion(2, "0.2.0"))
    assert said.hex() == "9202a5302e322e30"
    assert move_records.decode(EntryKind.LOG_VERSION, said) == LogVersion(2, "0.2.0")
    assert EntryKind.LOG_VERSION == 29
    assert (rows.VERSION_KEY, rows.encode_version(2).hex()) == (b"v", "0100000002")
    assert rows.version_of(None) == versions.FIRST


# docs/protocol.md V4
def test_log_version_survives_restart_and_copy() -> None:
    engine = MemoryEngine()
    state = applied(raised(2), state_over(engine))
    assert (state.log_version, state.seq, state.key_count) == (2, 2, 2)
    assert state_over(engine).log_version == 2
    copy = state_over(MemoryEngine())
    export, taking = StateExport(state), StateImport(copy, frozenset({ServerId("n1")}))
    while (chunk := export.next_chunk(10)) is not None:
        taking.add(chunk)
    assert copy.log_version == 2
    assert state_over(MemoryEngine()).log_version == versions.FIRST


def chunks(export: StateExport) -> Iterator[bytes]:
    while (chunk := export.next_chunk(10)) is not None:
        yield chunk


# docs/protocol.md V4
def test_state_of_an_unsupported_log_version_is_not_installed() -> None:
    donor = ReplicaState(P1, MemoryEngine(), PartitionConfig(), rings.key_hash, can=7)
    applied(raised(7, "0.7.0"), donor)
    engine = MemoryEngine()
    own = ReplicaState(P1, engine, PartitionConfig(), rings.key_hash, can=2)
    own.apply(Writer(1).put(old="1"))
    before = own.fingerprint()
    taking = StateImport(own, frozenset({ServerId("n1")}))
    with pytest.raises(ClusterTooNew, match="version 7, this server supports 2"):
        taking.add(next(chunks(StateExport(donor))))
    assert (own.fingerprint(), own.log_version, own.is_complete) == (before, 1, True)


def test_state_unreadable_once_complete_is_emptied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    donor = applied(raised(2), state_over(MemoryEngine()))
    own = state_over(MemoryEngine())
    load = own._load_retries

    def unknown() -> None:
        load()
        if own.seq:
            raise WrittenByNewer("a row of another format")

    monkeypatch.setattr(own, "_load_retries", unknown)
    taking = StateImport(own, frozenset({ServerId("n1")}))
    with pytest.raises(WrittenByNewer):
        any(map(taking.add, chunks(StateExport(donor))))
    assert (own.position, own.seq, next(own.engine.iterate(*rows.EVERYTHING), None)) == (None, 0, None)


@pytest.mark.parametrize("error", [ClusterTooNew("a"), WrittenByNewer("b")], ids=lambda error: type(error).__name__)
async def test_replica_stops_when_it_cannot_read_its_log(error: StoreError) -> None:
    async def install(_: Seq) -> None:
        raise error

    tail = SimpleNamespace(_install_snapshot=install)
    with pytest.raises(type(error)):
        await Tail._install(cast(Any, tail))


def test_unsupported_log_version_is_reported_and_nothing_applied() -> None:
    writer, engine = raised(7, "0.7.0"), MemoryEngine()
    state = ReplicaState(P1, engine, PartitionConfig(), rings.key_hash, can=2)
    with pytest.raises(ClusterTooNew, match=r"version 7, this server supports 2: install kvstore 0\.7\.0"):
        applied(writer, state)
    assert (state.seq, state.log_version, state.is_complete) == (1, 1, True)
    applied(writer, ReplicaState(P1, engine, PartitionConfig(), rings.key_hash, can=7))
    with pytest.raises(ClusterTooNew, match="version 7"):
        ReplicaState(P1, engine, PartitionConfig(), rings.key_hash, can=2)


# docs/protocol.md V5
def test_unknown_field_is_ignored_and_unknown_meaning_refused() -> None:
    writer = Writer(1)
    payload = writer.put(a="1").payload
    more = payload + bytes.fromhex("ba0302" + "6869")  # field 55, two bytes
    assert entries.decode(more).keys == [b"a"]
    for changed in ({"format": 2}, {"kinds": b"\x81"}, {"kinds": b"\x1e", "keys": [], "values": []}):
        message = entry_pb2.Entry.FromString(payload)
        for name, value in changed.items():
            message.ClearField(name)  # type: ignore[arg-type]
            message.MergeFrom(entry_pb2.Entry(**{name: value}))
        with pytest.raises(WrittenByNewer):
            entries.decode(message.SerializeToString())


@pytest.mark.parametrize(("error", "is_recreated"), [(Corrupted("a"), True), (WrittenByNewer("b"), False)])
async def test_copy_is_not_discarded_for_data_of_a_newer_release(
    env: Env, error: Corrupted, is_recreated: bool
) -> None:
    done = asyncio.Event()
    outvoted: list[bool] = []

    async def run() -> None:
        raise error

    following = LogFollower(
        env,
        cast(Any, SimpleNamespace(run=run)),
        cast(Any, SimpleNamespace(role=ReplicaRole.FOLLOWING, leader=ServerId("n2"))),
        cast(Any, SimpleNamespace(on_outvoted=lambda: outvoted.append(True))),
        feed=lambda _: done.set(),
        role_change=cast(Any, None),
        server=ServerId("n1"),
        name="p1",
    )
    following.start()
    assert following._task is not None
    await done.wait()
    await following.stop()
    assert following.failure is error
    assert bool(outvoted) is is_recreated


class Lead:
    """A leader that logs and applies its records."""

    def __init__(self, state: ReplicaState) -> None:
        self.state = state
        self.logged: list[LogVersion] = []

    async def append_record(self, record: LogVersion) -> None:
        self.logged.append(record)
        self.state.log_version = record.version


@pytest.fixture
async def env(tmp_path: Path) -> AsyncIterator[Env]:
    made = real_env(tmp_path)
    yield made
    await made.nursery.close()


# docs/protocol.md V4
def test_new_log_begins_at_the_version_of_the_cluster() -> None:
    """Nothing is accepted before, so a new partition refuses nothing that needs the version."""
    p = Partition()
    founded, version = Founded((TokenSpan(0, TOKENS - 1),)), LogVersion(3, "0.2.0")
    started = p.loop.create_task(p.leader.start(founded, version=version))
    p.settle()
    p.log.acknowledge()
    p.settle()
    assert not p.leader.serving
    p.log.acknowledge()
    p.settle()
    started.result()
    assert (p.leader.serving, p.state.log_version) == (True, 3)


async def test_log_rises_at_once_when_it_is_woken(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versioning, "CHECK_S", 1e9)
    state = state_over(MemoryEngine())
    lead, known = Lead(state), SimpleNamespace(can=2, cluster=1)
    versions_of_log = Versioning(env, P1, state, cast(Any, lambda: lead), cast(Any, known))
    assert versions_of_log.raised is None
    versions_of_log.start()
    known.cluster = 2
    versions_of_log.wake()

    async def is_logged() -> bool:
        return lead.logged == [LogVersion(2, "0.2.0")]

    await wait_until(is_logged, what="the record is logged")


async def test_leader_logs_the_version_once_the_cluster_has_risen(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    for interval in ("CHECK_S", "CHECK_AT_TOP_S"):
        monkeypatch.setattr(versioning, interval, 0.001)
    state = state_over(MemoryEngine())
    lead, known, looks = Lead(state), SimpleNamespace(can=2, cluster=1), 0

    def leading() -> Lead | None:
        nonlocal looks
        looks += 1
        return lead if looks > 2 else None

    Versioning(env, P1, state, cast(Any, leading), cast(Any, known)).start()

    async def has_looked() -> bool:
        return looks > 5

    await wait_until(has_looked, what="it looks")
    assert lead.logged == [], "some server could not read the log"
    known.cluster = 2

    async def is_logged() -> bool:
        return lead.logged == [LogVersion(2, "0.2.0")]

    await wait_until(is_logged, what="the record is logged")
    lead.logged.clear()
    state.log_version = versions.FIRST  # as of an earlier state
    await wait_until(is_logged, what="it is logged again")


# docs/protocol.md V5
def test_unknown_trailing_fields_are_ignored_at_any_depth() -> None:
    version = msgspec.msgpack.encode([2, "0.2.0", {"more": 1}])
    assert move_records.decode(EntryKind.LOG_VERSION, version) == LogVersion(2, "0.2.0")
    freeze = Freeze(7, PartitionId("p2"), TokenSpan(1, 9))
    longer = msgspec.msgpack.encode([7, "p2", [1, 9, "more"], "more"])
    assert move_records.decode(EntryKind.FREEZE, longer) == freeze
    founded = msgspec.msgpack.encode([[[0, 4, "more"], [9, 12]], "more"])
    assert move_records.decode(EntryKind.EPOCH_START, founded) == Founded((TokenSpan(0, 4), TokenSpan(9, 12)))
    for bad in (msgspec.msgpack.encode(["2", "0.2.0", 1]), msgspec.msgpack.encode([]), version[:-1], b""):
        with pytest.raises(Corrupted) as raised:
            move_records.decode(EntryKind.LOG_VERSION, bad)
        assert not isinstance(raised.value, WrittenByNewer)


# docs/protocol.md V5
def test_ownership_row_ignores_more_fields_and_refuses_another_format() -> None:
    owned = Ownership(Tokens((TokenSpan(3, 7),)), True)
    row = owned.encode()
    fields = msgspec.msgpack.decode(row[1:])
    move = [1, 1, "p1", [8, 9, "more"], [1, 2], b"d", [1, 2], [1, [1, 2], 3, 4, "more"], False, b"", "more"]
    found = Ownership.decode(row[:1] + msgspec.msgpack.encode([fields[0], [move], *fields[2:], "more"]))
    assert (found.owned.spans, found.is_founded) == (owned.owned.spans, True)
    assert (found.imports[0].span, found.imports[0].end) == (TokenSpan(8, 9), ImportEnd(1, PIN, 3, 4))
    with pytest.raises(WrittenByNewer, match="format 2"):
        Ownership.decode(b"\x02" + row[1:])
    with pytest.raises(Corrupted, match="cannot read"):
        Ownership.decode(row[:1] + msgspec.msgpack.encode([1]))


def test_chunks_and_rows_of_another_format_raise_written_by_newer() -> None:
    own = ReplicaState(P1, MemoryEngine(), PartitionConfig(), rings.key_hash)
    own.apply(Writer(1).put(old="1"))
    before = own.fingerprint()
    chunk = entry_pb2.Chunk.FromString(next(chunks(StateExport(own))))
    chunk.format = 2
    with pytest.raises(WrittenByNewer, match="format 2"):
        StateImport(own, frozenset({ServerId("n1")})).add(chunk.SerializeToString())
    assert (own.fingerprint(), own.is_complete) == (before, True)
    with pytest.raises(WrittenByNewer, match="format 9"):
        decode_row(bytes((9,)) + bytes(8))


def test_fingerprints_differ_with_the_log_version() -> None:
    one, other = (
        applied(raised(2), state_over(MemoryEngine())),
        applied(raised(3), ReplicaState(P1, MemoryEngine(), CONFIG, rings.key_hash, 3)),
    )
    assert (one.seq, one.key_count) == (other.seq, other.key_count)
    assert one.fingerprint() != other.fingerprint()


# docs/protocol.md V4
async def test_failed_replica_publishes_that_it_has_stopped() -> None:
    said: list[Published] = []
    claims = SimpleNamespace(publish=None)

    async def publish(mine: Published, *, always: bool = False) -> None:
        said.append(mine)

    claims.publish = publish
    failed = False

    async def pause(_: float) -> None:
        nonlocal failed
        if failed:
            raise asyncio.CancelledError
        failed = True

    trials = SimpleNamespace(trial=SimpleNamespace(since=0, is_barred=False))
    publishing = Publishing(
        *cast(Any, (SimpleNamespace(pause=pause), claims, state_over(MemoryEngine()), trials, ServerId("n1"), "x")),
        is_stopped=lambda: failed,
    )
    with pytest.raises(asyncio.CancelledError):
        await publishing.run()
    assert [each.is_stopped for each in said] == [False, True]
    assert [Published.decode(each.encode()) for each in said] == said
    assert b"stopped" not in said[0].encode(), "for servers of the first release"


# docs/protocol.md H6
async def test_replica_without_state_publishes_installed_bytes() -> None:
    said: list[Published] = []

    async def publish(mine: Published) -> None:
        said.append(mine)

    async def pause(_: float) -> None:
        match len(said):
            case 1:
                state.installed_bytes += 5
            case 2:
                applied(raised(2), state)
            case _:
                raise asyncio.CancelledError

    state = state_over(MemoryEngine())
    trials = SimpleNamespace(trial=SimpleNamespace(since=0, is_barred=False))
    beat, claims = SimpleNamespace(pause=pause), SimpleNamespace(publish=publish)
    with pytest.raises(asyncio.CancelledError):
        await Publishing(*cast(Any, (beat, claims, state, trials, ServerId("n1"), "x"))).run()
    assert [each.taken for each in said] == [(0, 0), (0, 5), state.position]
    assert [Published.decode(each.encode()) for each in said] == said
    assert Published.decode(b'{"seq": 0, "durable_seq": 0, "epoch": 0, "nonce": "x"}').taken is None, (
        "the first release"
    )


# docs/protocol.md H6
async def test_entries_without_sequences_are_published_now_and_then() -> None:
    said: list[Published] = []
    rests = 0

    async def publish(mine: Published) -> None:
        said.append(mine)

    async def pause(_: float) -> None:
        nonlocal rests
        rests += 1
        state.position = Position(LedgerId(7), EntryId(rests))
        if rests > 2 * TAKEN_S:
            raise asyncio.CancelledError

    state = state_over(MemoryEngine())
    applied(raised(2), state)
    trials = SimpleNamespace(trial=SimpleNamespace(since=0, is_barred=False))
    beat, claims = SimpleNamespace(pause=pause), SimpleNamespace(publish=publish)
    with pytest.raises(asyncio.CancelledError):
        await Publishing(*cast(Any, (beat, claims, state, trials, ServerId("n1"), "x"))).run()
    assert [each.taken for each in said[1:]] == [(7, TAKEN_S), (7, 2 * TAKEN_S)]


async def test_log_gets_its_version_as_soon_as_it_is_led(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a move wait for that."""
    monkeypatch.setattr(versioning, "CHECK_S", 1e6)
    lead, leads = Lead(state_over(MemoryEngine())), False
    follows = Versioning(env, P1, lead.state, lambda: cast(Any, lead if leads else None), versions.Fixed(2, 2))
    follows.start()
    leads = True
    follows.wake()

    async def is_logged() -> bool:
        return lead.logged == [LogVersion(2, "0.2.0")]

    await wait_until(is_logged, what="the record is logged")
