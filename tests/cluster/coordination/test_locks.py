"""Sessions, locks, elections and groups on a real cluster, in both clients (docs/protocol.md, Q1 to Q5)."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path

import grpc
import pytest

from kvstore.client import AsyncClient, Batch, Client
from kvstore.client.coordination import (
    AsyncBarrier,
    AsyncElection,
    AsyncGroup,
    AsyncLock,
    AsyncQueue,
    AsyncRendezvous,
    AsyncSession,
    Barrier,
    Election,
    Group,
    Lock,
    NameTaken,
    NotInTime,
    Queue,
    Rendezvous,
    Session,
    SessionEnded,
    SessionFull,
)
from kvstore.client.coordination.steps import WriteStep
from kvstore.errors import ConditionFailed, InvalidRequest
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc.channels import open_channel
from kvstore.rpc.status import from_rpc_error
from loadtest.drills.contest import Contest, overlaps
from tests.cluster.harness import Cluster, running_cluster
from tests.pages import blocks
from tests.source import ROOT
from tests.waiting import PATIENCE_S, wait_until, wait_until_blocking

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SHORT_TTL_S, SHORT_GRACE_S = 1.0, 0.5
LONG_TTL_S = 4 * PATIENCE_S
"""TTL of sessions that a test ends explicitly. They must not expire while a test waits."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("coordination")) as started:
        yield started


async def test_coordination_on_asyncio(cluster: Cluster) -> None:
    async with AsyncClient(cluster.url) as client:
        sessions = [AsyncSession(client, b"a", ttl_s=LONG_TTL_S) for _ in range(2)]
        async with sessions[0] as first, sessions[1] as second:
            await _a_lock_changes_hands(first, second)
            await _readers_share(first, second)
            await _a_leader_is_followed(first, second)
            await _members_come_and_go(client, first, second)
            await _a_name_is_one_sessions(client, first, second)
            await _keys_keep_the_order_in_which_they_came(client, first, second)

        async def is_empty() -> bool:  # the answer to a close may be late
            return not [key async for key in client.keys(prefix=b"{a}") if not key.startswith(b"{a}/turn/")]

        await wait_until(is_empty, what="sessions that were closed leave nothing but who has released last")
        await _what_is_not_renewed_goes(client)
        await _parties_meet(client)
        await _items_are_handed_out_to_one_at_a_time(client)


async def _a_lock_changes_hands(first: AsyncSession, second: AsyncSession) -> None:
    mine, other = AsyncLock(first, b"l"), AsyncLock(second, b"l")
    token = await mine.acquire()
    assert mine.is_held
    with pytest.raises(InvalidRequest, match="one instance for each caller that waits"):
        await mine.acquire()
    with pytest.raises(NotInTime):
        await other.acquire(timeout_s=0.3)
    waiting = asyncio.create_task(other.acquire(timeout_s=PATIENCE_S))
    cancelled = asyncio.create_task(AsyncLock(second, b"l").acquire())
    await _in_line(first, b"{a}/lock/l/", 3)
    cancelled.cancel()
    await _in_line(first, b"{a}/lock/l/", 2)
    assert await mine.release()
    assert await waiting > token, "tokens rise"
    assert other.is_held
    assert not mine.is_held
    assert not await mine.release()
    assert await other.release()


async def _in_line(session: AsyncSession, prefix: bytes, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S), session._client.watch(prefix=prefix) as changes:
        while len([key async for key, _ in session._client.scan(prefix=prefix)]) != count:
            await anext(changes)


async def _readers_share(first: AsyncSession, second: AsyncSession) -> None:
    readers = [AsyncLock(each, b"rw", shared=True) for each in (first, second)]
    writer = AsyncLock(first, b"rw")
    for reader in readers:
        await reader.acquire(timeout_s=PATIENCE_S)
    with pytest.raises(NotInTime):
        await writer.acquire(timeout_s=0.2)
    for reader in readers:
        assert await reader.release()
    async with writer:
        with pytest.raises(NotInTime):
            await readers[0].acquire(timeout_s=0.2)


async def _a_leader_is_followed(first: AsyncSession, second: AsyncSession) -> None:
    a, b = AsyncElection(first, b"e", b"A"), AsyncElection(second, b"e", b"B")
    assert await b.leader() is None
    token = await a.acquire()
    assert await b.leader() == (b"A", token)
    with pytest.raises(NotInTime):
        await b.next_leader(token, timeout_s=0.1)
    next_one = asyncio.create_task(AsyncElection(first, b"e").next_leader(token, timeout_s=PATIENCE_S))
    elected = asyncio.create_task(b.acquire(timeout_s=PATIENCE_S))
    await _in_line(first, b"{a}/leader/e/", 2)
    await a.release()
    assert await next_one == (b"B", await elected)
    await b.release()


async def _members_come_and_go(client: AsyncClient, first: AsyncSession, second: AsyncSession) -> None:
    group, other = AsyncGroup(first, b"g"), AsyncGroup(second, b"g")
    await group.join(b"1")
    assert await other.members() == {first.lease.id: b"1"}
    coming = asyncio.create_task(group.changed({first.lease.id: b"1"}, timeout_s=PATIENCE_S))
    await other.join(b"2")
    both = await coming
    assert sorted(both.values()) == [b"1", b"2"]
    await other.leave()
    assert await group.changed(both, timeout_s=PATIENCE_S) == {first.lease.id: b"1"}


async def _a_name_is_one_sessions(client: AsyncClient, first: AsyncSession, second: AsyncSession) -> None:
    await first.put(b"worker", b"1")
    await first.put(b"worker", b"2")
    with pytest.raises(NameTaken, match="worker"):
        await second.put(b"worker", b"mine")
    with pytest.raises(NotInTime):
        await second.put(b"worker", b"mine", waits=True, timeout_s=0.2)
    await second.delete(b"worker")
    waiting = asyncio.create_task(second.put(b"worker", b"mine", waits=True, timeout_s=PATIENCE_S))
    key = b"{a}/worker"
    found, of_session = await client.batch(Batch().get(key).get(first.lease.key))
    assert found.value == b"2", "it is the first one's"
    assert found.expires_ms == of_session.expires_ms, "they go together"
    await first.delete(b"worker")
    await waiting
    with pytest.raises(SessionFull, match="got"):
        await first.put(b"large", bytes(1 << 20))
    await second.delete(b"worker")
    assert await client.get(key) is None


async def _keys_keep_the_order_in_which_they_came(client: AsyncClient, *sessions: AsyncSession) -> None:
    """Keys keep their order of arrival whatever their names and sessions are, also after renewals."""
    versions = [await sessions[number % 2].put(b"came-%d" % (9 - number), b"") for number in range(6)]
    assert versions == sorted(set(versions))
    for session in sessions:
        await session._write(WriteStep(renews=True), inf)
    found = {item.created: (key, item.version) async for key, item in client.scan(prefix=b"{a}/came-")}
    assert [found[each][0] for each in sorted(found)] == [b"{a}/came-%d" % (9 - number) for number in range(6)]
    assert sorted(found) == versions
    assert all(version > created for created, (_, version) in found.items()), "they have been renewed"


async def _what_is_not_renewed_goes(client: AsyncClient) -> None:
    """The session is not renewed, as after SIGKILL: the waiter gets the lock, and the session learns later that it
    has ended."""
    dead = await AsyncSession(client, b"a").open()
    lock = AsyncLock(dead, b"l")
    token = await lock.acquire()
    dead._is_closing = True  # nobody says to it that it is over, when nobody renews it any more
    await dead._env.nursery.close()
    dead.lease.ttl_s, dead.lease.grace_s = SHORT_TTL_S, SHORT_GRACE_S
    await dead._write(WriteStep(renews=True), inf)
    async with AsyncSession(client, b"a") as session:
        assert await AsyncLock(session, b"l").acquire(timeout_s=PATIENCE_S) > token
        assert not lock.is_held, "its owner had stopped to count on it"
        assert not dead.lost.is_set()
        dead.lease.deadline += 2 * PATIENCE_S  # as if the owner's clock had stopped
        with pytest.raises(SessionEnded):
            await dead.put(b"late", b"")
        assert await client.get(b"{a}/late") is None
        assert dead.lost.is_set()


async def _parties_meet(client: AsyncClient) -> None:
    async with AsyncSession(client, b"m") as first, AsyncSession(client, b"m") as second:
        place = AsyncRendezvous(first, b"r")
        with pytest.raises(NotInTime):
            await place.meet(timeout_s=0.1)
        meeting = asyncio.create_task(place.meet(timeout_s=PATIENCE_S))
        await AsyncRendezvous(second, b"r").publish(b"here")
        assert await meeting == b"here"
        with pytest.raises(NotInTime):
            await AsyncBarrier(first, b"b", 2, party=b"1").wait(timeout_s=0.2)
        waiting = asyncio.create_task(AsyncBarrier(first, b"b", 2, party=b"1").wait(timeout_s=PATIENCE_S))
        await AsyncBarrier(second, b"b", 2, party=b"2").wait(timeout_s=PATIENCE_S)
        await second.close()
        await waiting  # though one of the two is gone
        async with AsyncSession(client, b"m") as late:
            await AsyncBarrier(late, b"b", 2, party=b"1").wait(timeout_s=PATIENCE_S)


async def _items_are_handed_out_to_one_at_a_time(client: AsyncClient) -> None:
    async with AsyncSession(client, b"q") as first, AsyncSession(client, b"q") as second:
        queue, other = AsyncQueue(first, b"q"), AsyncQueue(second, b"q")
        for value in (b"1", b"2", b"3"):
            await queue.put(value)
        one, two = await queue.take(), await other.take()
        assert (one.value, two.value) == (b"1", b"2")
        await queue.give_back(one)
        again = await other.take()
        assert again.value == b"1"
        assert again.token > one.token
        assert (one.times, again.times) == (1, 2)
        with pytest.raises(SessionEnded):
            await queue.done(one)
        await other.done(again)
        three = await queue.take()
        assert three.value == b"3"
        with pytest.raises(NotInTime):
            await queue.take(timeout_s=0.2)
        taking = asyncio.create_task(queue.take(timeout_s=PATIENCE_S))
        await second.close()  # with an item that was not done
        assert (await taking).value == b"2"
        many = [b"%d" % number for number in range(20)]
        for value in many:
            await queue.put(value)
        taken = await asyncio.gather(*(queue.take(timeout_s=PATIENCE_S) for _ in many))
        assert sorted(each.value for each in taken) == sorted(many), "each to one"


def test_documented_program_runs(cluster: Cluster) -> None:
    page = blocks("docs/how-to/coordinate-processes.md")
    program = next(each.code for each in page if each.language == "python")
    assert "kv://127.0.0.1:7401" in program
    program = program.replace("kv://127.0.0.1:7401", cluster.url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"with the token \d+\nleads until", done.stdout)


def test_coordination_in_threads(cluster: Cluster) -> None:
    with (
        Client(cluster.url) as client,
        Session(client, b"b", ttl_s=LONG_TTL_S) as first,
        Session(client, b"b") as second,
    ):
        mine, other = Lock(first, b"l"), Lock(second, b"l")
        token = mine.acquire()
        with pytest.raises(NotInTime):
            other.acquire(timeout_s=0.3)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(other.acquire, timeout_s=PATIENCE_S)
            assert mine.release()
            assert waiting.result() > token
        assert other.is_held
        first.put(b"mine", b"1")
        election, group = Election(first, b"e", b"A"), Group(second, b"g")
        assert election.leader() is None
        with election as token:
            assert election.next_leader(timeout_s=PATIENCE_S) == (b"A", token)
        group.join(b"2")
        assert group.changed({}, timeout_s=PATIENCE_S) == group.members() == {second.lease.id: b"2"}
        group.leave()
        queue, place = Queue(first, b"q"), Rendezvous(first, b"r")
        queue.put(b"item")
        taken = queue.take(timeout_s=PATIENCE_S)
        assert taken.value == b"item"
        queue.done(taken)
        place.publish(b"here")
        assert place.meet(timeout_s=PATIENCE_S) == b"here"
        Barrier(first, b"b", 1, party=b"1").wait(timeout_s=PATIENCE_S)
        first.close()
        assert first.lost.is_set()
        wait_until_blocking(lambda: client.get(b"{b}/mine") is None, what="it is gone, at once and not by its life")
        with pytest.raises(SessionEnded):
            mine.acquire()


def test_program_without_our_client_waits_in_the_same_queue(cluster: Cluster) -> None:
    """The program does what docs/how-to/coordinate-in-other-languages.md describes."""
    life = kv_pb2.Options(expires_ms=120_000, flags=kv_pb2.RELATIVE_TTL)
    session, prefix = b"{b}/session/x", b"{b}/lock/other/"
    place = prefix + b"x-000000000001"
    renewal = [
        kv_pb2.Operation(code=kv_pb2.CHECK, key=session, options=kv_pb2.Options(flags=kv_pb2.IF_PRESENT)),
        kv_pb2.Operation(code=kv_pb2.EXPIRE, key=session, options=life),
    ]
    stand_in_line = kv_pb2.Operation(code=kv_pb2.PUT, key=place, value=b"w", options=life)
    with (
        open_channel(cluster.file.nodes[0].grpc, None) as channel,
        Client(cluster.url) as client,
        Session(client, b"b") as ours,
    ):
        stub = kv_pb2_grpc.KVStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Batch(kv_pb2.BatchRequest(operations=[*renewal, stand_in_line]))
        assert isinstance(from_rpc_error(refused.value), ConditionFailed), "there is no session yet"
        flags = kv_pb2.IF_ABSENT | kv_pb2.RELATIVE_TTL
        stub.Put(kv_pb2.PutRequest(key=session, expires_ms=120_000, flags=flags))
        lock = Lock(ours, b"other")
        mine = lock.acquire()
        stub.Batch(kv_pb2.BatchRequest(operations=[*renewal, stand_in_line]))
        assert _created(stub, prefix).popitem() == (mine, lock._place.key if lock._place else b"")
        lock.release()
        line = _created(stub, prefix)
        assert list(line.values()) == [place]
        assert next(iter(line)) > mine, "the token"
        with pytest.raises(NotInTime):
            lock.acquire(timeout_s=0.2)
        stub.Delete(kv_pb2.DeleteRequest(key=place))
        assert lock.acquire(timeout_s=PATIENCE_S) > next(iter(line))


def _created(stub: kv_pb2_grpc.KVStub, prefix: bytes) -> dict[int, bytes]:
    """Return the keys of the queue by version of creation."""
    request = kv_pb2.ScanRequest(start=prefix, end=prefix[:-1] + b"0")
    found = {
        record.created: key for page in stub.Scan(request) for key, record in zip(page.keys, page.records, strict=True)
    }
    return dict(sorted(found.items(), reverse=True))


def test_lock_has_one_holder_while_clients_and_leaders_are_killed(cluster: Cluster, tmp_path: Path) -> None:
    """`python -m loadtest.lock_drill` repeats this ten thousand times."""
    with Contest(cluster, tmp_path, locks=2, holders=2, seed=7) as contest:
        contest.run(300, strikes_every_s=1.0)
    assert contest.held_twice() == []


def test_overlapping_lock_holders_are_detected() -> None:
    assert overlaps({1: (0.0, 1.0), 2: (1.5, 2.0)}) == []
    assert len(overlaps({1: (0.0, 1.0), 2: (0.9, 2.0)})) == 1
    assert len(overlaps({1: (0.0, 5.0), 2: (1.5, 2.0), 3: (2.5, 2.6)})) == 2
