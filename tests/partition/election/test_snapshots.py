"""A replica installs another's whole state."""

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from kvstore.env.clock import SystemClock, Unjudged
from kvstore.errors import InvalidRequest, Overloaded, Unavailable
from kvstore.partition.election import snapshots
from kvstore.partition.election.ranking import Published
from kvstore.partition.election.snapshots import EXPORTS_MAX, IDLE_S, Exports, best_sources, install
from kvstore.partition.state.engine_rocks import RocksEngine
from kvstore.partition.state.rows import ALL_DATA
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.transfer import StateImport
from kvstore.types import PartitionId, Seq, ServerId
from tests.partition.effects import P1, Writer, all_records, check_indexes, state_over
from tests.partition.state.engine_memory import MemoryCursor, MemoryEngine
from tests.waiting import wait_until

A, B, C = ServerId("a"), ServerId("b"), ServerId("c")


def published(seq: int) -> Published:
    return Published(Seq(seq), Seq(0), 1, "x")


class StillClock(Unjudged):
    """A clock that stops unless the test sets it."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def wall_ms(self) -> int:
        return 0


def test_furthest_replica_is_asked_first_and_leader_last() -> None:
    known = {A: published(9), B: published(5), C: published(7)}
    assert best_sources(ServerId("me"), A, known, (A, B, C, ServerId("me"))) == [C, B, A]


# docs/protocol.md V4
def test_stopped_replica_is_asked_last() -> None:
    """The log may not reach back to its state. With the leader's state, which is asked for after others, it does."""
    known = {A: published(9), B: replace(published(20), is_stopped=True)}
    assert best_sources(C, A, known, (A, B, C)) == [A, B]


def test_absent_or_empty_replica_is_not_asked() -> None:
    assert best_sources(A, None, {B: published(0)}, (A, B, C)) == []


class OneReplica:
    """Peers with a single replica that answers from its exports."""

    def __init__(self, exports: Exports) -> None:
        self.exports = exports
        self.chunks = 0
        self.break_at: int | None = None

    async def call(self, server: ServerId, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        if method == snapshots.BEGIN:
            return self.exports.begin()
        self.chunks += 1
        if self.chunks == self.break_at:
            raise Unavailable("the exporter is gone")
        return self.exports.next(body.decode())

    def serve(self, partition: PartitionId, handler: object) -> None:
        raise AssertionError("not here")

    def forget(self, partition: PartitionId) -> None:
        raise AssertionError("not here")


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Writer:
    monkeypatch.setattr(snapshots, "CHUNK_BYTES", 64)
    return Writer(seed=1)


@pytest.fixture
def source(writer: Writer) -> ReplicaState:
    state = empty()
    state.apply(writer.put(**{f"k{i}": f"v{i}" for i in range(50)}))
    return state


def empty() -> ReplicaState:
    return state_over(MemoryEngine())


def with_something_old() -> ReplicaState:
    state = empty()
    state.apply(Writer(seed=2).put(old="gone"))
    return state


async def test_installed_state_equals_exporters_state(source: ReplicaState) -> None:
    target = with_something_old()
    await install(OneReplica(Exports(source, StillClock())), P1, A, target)
    assert (target.position, target.seq, target.crc) == (source.position, source.seq, source.crc)
    assert target.fingerprint() == source.fingerprint()
    assert target.get(b"old") is None
    came = target.installed_bytes
    assert came > sum(len(key) + len(row) for key, row in source.engine.iterate(*ALL_DATA))
    await install(OneReplica(Exports(source, StillClock())), P1, A, target)
    assert target.installed_bytes == came, "bytes of an earlier attempt do not count"


# docs/protocol.md G26
async def test_state_of_a_replica_that_has_applied_less_is_not_installed(source: ReplicaState) -> None:
    behind = with_something_old()
    before = source.position, source.seq, source.fingerprint()
    with pytest.raises(Unavailable, match="has applied up to sequence 1, and this replica up to 50"):
        await install(OneReplica(Exports(behind, StillClock())), P1, A, source)
    assert (source.position, source.seq, source.fingerprint()) == before


# docs/protocol.md A14
async def test_state_before_an_entry_that_is_lost_is_not_installed(source: ReplicaState) -> None:
    with pytest.raises(Unavailable, match="has applied up to sequence 50"):
        await install(OneReplica(Exports(source, StillClock())), P1, A, empty(), Seq(51))


async def test_export_that_the_engine_cannot_read_is_closed_at_once(
    source: ReplicaState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would hold space, and its next chunk would lack the rows at which it failed."""

    def fail(*_: object) -> None:
        raise OSError(5, "the disk is broken")

    exports = Exports(source, StillClock())
    numbers = [orjson.loads(exports.begin())["export"] for _ in range(EXPORTS_MAX)]
    exports.next(numbers[0])
    with monkeypatch.context() as patch:
        patch.setattr(MemoryCursor, "take", fail)
        for number in numbers:
            with pytest.raises(OSError, match="the disk is broken"):
                all(exports.next(number) for _ in range(100))
    for number in numbers:
        with pytest.raises(InvalidRequest, match="expected an open export"):
            exports.next(number)
    await install(OneReplica(exports), P1, A, target := empty())
    assert target.fingerprint() == source.fingerprint()
    exports.close()


async def test_export_shows_no_later_writes(writer: Writer, source: ReplicaState) -> None:
    exports = Exports(source, StillClock())
    before = source.seq
    number = orjson.loads(exports.begin())["export"]
    source.apply(writer.put(later="x"))
    early = empty()
    incoming = StateImport(early, frozenset({A}))
    while not incoming.add(exports.next(number)):
        continue
    assert early.seq == before
    assert early.get(b"later") is None


async def test_exports_end_when_their_state_is_replaced(source: ReplicaState, tmp_path: Path) -> None:
    """Exports hold the engine's files, which are removed with the state."""
    replaced = state_over(RocksEngine(str(tmp_path)))
    replaced.apply(Writer(seed=2).put(old="gone"))
    exports = Exports(replaced, StillClock())
    number = orjson.loads(exports.begin())["export"]
    await install(OneReplica(Exports(source, StillClock())), P1, A, replaced)
    assert replaced.fingerprint() == source.fingerprint()
    with pytest.raises(InvalidRequest, match="begin again"):
        exports.next(number)
    replaced.engine.close()


# docs/protocol.md P5
async def test_export_ends_when_its_state_is_in_doubt(source: ReplicaState) -> None:
    """Otherwise a damaged copy and the copy made from it would be two of three, and the good one outvoted."""
    exports = Exports(source, StillClock())
    number = orjson.loads(exports.begin())["export"]
    assert exports.next(number)
    source.is_suspect = True
    with pytest.raises(Unavailable, match="no state that can be trusted"):
        exports.next(number)
    with pytest.raises(InvalidRequest, match="expected an open export"):
        exports.next(number)


async def test_interrupted_install_leaves_an_empty_state(source: ReplicaState) -> None:
    peers = OneReplica(Exports(source, StillClock()))
    peers.break_at = 3
    target = with_something_old()
    with pytest.raises(Unavailable):
        await install(peers, P1, A, target)
    target.load()
    assert (target.position, target.seq, target.get(b"k1")) == (None, 0, None)


async def test_log_read_from_its_start_meets_no_rows_of_interrupted_install(writer: Writer) -> None:
    """The log may begin where it always did: the replica wanted another's state because of a lost entry behind that."""
    source, target = empty(), with_something_old()
    for number in range(50):
        source.apply(writer.put(**{f"k{number}": "v"}))
    peers = OneReplica(Exports(source, StillClock()))
    peers.break_at = 3
    with pytest.raises(Unavailable):
        await install(peers, P1, A, target)
    target.apply(writer.log[0])
    assert all_records(target) == writer.models[1]
    check_indexes(target)


async def test_export_is_closed_with_its_last_chunk(source: ReplicaState) -> None:
    """It holds the engine's space, and the installing replica requests nothing after the last chunk."""
    exports = Exports(source, StillClock())
    for served in (1, 2, 3):
        await install(OneReplica(exports), P1, A, empty())
        assert (exports.served, len(exports._open)) == (served, 0)


async def test_idle_export_is_closed_without_another_request(
    source: ReplicaState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "IDLE_S", 0.01)
    exports = Exports(source, SystemClock())
    exports.begin()

    async def is_closed() -> bool:
        return not exports._open

    await wait_until(is_closed)


async def test_exports_are_bounded_and_idle_ones_are_replaced(source: ReplicaState) -> None:
    clock = StillClock()
    exports = Exports(source, clock)
    exports.begin()
    exports.begin()
    with pytest.raises(Overloaded):
        exports.begin()
    clock.at = IDLE_S + 1
    exports.begin()
    with pytest.raises(InvalidRequest, match="begin again"):
        exports.next("1")
    exports.close()


def test_empty_replica_has_nothing_to_export() -> None:
    with pytest.raises(Unavailable):
        Exports(empty(), StillClock()).begin()
