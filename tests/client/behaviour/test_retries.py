"""Clients when servers fail: every write is applied at most once, and its outcome is reported correctly."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from sortedcontainers import SortedDict

from kvstore.client import AsyncClient, Level
from kvstore.client.aio.engine import AsyncEngine
from kvstore.client.blocking.engine import BlockingEngine
from kvstore.client.core.config import parse_url
from kvstore.client.core.values import RING
from kvstore.errors import (
    ConditionFailed,
    InvalidRequest,
    NotCaughtUp,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    RequestExpired,
    StoreError,
    Unavailable,
)
from kvstore.partition.state.commands import Code, Op
from kvstore.ring.ring import Ring
from kvstore.types import PartitionId, ServerId
from tests.client.faces import FACES, Face
from tests.client.model import WINDOW_MS, ModelCluster, ModelServer
from tests.client.serving import Servers, serving
from tests.waiting import PATIENCE_S, wait_until

P1, P2 = PartitionId("p1"), PartitionId("p2")
N1, N2, N3 = ServerId("n1"), ServerId("n2"), ServerId("n3")


@pytest.fixture(params=["streams", "grpc"])
async def servers(request: pytest.FixtureRequest) -> AsyncIterator[Servers]:
    async with serving(ModelCluster(), has_streams=request.param == "streams") as running:
        yield running


@pytest.fixture(params=FACES.keys())
async def client(request: pytest.FixtureRequest, servers: Servers) -> AsyncIterator[Face]:
    face = await FACES[request.param](parse_url(servers.patient_url)).open()
    yield face
    await face.close()


def server_of(servers: Servers, id: ServerId) -> ModelServer:
    return next(each for each in servers.cluster.servers if each.id == id)


def fail_next(servers: Servers, count: int, error: StoreError, *, applied: bool = False) -> None:
    """Make the next `count` mutations fail with `error`, at any server."""
    left = count

    def install(server: ModelServer) -> None:
        def intercept(op: Op, answer: Any) -> bool:
            nonlocal left
            if not left or op.code in (Code.GET, Code.SCAN, Code.COUNT):
                return False
            left -= 1
            if applied:
                server._result(op, None)
            asyncio.get_running_loop().call_soon(answer, error)
            return True

        server.intercept = intercept

    for each in servers.cluster.servers:
        install(each)


@pytest.mark.parametrize("applied", [True, False])
async def test_write_whose_answer_is_lost_is_applied_once(client: Face, servers: Servers, applied: bool) -> None:
    fail_next(servers, 2, OutcomeUnknown("lost"), applied=applied)
    assert await client.call("increment", b"n") == 1
    assert (await client.call("get", b"n")).value == b"1"
    assert servers.cluster.doubly_applied() == []


@pytest.mark.parametrize("error", [Overloaded("full"), NotLeader("p1"), Unavailable("no leader")])
async def test_retryable_refusal_is_retried(client: Face, servers: Servers, error: StoreError) -> None:
    fail_next(servers, 3, error)
    assert await client.call("increment", b"n") == 1


@pytest.mark.parametrize("error", [NotCaughtUp("behind"), Unavailable("no state")])
@pytest.mark.parametrize("level", [Level.SESSION, Level.STALE])
async def test_read_that_a_replica_cannot_answer_goes_to_another(
    client: Face, servers: Servers, level: Level, error: StoreError
) -> None:
    """A replica that was started needs minutes for a long log, and refuses session and stale reads until then."""
    key = servers.cluster.key_of(P1)
    version = await client.call("put", key, b"v")
    refusing = list[ModelServer]()

    def install(server: ModelServer) -> None:
        def intercept(op: Op, answer: Any) -> bool:
            if op.level not in (Level.SESSION, Level.STALE):
                return False
            refusing.extend([] if refusing else [server])
            if server not in refusing:
                return False
            asyncio.get_running_loop().call_soon(answer, error)
            return True

        server.intercept = intercept

    for each in servers.cluster.servers:
        install(each)
    assert (await client.call("get", key, level=level)).version == version
    assert key in [found for found, _ in await client.scan(level=level)]
    assert len(refusing) == 1


async def test_condition_refused_after_an_unknown_attempt_is_unknown(client: Face, servers: Servers) -> None:
    """The first attempt may arrive late, when the condition holds."""
    await client.call("put", b"k", b"v")
    fail_next(servers, 1, OutcomeUnknown("lost"))
    with pytest.raises(OutcomeUnknown):
        await client.call("put", b"k", b"w", if_absent=True)


async def test_condition_refused_at_the_first_attempt_is_not_done(client: Face, servers: Servers) -> None:
    await client.call("put", b"k", b"v")
    fail_next(servers, 1, Overloaded("full"))
    with pytest.raises(ConditionFailed):
        await client.call("put", b"k", b"w", if_absent=True)


async def test_write_without_an_answer_is_unknown_at_its_deadline(client: Face, servers: Servers) -> None:
    await client.call("put", b"k", b"v")  # so that there is a connection: an unsent write is not unknown
    for server in servers.cluster.servers:
        server.intercept = lambda op, answer: True
    with pytest.raises(OutcomeUnknown):
        await client.call("put", b"k", b"v", timeout_s=0.3)
    with pytest.raises(Unavailable):
        await client.call("get", b"k", timeout_s=0.3)


async def test_always_refused_write_is_not_unknown(client: Face, servers: Servers) -> None:
    """Unless its last attempt is in flight at the deadline, which a busy machine can cause for a few in a row."""
    fail_next(servers, 1_000_000, Overloaded("full"))
    for _ in range(40):
        with pytest.raises((Overloaded, Unavailable, OutcomeUnknown)) as told:
            await client.call("put", b"k", b"v", timeout_s=0.5)
        if not told.errisinstance(OutcomeUnknown):
            return
    pytest.fail("all of 40 writes that were refused each time were reported as unknown")


async def test_client_that_the_store_has_forgotten_gets_another_id(client: Face, servers: Servers) -> None:
    assert await client.call("increment", b"n") == 1
    for partition in servers.cluster.partitions.values():
        partition.now_ms += 2 * WINDOW_MS
    assert await client.call("increment", b"n") == 2
    assert servers.cluster.doubly_applied() == []


async def test_expired_retry_is_unknown(client: Face, servers: Servers) -> None:
    left = [OutcomeUnknown("lost"), RequestExpired("old")]

    def intercept(op: Op, answer: Any) -> bool:
        if left and op.code == Code.PUT:
            asyncio.get_running_loop().call_soon(answer, left.pop(0))
            return True
        return False

    for server in servers.cluster.servers:
        server.intercept = intercept
    with pytest.raises(OutcomeUnknown):
        await client.call("put", b"k", b"v")


async def test_new_leader_is_asked_after_the_lead_moves(client: Face, servers: Servers) -> None:
    cluster = servers.cluster
    for server in cluster.servers:
        server.forwards = False
    key = cluster.key_of(P1)
    await client.call("put", key, b"1")
    cluster.lead(P1, N3)
    await client.call("put", key, b"2")
    assert (await client.call("get", key)).value == b"2"


async def test_killed_leader_loses_no_acknowledged_write_and_doubles_none(client: Face, servers: Servers) -> None:
    cluster = servers.cluster
    key = cluster.key_of(P1)
    done = 0

    async def write() -> None:
        nonlocal done
        for _ in range(30):
            value = await client.call("increment", key)
            done = max(done, value)

    writers = [asyncio.ensure_future(write()) for _ in range(5)]
    await wait_until(lambda: _is(done > 20), what="some writes")
    cluster.leaders[P1] = None
    await servers.kill(N1)
    cluster.lead(P1, N2)
    await asyncio.gather(*writers)
    assert int((await client.call("get", key)).value) == done == 150
    assert cluster.doubly_applied() == []


async def _is(value: bool) -> bool:
    return value


async def test_cluster_with_one_server_left_is_reached_through_it(client: Face, servers: Servers) -> None:
    await client.call("put", b"k", b"v")
    await servers.kill(N1)
    await servers.kill(N2)
    for partition in (P1, P2):
        servers.cluster.lead(partition, N3)
    assert (await client.call("get", b"k")).value == b"v"
    await client.call("put", b"k", b"w")


async def test_server_that_comes_back_is_used_again(client: Face, servers: Servers) -> None:
    key = servers.cluster.key_of(P1)
    for id in (N1, N2, N3):
        await servers.kill(id)
    with pytest.raises((Unavailable, OutcomeUnknown)):
        await client.call("put", key, b"v", timeout_s=0.3)
    for id in (N1, N2, N3):
        await servers.start(id)
    await client.call("put", key, b"w")
    server_of(servers, N1).seen.clear()

    async def asks_the_leader() -> bool:
        await client.call("put", key, b"x")
        return bool(server_of(servers, N1).seen)

    await wait_until(asks_the_leader, what="the leader is asked directly")


async def test_unreachable_cluster_is_unavailable_in_time(client: Face, servers: Servers) -> None:
    for id in (N1, N2, N3):
        await servers.kill(id)
    with pytest.raises(Unavailable):
        await client.call("get", b"k", timeout_s=0.5)


async def test_reads_carry_the_sequence_that_the_client_has_seen(client: Face, servers: Servers) -> None:
    key = servers.cluster.key_of(P2)
    version = await client.call("put", key, b"v")
    for server in servers.cluster.servers:
        server.intercept = lambda op, answer: False  # the server sees each operation: none takes the fast path
    for level in (Level.SESSION, Level.LINEARIZABLE):
        await client.call("get", key, level=level)
        seen = [
            op
            for server in servers.cluster.servers
            for op in server.seen
            if op.code == Code.GET and (op.key, op.level) == (key, level)
        ]
        assert {op.seq >= version for op in seen} == {True}  # it may be retried


async def test_reads_carry_the_sequence_of_an_absorbed_token(client: Face, servers: Servers) -> None:
    key = servers.cluster.key_of(P2)
    client.client.absorb({"p2": 7})
    client.client.absorb({"p2": 5})
    assert client.client.token["p2"] == 7
    await client.call("get", key, level=Level.SESSION)
    assert {op.seq for server in servers.cluster.servers for op in server.seen if op.code == Code.GET} == {7}


async def test_session_read_goes_to_the_leader_until_a_tokens_ring_is_known(client: Face, servers: Servers) -> None:
    """A replica with the older ring might take the token for another partition's."""
    key = servers.cluster.key_of(P2)
    levels = []
    for later in (0, 1):
        token = client.client.token
        client.client.absorb({**token, RING: token[RING] + later})
        await client.call("get", key, level=Level.SESSION)
        levels.append({op.level for server in servers.cluster.servers for op in server.seen if op.code == Code.GET})
    assert levels == [{Level.SESSION}, {Level.LINEARIZABLE, Level.SESSION}]
    assert client.client.token[RING] == token[RING] + 1, "it is handed on"


async def test_writes_carry_the_leaders_time_and_rising_sequences(client: Face, servers: Servers) -> None:
    key = servers.cluster.key_of(P1)
    for _ in range(3):
        await client.call("put", key, b"v")
    requests = [op.request for server in servers.cluster.servers for op in server.seen if op.code == Code.PUT]
    told = [(request.sequence, request.first_unacked) for request in requests]
    assert list(dict.fromkeys(told)) == [(1, 1), (2, 2), (3, 3)]  # an operation whose answer is slow is retried
    assert len({request.client for request in requests}) == 1
    assert all(request.seen_ms > 0 for request in requests)


@pytest.mark.parametrize(("method", "wanted"), [("put", (b"k", b"v")), ("put_many", ({b"k": b"v"},))])
async def test_call_in_flight_ends_with_an_error_at_close(
    client: Face, servers: Servers, method: str, wanted: tuple[Any, ...]
) -> None:
    arrived = asyncio.Event()

    def hold(op: Op, answer: Any) -> bool:
        arrived.set()
        return True

    for server in servers.cluster.servers:
        server.intercept = hold
    call = asyncio.ensure_future(client.call(method, *wanted))
    await arrived.wait()
    await client.close()
    with pytest.raises(OutcomeUnknown):
        await asyncio.wait_for(call, PATIENCE_S)


@pytest.mark.parametrize("face", FACES.values(), ids=FACES.keys())
async def test_calls_beyond_the_limit_wait_their_turn(face: type[Face], servers: Servers) -> None:
    client = await face(parse_url(servers.patient_url)).open()
    key = servers.cluster.key_of(P1)
    keys = {key + b"{}" + b"%d" % i: b"v" for i in range(10)}
    calls = [client.call("put_many", keys) for _ in range(30)]
    await asyncio.gather(*calls)
    await client.close()


async def test_write_sent_in_another_callers_frame_is_unknown_at_its_deadline(servers: Servers) -> None:
    """Of three blocking callers the first one sends. The next one takes over and sends for itself and the third. They
    get more time until it was enough for that."""
    for timeout_s in (0.6, 3.0, 15.0):
        client = await FACES["blocking"](parse_url(servers.patient_url)).open()
        told = await _sent_by_others(client, servers, timeout_s)
        await client.close()
        if {type(each) for each in told} == {OutcomeUnknown}:
            return
    pytest.fail(f"the caller of the third write gets {told}")


async def _sent_by_others(client: Face, servers: Servers, timeout_s: float) -> list[Any]:
    """Return the outcomes of two callers whose writes waited until a third one's was answered."""
    key = servers.cluster.key_of(P1)
    held: list[Any] = []

    def hold(op: Op, answer: Any) -> bool:
        held.append(answer)
        return True

    await client.call("put", key, b"0")
    server_of(servers, N1).intercept = hold
    first = asyncio.ensure_future(client.call("put", key, b"1"))
    await wait_until(lambda: _is(len(held) == 1), what="the first has arrived")
    others = [asyncio.ensure_future(client.call("put", key, b"2", timeout_s=timeout_s)) for _ in range(2)]
    (link,) = [each for each in client.client._engine._links.values() if each._pending or each.is_busy]
    await wait_until(lambda: _is(len(link._pending) == 2 or any(map(asyncio.Future.done, others))), what="they wait")
    held[0](2)
    assert await first == 2
    told = await asyncio.gather(*others, return_exceptions=True)
    server_of(servers, N1).intercept = lambda op, answer: False
    return told


async def test_write_abandoned_by_its_caller_is_not_sent_twice(servers: Servers) -> None:
    client = await FACES["async"](parse_url(servers.patient_url)).open()
    held: list[Any] = []

    def hold(op: Op, answer: Any) -> bool:
        held.append(answer)
        return op.code == Code.PUT

    for server in servers.cluster.servers:
        server.intercept = hold
    call = asyncio.ensure_future(client.call("put", b"k", b"v"))
    await wait_until(lambda: _is(bool(held)), what="the write has arrived")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    held[0](1)
    for server in servers.cluster.servers:
        server.intercept = lambda op, answer: False
    assert await client.call("put", b"k", b"w") > 0
    assert client.client.statistics()["operations_under_way"] == 0
    await client.close()


async def test_scan_continues_when_the_ring_changes_and_no_leader_does(client: Face, servers: Servers) -> None:
    """A link that kept naming the old ring was refused forever."""
    cluster = servers.cluster
    await client.call("put", b"k", b"v")
    for _ in range(2):
        cluster.ring = replace(cluster.ring, version=cluster.ring.version + 1, routed=0)
        cluster.changed()
        assert [key for key, _ in await client.scan()] == [b"k"]
        assert await client.call("count") == 1


async def test_scan_continues_without_a_partition_that_left(client: Face, servers: Servers) -> None:
    cluster = servers.cluster
    keys = [cluster.key_of(partition, number) for partition in cluster.partitions for number in range(3)]
    for key in keys:
        await client.call("put", key, b"v")
    leaving = PartitionId("p3")
    left = cluster.partitions.pop(leaving)
    cluster.partitions[P1].data.update(left.data)
    tokens = SortedDict({token: P1 if owner == leaving else owner for token, owner in cluster.ring.tokens.items()})
    members = {name: member for name, member in cluster.ring.partitions.items() if name != leaving}
    cluster.ring = Ring(cluster.ring.version + 1, members, tokens, cluster.ring.hash)
    del cluster.leaders[leaving]
    cluster.changed()
    assert [key for key, _ in await client.scan()] == sorted(keys)
    assert await client.call("count") == len(keys)


async def test_client_opened_twice_at_once_reads_the_topology_once(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[AsyncEngine] = []
    whole = AsyncEngine.open

    async def open_(self: AsyncEngine) -> None:
        opened.append(self)
        await whole(self)

    monkeypatch.setattr(AsyncEngine, "open", open_)
    client = AsyncClient(servers.patient_url)
    assert await asyncio.gather(client.open(), client.open()) == [client, client]
    assert len(opened) == 1
    await client.close()


@pytest.mark.parametrize("face", FACES.values(), ids=FACES.keys())
async def test_client_that_is_closed_while_it_opens_stays_closed(
    monkeypatch: pytest.MonkeyPatch, face: type[Face], servers: Servers
) -> None:
    """Nobody would close its connections."""
    client, closed = face(parse_url(servers.patient_url)), list[AsyncEngine | BlockingEngine]()
    opens, closes, blocking_opens, blocking_closes = (
        AsyncEngine.open,
        AsyncEngine.close,
        BlockingEngine.open,
        BlockingEngine.close,
    )

    async def open_(self: AsyncEngine) -> None:
        await opens(self)
        await client.close()

    async def close(self: AsyncEngine) -> None:
        closed.append(self)
        await closes(self)

    def blocking_open(self: BlockingEngine) -> None:
        blocking_opens(self)
        client.client.close()

    def blocking_close(self: BlockingEngine) -> None:
        closed.append(self)
        blocking_closes(self)

    monkeypatch.setattr(AsyncEngine, "open", open_)
    monkeypatch.setattr(AsyncEngine, "close", close)
    monkeypatch.setattr(BlockingEngine, "open", blocking_open)
    monkeypatch.setattr(BlockingEngine, "close", blocking_close)
    with pytest.raises(Unavailable, match="is closed"):
        await client.open()
    assert len(closed) == 1
    with pytest.raises(InvalidRequest, match="not open"):
        await client.call("get", b"k")
