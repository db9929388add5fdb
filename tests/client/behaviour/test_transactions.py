"""Transactions of both clients, over several partitions of a cluster in memory and of real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import pytest

from kvstore.client import Item, Level
from kvstore.client.core.config import parse_url
from kvstore.errors import ConditionFailed, Conflict, InvalidRequest, NotLeader, OutcomeUnknown, StoreError
from kvstore.partition.state.commands import Code, Op
from tests.client.faces import FACES, AsyncFace, Face
from tests.client.model import ModelCluster
from tests.client.serving import serving

Steps = Callable[[Any], Generator[Any, Any, Any]]
"""A transaction's work, written once for both clients: it yields each call that has to be awaited."""


def awaited(steps: Steps) -> Callable[[Any], Any]:
    async def work(txn: Any) -> Any:
        running, value = steps(txn), None
        try:
            while True:
                value = await running.send(value)
        except StopIteration as end:
            return end.value

    return work


def blocked(steps: Steps) -> Callable[[Any], Any]:
    def work(txn: Any) -> Any:
        running, value = steps(txn), None
        try:
            while True:
                value = running.send(value)
        except StopIteration as end:
            return end.value

    return work


async def transact(face: Face, steps: Steps, **options: Any) -> Any:
    return await face.call("transact", (awaited if isinstance(face, AsyncFace) else blocked)(steps), **options)


async def in_block(face: Face, steps: Steps) -> Any:
    """Run the steps in the block of a context manager."""
    if isinstance(face, AsyncFace):
        async with face.client.transaction() as txn:
            return await awaited(steps)(txn)

    def work() -> Any:
        with face.client.transaction() as txn:
            return blocked(steps)(txn)

    return await asyncio.to_thread(work)


class World:
    """A cluster in memory, and a client."""

    def __init__(self, cluster: ModelCluster, face: Face) -> None:
        self.cluster, self.face = cluster, face
        self.keys = [cluster.key_of(each) for each in sorted(cluster.partitions)]

    def write(self, key: bytes, value: bytes | None) -> None:
        """Write as another client does, at this moment."""
        partition = self.cluster.partitions[self.cluster.ring.partition_of(key)]
        partition._write(key, value) if value is not None else partition._delete(key, 0, 0)

    def value(self, key: bytes) -> bytes | None:
        found = self.cluster.partitions[self.cluster.ring.partition_of(key)].data.get(key)
        return None if found is None else found.value

    def requests(self) -> list[Op]:
        """Return the transactions that were submitted."""
        return [op for server in self.cluster.servers for op in server.seen if op.code == Code.TRANSACT]

    def intercept(self, answer: Callable[[Op, Callable[[Any], None]], bool]) -> None:
        for server in self.cluster.servers:
            server.intercept = lambda op, tell: op.code == Code.TRANSACT and answer(op, tell)


@pytest.fixture(params=[(face, has_streams) for face in FACES for has_streams in (True, False)])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """The cluster with each client, and with and without Redis ports for the clients' sessions."""
    name, has_streams = request.param
    cluster = ModelCluster()
    async with serving(cluster, has_streams=has_streams) as servers:
        face = await FACES[name](parse_url(servers.patient_url)).open()
        try:
            yield World(cluster, face)
        finally:
            await face.close()


def transfer(source: bytes, target: bytes, amount: int) -> Steps:
    def steps(txn: Any) -> Generator[Any, Any, int]:
        a, b = (yield txn.get(source)), (yield txn.get(target))
        left = int(a.value) - amount
        txn.put(source, b"%d" % left)
        txn.put(target, b"%d" % ((int(b.value) if b else 0) + amount))
        return left

    return steps


@pytest.mark.parametrize("run", [transact, in_block])
async def test_transaction_commits_over_partitions(world: World, run: Any) -> None:
    a, b, _ = world.keys
    world.write(a, b"10")
    assert await run(world.face, transfer(a, b, 3)) == 7
    assert (world.value(a), world.value(b)) == (b"7", b"3")
    (request,) = world.requests()
    assert (request.key, len(request.ops)) == (a, 4)
    assert request.request is not None


async def test_transaction_reads_its_own_writes_and_others_do_not(world: World) -> None:
    a, b, c = world.keys
    world.write(b, b"1")

    def steps(txn: Any) -> Generator[Any, Any, Any]:
        txn.put(a, b"new")
        txn.increment(b, 4)
        found = yield txn.get_many([a, b, c])
        assert world.value(a) is None
        txn.delete(a)
        return found, (yield txn.get(a))

    found, deleted = await in_block(world.face, steps)
    assert found == {a: Item(b"new", 0, 0, 0, 0), b: Item(b"5", 0, 0, 0, 0)}
    assert deleted is None
    assert (world.value(a), world.value(b)) == (None, b"5")


async def test_changed_read_is_a_conflict_and_nothing_is_written(world: World) -> None:
    a, b, _ = world.keys
    world.write(a, b"10")

    def steps(txn: Any) -> Generator[Any, Any, None]:
        yield from transfer(a, b, 3)(txn)
        world.write(a, b"20")

    with pytest.raises(Conflict, match="was changed by another client"):
        await in_block(world.face, steps)
    assert (world.value(a), world.value(b)) == (b"20", None)


async def test_function_runs_again_after_a_conflict_until_it_commits(world: World) -> None:
    a, b, _ = world.keys
    world.write(a, b"10")
    runs = list[int]()

    def steps(txn: Any) -> Generator[Any, Any, int]:
        left: int = yield from transfer(a, b, 3)(txn)
        runs.append(left)
        if len(runs) < 3:
            world.write(a, b"%d" % (10 * len(runs) + 10))
        return left

    assert await transact(world.face, steps) == 27
    assert runs == [7, 17, 27]
    assert (world.value(a), world.value(b)) == (b"27", b"3")


async def test_attempts_end_with_the_conflict(world: World) -> None:
    a, b, _ = world.keys
    world.write(a, b"10")
    runs = list[int]()

    def steps(txn: Any) -> Generator[Any, Any, None]:
        runs.append((yield from transfer(a, b, 3)(txn)))
        world.write(a, b"10")

    with pytest.raises(Conflict):
        await transact(world.face, steps, attempts=2)
    assert len(runs) == 2
    with pytest.raises(InvalidRequest, match="expected at least 1 attempt, got 0"):
        await transact(world.face, steps, attempts=0)


async def test_exception_ends_the_transaction_without_writes(world: World) -> None:
    a, b, _ = world.keys
    world.write(a, b"1")

    def steps(txn: Any) -> Generator[Any, Any, None]:
        yield from transfer(a, b, 3)(txn)
        raise ValueError("too little")

    for run in (transact, in_block):
        with pytest.raises(ValueError, match="too little"):
            await run(world.face, steps)
    assert (world.value(a), world.value(b)) == (b"1", None)


async def test_exception_from_reads_of_different_moments_is_not_raised(world: World) -> None:
    """An item moves between the reads of two keys, so that the function finds it nowhere."""
    a, b, _ = world.keys
    world.write(b, b"item")
    runs = list[Any]()

    def steps(txn: Any) -> Generator[Any, Any, bytes]:
        first = yield txn.get(a)
        if not runs:
            world.write(a, b"item")
            world.write(b, None)
        found = first or (yield txn.get(b))
        runs.append(found)
        if found is None:
            raise LookupError("the item is lost")
        return bytes(found.value)

    assert await transact(world.face, steps) == b"item"
    assert len(runs) == 2


async def test_condition_of_the_caller_is_not_a_conflict(world: World) -> None:
    a, b, c = world.keys
    world.write(c, b"taken")

    def steps(txn: Any) -> Generator[Any, Any, None]:
        yield txn.get(a)
        txn.check(c, present=False)
        txn.put(b, b"1")

    with pytest.raises(ConditionFailed) as caught:
        await transact(world.face, steps)
    assert (caught.value.key, caught.value.version) == (c, 1)
    assert world.value(b) is None


async def test_condition_that_an_own_write_excludes_fails_at_once(world: World) -> None:
    key, runs = world.keys[0], 0

    def steps(txn: Any) -> Generator[Any, Any, None]:
        nonlocal runs
        runs += 1
        yield txn.get(key)
        txn.put(key, b"1")
        txn.put(key, b"2", if_absent=True)

    with pytest.raises(ConditionFailed) as failed:
        await transact(world.face, steps)
    assert (failed.value.key, runs) == (key, 1)


async def test_reads_alone_commit_without_a_request_id(world: World) -> None:
    a, b, _ = world.keys
    world.write(a, b"1")

    def steps(txn: Any) -> Generator[Any, Any, Any]:
        return (yield txn.get(a)), (yield txn.get(b, level=Level.SESSION))

    found, absent = await in_block(world.face, steps)
    assert (found.value, absent) == (b"1", None)
    assert {op.request for op in world.requests()} == {None}

    def changed(txn: Any) -> Generator[Any, Any, None]:
        yield from steps(txn)
        world.write(b, b"2")

    with pytest.raises(Conflict):
        await in_block(world.face, changed)


async def test_single_read_is_not_checked_again(world: World) -> None:
    def steps(txn: Any) -> Generator[Any, Any, Any]:
        return (yield txn.get(world.keys[0]))

    assert await in_block(world.face, steps) is None
    assert world.requests() == []


async def test_session_has_the_positions_of_the_transaction(world: World) -> None:
    a, b, c = world.keys

    def steps(txn: Any) -> Generator[Any, Any, None]:
        for key in (a, b, c):
            txn.put(key, b"1")
            txn.put(key, b"2")
        return
        yield

    await transact(world.face, steps)
    assert {name: number for name, number in world.face.client.token.items() if name} == {"p1": 2, "p2": 2, "p3": 2}


async def test_met_transaction_is_retried_under_its_request_id(world: World) -> None:
    a, b, _ = world.keys
    world.write(a, b"10")
    left = [Conflict("another transaction holds it"), OutcomeUnknown("lost"), NotLeader("p1")]
    world.intercept(lambda op, tell: bool(left) and (tell(left.pop(0)) or True))
    assert await in_block(world.face, transfer(a, b, 3)) == 7
    assert len({op.request.sequence for op in world.requests() if op.request}) == 1
    assert len(world.requests()) == 4
    assert world.cluster.doubly_applied() == []


async def test_lost_answer_is_not_a_second_transaction(world: World) -> None:
    a, b, _ = world.keys
    world.write(a, b"10")

    def carry_out_and_lose(op: Op, tell: Callable[[Any], None]) -> bool:
        world.intercept(lambda op, tell: False)
        result = world.cluster.partitions[world.cluster.ring.partition_of(op.key)].run(op, world.cluster.transact)
        assert not isinstance(result, StoreError)
        tell(OutcomeUnknown("the answer is lost"))
        return True

    world.intercept(carry_out_and_lose)
    assert await transact(world.face, transfer(a, b, 3)) == 7
    assert (world.value(a), world.value(b)) == (b"7", b"3")


async def test_unknown_outcome_does_not_run_the_function_again(world: World) -> None:
    a, b, _ = world.keys
    world.write(a, b"10")
    world.intercept(lambda op, tell: tell(OutcomeUnknown("lost")) or True)
    runs = list[int]()

    def steps(txn: Any) -> Generator[Any, Any, None]:
        runs.append((yield from transfer(a, b, 3)(txn)))

    with pytest.raises(OutcomeUnknown):
        await transact(world.face, steps, timeout_s=0.5)
    assert runs == [7]


async def test_transaction_that_has_ended_is_refused(world: World) -> None:
    kept = list[Any]()

    def steps(txn: Any) -> Generator[Any, Any, None]:
        kept.append(txn)
        return
        yield

    await transact(world.face, steps)
    with pytest.raises(InvalidRequest, match="the transaction has ended"):
        kept[0].put(b"k", b"v")
