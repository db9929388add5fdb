"""Transactions that only read, as the asking server carries them out: what they return is the state at one moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kvstore.errors import ConditionFailed, Conflict, InvalidRequest, OutcomeUnknown, StoreError, Unavailable
from kvstore.partition.state.commands import Check, Flag, Get, Meta, Op, Put, Record, Sink, Transact
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.routing import read_transaction
from kvstore.server.routing.read_transaction import LOCKS_MAX, only_reads_several, transact_read_only
from kvstore.types import PartitionId, ServerId
from tests.ring.rings import new_ring

PARTITIONS = [PartitionId(f"p{number}") for number in range(1, 19)]


class Moments:
    """A backend that carries out each operation at a separate moment, in any order, and lets others write in
    between."""

    def __init__(self, rng: Random, partitions: int = 3) -> None:
        self.topology = ClusterTopology(new_ring(PARTITIONS[:partitions], {ServerId("n1"): ""}, 1))
        self._rng = rng
        self.data: dict[bytes, Record] = {}
        self.sequence = 0
        self.history: list[dict[bytes, Record]] = [{}]
        """The state after each write of the others, from the moment on at which the reads begin."""
        self.is_in_order = False
        self._waiting: list[tuple[Op, Sink, int]] = []
        self.submitted: list[Op] = []
        self.others: Callable[[], None] = lambda: None
        """Called before each operation: what others write meanwhile."""
        self.fails: Callable[[Op], StoreError | None] = lambda op: None

    def key_of(self, partition: str, number: int = 0) -> bytes:
        owned = [key for n in range(400) if self.topology.ring.partition_of(key := b"k%d" % n) == partition]
        return owned[number]

    def put(self, key: bytes, value: bytes) -> None:
        self.write({key: value})

    def write(self, values: dict[bytes, bytes | None]) -> None:
        """Write and delete keys at one moment."""
        for key, value in values.items():
            self.sequence += 1
            if value is None:
                self.data.pop(key, None)
            else:
                self.data[key] = Record(value, self.sequence, self.sequence, 1, 0)
        self.history.append(dict(self.data))

    def progress(self, partition: PartitionId) -> tuple[int, int]:
        return self.sequence, 1

    def submit_uncharged(self, op: Op, sink: Sink, token: int, ring_version: int = 0) -> None:
        self.submitted.append(op)
        self._waiting.append((op, sink, token))
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._carry_out)

    def _carry_out(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not self.is_in_order:
            self._rng.shuffle(waiting)
        for op, sink, token in waiting:
            self.others()
            sink.complete(token, self.fails(op) or self._result(op))
            sink.flush()

    def _result(self, op: Op) -> Any:
        if isinstance(op, Transact):
            return [self._result(each) for each in op.ops], [("p1", self.sequence)]
        found = self.data.get(op.key)
        return (len(found.value), *found[1:]) if isinstance(op, Meta) and found is not None else found


def reads_of(*keys: bytes) -> Transact:
    return Transact(keys[0], tuple(Get(key, 0, 0) for key in keys))


class Answer(Sink):
    """The sink of a transaction."""

    def __init__(self) -> None:
        self.given: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def complete(self, token: int, result: Any) -> None:
        self.given.set_result(result)

    def flush(self) -> None:
        """Do nothing."""


async def read(backend: Moments, op: Transact) -> Any:
    answer = Answer()
    transact_read_only(backend, op, answer, 0)
    result = await answer.given
    if isinstance(result, StoreError):
        raise result
    return result


# docs/protocol.md Tx11
async def test_read_transaction_returns_values_and_positions_and_logs_nothing() -> None:
    backend = Moments(Random(1))
    keys = [backend.key_of(each) for each in ("p1", "p2", "p3")]
    for key in keys[:2]:
        backend.put(key, b"of " + key)
    results, positions = await read(backend, reads_of(*keys))
    assert [each and each.value for each in results] == [b"of " + keys[0], b"of " + keys[1], None]
    assert [each for each, _ in positions] == ["p1", "p2", "p3"]
    changes = [each for op in backend.submitted for each in (op.ops or (op,)) if not isinstance(each, Get | Meta)]
    assert changes == []


# docs/protocol.md Tx11
async def test_read_transaction_begins_again_when_a_key_has_changed() -> None:
    backend = Moments(Random(2))
    a, b = backend.key_of("p1"), backend.key_of("p2")
    backend.write({a: b"1", b: b"1"})
    left = iter([False, False, True, False, False, False, False, False, False])
    backend.others = lambda: backend.write({a: b"2", b: b"2"}) if next(left) else None
    results, _ = await read(backend, reads_of(a, b))
    assert [each.value for each in results] == [b"2", b"2"]
    assert len(backend.submitted) == 8


# docs/protocol.md Tx11
async def test_write_at_any_moment_is_shown_at_all_keys_or_at_none() -> None:
    for moment in range(8):
        backend = Moments(Random(9))
        backend.is_in_order = True
        a, b = backend.key_of("p1"), backend.key_of("p2")
        backend.write({a: b"1", b: b"1"})
        moments = iter(range(100))
        backend.others = lambda: backend.write({a: b"2", b: b"2"}) if next(moments) == moment else None  # noqa: B023
        results, _ = await read(backend, reads_of(a, b))
        assert [each.value for each in results] in ([b"1", b"1"], [b"2", b"2"])


# docs/protocol.md Tx11
async def test_read_transaction_locks_its_keys_when_they_keep_changing() -> None:
    """Its home is the last partition, which may wait for its keys while all others are locked."""
    backend = Moments(Random(3))
    a, b, c = (backend.key_of(each) for each in ("p1", "p2", "p3"))
    backend.write({a: b"1", b: b"1"})
    backend.others = lambda: backend.write({a: b"2", b: b"2"})
    results, _ = await read(backend, reads_of(b, a, c))
    assert results == [backend.data[b], backend.data[a], None]
    assert backend.submitted[-1] == reads_of(c, b, a)
    with pytest.raises(ConditionFailed):
        await read(backend, Transact(a, (Get(a, 0, 0), Check(b, int(Flag.IF_ABSENT), 0))))


# docs/protocol.md Tx11
async def test_read_transaction_fails_when_others_hold_its_keys_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_transaction, "LOCK_AGAIN_S", 0.0)
    for held in (0, LOCKS_MAX - 1, LOCKS_MAX):
        backend = Moments(Random(3))
        a, b = backend.key_of("p1"), backend.key_of("p2")
        backend.write({a: b"1", b: b"1"})
        backend.others = lambda: backend.write({a: b"2", b: b"2"})  # noqa: B023
        conflicts = iter([Conflict("held")] * held)
        backend.fails = lambda op: next(conflicts, None) if isinstance(op, Transact) else None  # noqa: B023
        if held < LOCKS_MAX:
            assert (await read(backend, reads_of(a, b)))[0] == [backend.data[a], backend.data[b]]
        else:
            with pytest.raises(Conflict, match="8 times in a row"):
                await read(backend, reads_of(a, b))


# docs/protocol.md Tx11
async def test_read_transaction_begins_again_when_others_hold_an_absent_key() -> None:
    backend = Moments(Random(3))
    a, b = backend.key_of("p1"), backend.key_of("p2")
    conflicts = iter([Conflict("held")])
    backend.fails = lambda op: next(conflicts, None) if isinstance(op, Transact) else None
    assert (await read(backend, reads_of(a, b)))[0] == [None, None]


@pytest.mark.parametrize("until", [2, 3, 4])
# docs/protocol.md Tx11
async def test_key_created_and_deleted_between_looks_is_noticed(until: int) -> None:
    """`a` is absent when it is read, but at no moment was `a` absent while `b` had its version of then."""
    backend = Moments(Random(4))
    backend.is_in_order = True
    a, b = backend.key_of("p1"), backend.key_of("p2")
    backend.put(b, b"0")
    writes: dict[int, dict[bytes, bytes | None]] = {1: {a: b"1", b: b"1"}, until: {a: None, b: b"2"}}
    moments = iter(range(100))
    backend.others = lambda: backend.write(writes.pop(now)) if (now := next(moments)) in writes else None
    results, _ = await read(backend, reads_of(a, b))
    assert tuple(each and each.value for each in results) in {(None, b"2"), (b"1", b"1")}


# docs/protocol.md Tx11
async def test_read_transactions_return_states_that_existed() -> None:
    """Others write and delete one or two of the keys at random moments. Versions are unique, so they name the state."""
    seen = set[str]()
    for seed in range(3_000):
        rng = Random(seed)
        backend = Moments(rng)
        keys = [backend.key_of(each, number) for each, number in (("p1", 0), ("p1", 1), ("p2", 0), ("p3", 0))]
        backend.write({key: b"0" for key in keys if rng.random() < 0.5})
        backend.history = [dict(backend.data)]
        rate = rng.choice((0.05, 0.2))

        def others(backend: Moments = backend, keys: list[bytes] = keys, rng: Random = rng, rate: float = rate) -> None:
            if rng.random() < rate:
                backend.write(
                    {key: b"1" if rng.random() < 0.5 else None for key in rng.sample(keys, rng.choice((1, 2)))}
                )

        backend.others = others
        results, _ = await read(backend, reads_of(*keys))
        seen |= {"locked"} if len(getattr(backend.submitted[-1], "ops", ())) == len(keys) else {"in two passes"}
        found = [each and each.version for each in results]
        states = [[(key in state and state[key].version) or None for key in keys] for state in backend.history]
        assert found in states, f"seed {seed}: found {found}, but the states were {states}"
        seen |= {"absent"} if None in found else {"present"}
        seen |= {"changed"} if len(states) > 1 else {"still"}
    assert seen == {"locked", "in two passes", "absent", "present", "changed", "still"}


# docs/protocol.md Tx11
async def test_one_of_two_keys_is_always_found_when_each_write_moves_it() -> None:
    """An item moves between two keys of different partitions, so exactly one of them is present at each moment."""
    outcomes = set[Any]()
    for seed in range(500):
        rng = Random(seed)
        backend = Moments(rng)
        a, b = backend.key_of("p1"), backend.key_of("p2")
        backend.put(a, b"item")

        def others(backend: Moments = backend, a: bytes = a, b: bytes = b, rng: Random = rng) -> None:
            if rng.random() < 0.5:
                backend.write({a: None, b: b"item"} if a in backend.data else {b: None, a: b"item"})

        backend.others = others
        results, _ = await read(backend, reads_of(a, b))
        outcomes.add(tuple(each and each.value for each in results))
    assert outcomes == {(b"item", None), (None, b"item")}


class NotTogether(Moments):
    """Reads the operations of one transaction at different moments."""

    def _result(self, op: Op) -> Any:
        if not isinstance(op, Transact):
            return super()._result(op)
        results = []
        for each in op.ops:
            self.others()
            results.append(self._result(each))
        return results, [("p1", self.sequence)]


def _trust_absence(self: Any, found: dict[bytes, Any]) -> None:
    self._answer(dict.fromkeys(found)) if len(found) == len(self._keys) else self._read_values()


BREAKAGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "versions are not compared": lambda patch: patch.setattr(read_transaction, "_version_of", lambda found: 0),
    "absent keys are not looked at": lambda patch: patch.setattr(
        read_transaction._ReadTransaction, "_take_absent", _trust_absence
    ),
    "absent keys are looked at one by one": lambda patch: patch.setitem(globals(), "Moments", NotTogether),
}


@pytest.mark.parametrize("name", BREAKAGES)
async def test_broken_read_transaction_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BREAKAGES[name](monkeypatch)
    noticed = 0
    for test in (
        test_read_transactions_return_states_that_existed,
        test_one_of_two_keys_is_always_found_when_each_write_moves_it,
    ):
        try:
            await test()
        except AssertionError:
            noticed += 1
    assert noticed


async def test_conditions_of_a_read_transaction_are_checked() -> None:
    backend = Moments(Random(5))
    a, b = backend.key_of("p1"), backend.key_of("p2")
    backend.put(a, b"1")
    met = Transact(
        a, (Check(a, int(Flag.IF_VERSION), 1), Check(b, int(Flag.IF_ABSENT), 0), Meta(a, 0, 0), Get(a, 0, 0))
    )
    results, _ = await read(backend, met)
    assert results == [1, 0, (1, 1, 1, 1, 0), Record(b"1", 1, 1, 1, 0)]
    unmet = Transact(a, (Get(b, 0, 0), Check(a, int(Flag.IF_VERSION), 7)))
    with pytest.raises(ConditionFailed) as caught:
        await read(backend, unmet)
    assert (caught.value.version, caught.value.key) == (1, a)


async def test_failed_read_ends_the_transaction_and_is_never_unknown() -> None:
    backend = Moments(Random(6))
    a, b = backend.key_of("p1"), backend.key_of("p2")
    for failure, expected in ((OutcomeUnknown("lost"), Unavailable), (Unavailable("no leader"), Unavailable)):
        backend.fails = lambda op, failure=failure: failure if isinstance(op, Transact) else None  # type: ignore[misc]
        with pytest.raises(expected):
            await read(backend, reads_of(a, b))


async def test_values_of_a_read_transaction_are_bounded_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_transaction, "BATCH_RESULT_BYTES_MAX", 10)
    backend = Moments(Random(7))
    a, b = backend.key_of("p1"), backend.key_of("p2")
    backend.write({a: bytes(6), b: bytes(6)})
    with pytest.raises(InvalidRequest, match="at most 10 bytes, got at least 12"):
        await read(backend, reads_of(a, b))
    assert not any(isinstance(each, Get) for each in backend.submitted)


def test_only_reads_of_several_partitions_are_carried_out_here() -> None:
    backend = Moments(Random(8))
    a, b, partition_of = backend.key_of("p1"), backend.key_of("p2"), backend.topology.ring.partition_of
    assert only_reads_several(reads_of(a, b), partition_of)
    assert not only_reads_several(reads_of(a, backend.key_of("p1", 1)), partition_of)
    assert not only_reads_several(Transact(b, (Get(a, 0, 0), Put(b, b"", 0, 0, 0, None))), partition_of)
