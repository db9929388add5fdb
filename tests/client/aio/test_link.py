"""Clients' sessions on Redis ports: used if offered, replaced by gRPC if not, and probed when silent."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import pytest

from kvstore.client import AsyncClient, ClientConfig
from kvstore.client.aio import engine as engine_module
from kvstore.client.aio import link as link_module
from kvstore.client.aio.connections import GrpcConnection, StreamConnection, text_of
from kvstore.client.aio.engine import AsyncEngine
from kvstore.client.aio.link import KEEPALIVE_S, AsyncLink, LinkState
from kvstore.client.core import operations
from kvstore.client.core.batching import answered, compact_frame_of, single_frame_of
from kvstore.client.core.operation import ClientOperation, Numbering
from kvstore.client.core.routing import Routing
from kvstore.client.core.stream_endpoints import BARRED_S, StreamEndpoints, stream_endpoint_in
from kvstore.client.core.values import Item
from kvstore.env.library_env import library_env
from kvstore.env.transport import TcpTransport
from kvstore.errors import OutcomeUnknown
from kvstore.partition.state.commands import Code, Op
from kvstore.proto import compact, kv_pb2
from kvstore.proto.session_stream import WELCOME, message_of, protobuf_message_of
from kvstore.types import PartitionId, ServerId
from tests.client.model import Endpoint, ModelCluster
from tests.client.serving import Servers, serving
from tests.waiting import PATIENCE_S, wait_until

NOBODY = "127.0.0.1:1"


async def test_operations_use_the_redis_port(servers: Servers) -> None:
    async with AsyncClient(servers.patient_url) as client:
        versions = await asyncio.gather(*(client.put(b"key-%d" % number, b"v") for number in range(100)))
        assert min(versions) > 0
        assert (await client.increment(b"n", 5), await client.increment(b"n", 2)) == (5, 7)
        statistics = client.statistics()
        assert statistics["streams_up"] == statistics["links_up"] > 0
        assert sum(each.statistics()["session_streams"] for each in servers.streams.values()) > 0


async def test_client_finds_the_redis_port_under_another_name_of_the_server(
    servers: Servers,
) -> None:
    port = servers.cluster.endpoints[ServerId("n1")].grpc.rpartition(":")[2]
    async with AsyncClient(ClientConfig(endpoints=(f"localhost:{port}",), timeout_s=PATIENCE_S)) as client:
        assert client.statistics()["streams_up"] == 1


async def test_grpc_carries_the_session_when_the_redis_port_is_unreachable(servers: Servers) -> None:
    cluster = servers.cluster
    cluster.endpoints = {id: Endpoint(each.grpc, NOBODY) for id, each in cluster.endpoints.items()}
    cluster.changed()
    async with AsyncClient(servers.patient_url) as client:
        await client.put(b"k", b"v")
        assert client.statistics()["streams_up"] == 0
        assert client.statistics()["links_up"] > 0


async def test_redis_port_of_another_server_is_not_used(servers: Servers) -> None:
    cluster = servers.cluster
    ports = [each.resp for each in cluster.endpoints.values()]
    others = [*ports[1:], ports[0]]
    cluster.endpoints = {
        id: Endpoint(each.grpc, resp) for (id, each), resp in zip(cluster.endpoints.items(), others, strict=True)
    }
    cluster.changed()
    async with AsyncClient(servers.patient_url) as client:
        await client.put(b"k", b"v")
        assert client.statistics()["streams_up"] == 0


async def test_calls_end_in_time_when_the_check_of_a_link_fails(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, failed = AsyncLink.tick, 0

    def fails_at_first(self: AsyncLink, now: float) -> None:
        nonlocal failed
        failed += 1
        if failed < 3:
            raise RuntimeError("a fault of ours")
        original(self, now)

    async def has_failed() -> bool:
        return failed > 2

    async with AsyncClient(servers.patient_url) as client:
        monkeypatch.setattr(AsyncLink, "tick", fails_at_first)
        await wait_until(has_failed)
        monkeypatch.setattr(StreamConnection, "send", lambda _connection, _message: None)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(OutcomeUnknown):
                await client.put(b"k", b"v", timeout_s=0.01)


async def test_unreadable_topology_does_not_end_the_updates(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    original, learnt, failed = AsyncEngine._learn, 0, 0

    def fails_at_first(self: AsyncEngine, message: kv_pb2.TopologyResponse) -> None:
        nonlocal learnt, failed
        if not failed:
            failed = 1
            raise IndexError("a fault of a server")
        original(self, message)
        learnt += 1

    async def has_learnt() -> bool:
        servers.cluster.changed()
        return learnt > 0

    monkeypatch.setattr(engine_module, "FOLLOW_PAUSE_S", 0.01)
    monkeypatch.setattr(engine_module, "FOLLOW_WAIT_MS", 100)
    async with AsyncClient(servers.patient_url):
        monkeypatch.setattr(AsyncEngine, "_learn", fails_at_first)
        await wait_until(has_learnt)
        assert failed


async def test_unreadable_answers_end_a_grpc_session(servers: Servers) -> None:
    class Call:
        def cancel(self) -> None:
            """A channel that has ended."""

        async def read(self) -> kv_pb2.Answers:
            return kv_pb2.Answers(numbers=[1])

    class Puzzled(Owner):
        def take(self, answers: Any) -> None:
            list(answered(answers))

    owner = Puzzled()
    connection = GrpcConnection(owner, cast("Any", None), cast("Any", None), 1.0)
    connection._call = Call()
    async with asyncio.timeout(PATIENCE_S):
        await connection._read()
    assert len(owner.fell) == 1


async def test_write_whose_stream_breaks_is_applied_once(servers: Servers) -> None:
    cluster, key = servers.cluster, servers.cluster.key_of(PartitionId("p1"))
    leader = next(each for each in cluster.servers if each.id == cluster.leaders[PartitionId("p1")])
    broken = 0

    def apply_and_break(op: Op, answer: Any) -> bool:
        nonlocal broken
        if op.code != Code.INCREMENT or broken:
            return False
        broken += 1
        leader._result(op, None)
        for stream in list(servers.streams[leader.id]._open):
            stream._stream.abort()
        return True

    leader.intercept = apply_and_break
    async with AsyncClient(servers.patient_url) as client:
        assert await client.increment(key, 1) == 1
        assert client.statistics()["link_breaks"] == 1
    assert (broken, cluster.doubly_applied()) == (1, [])


def test_server_without_streams_is_not_asked_again_for_a_while() -> None:
    stream_endpoints = StreamEndpoints(Routing(stream_endpoints={"a:1": ("n1", "a:2")}))
    assert (stream_endpoints.endpoint_or_none("a:1"), stream_endpoints.endpoint_or_none("b:1")) == (("n1", "a:2"), None)
    assert stream_endpoints.may_try("a:1", 100.0)
    stream_endpoints.bar("a:1", 100.0)
    assert not stream_endpoints.may_try("a:1", 100.0 + BARRED_S / 2)
    assert stream_endpoints.may_try("b:1", 100.0)
    assert stream_endpoints.may_try("a:1", 100.0 + BARRED_S)


def test_topology_has_the_endpoint_of_its_sender() -> None:
    listed = [kv_pb2.Server(id="n1", grpc="a:1", resp="a:2"), kv_pb2.Server(id="n2", grpc="b:1")]
    assert stream_endpoint_in(kv_pb2.TopologyResponse(servers=listed, server="n1")) == ("n1", "a:2")
    assert stream_endpoint_in(kv_pb2.TopologyResponse(servers=listed, server="n2")) is None
    assert stream_endpoint_in(kv_pb2.TopologyResponse(servers=listed)) is None
    routing = Routing()
    routing.learn(kv_pb2.TopologyResponse(servers=listed))
    assert routing.stream_endpoints == {"a:1": ("n1", "a:2")}


# ── a link and its connection ──


class FrameConnection:
    """Counts the probes that it receives."""

    is_compact = True

    def __init__(self) -> None:
        self.is_ready = True
        self.sent: list[compact.CompactFrame] = []
        self.probes = 0
        self.is_closed = False

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def probe(self) -> None:
        self.probes += 1

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
async def link() -> Any:
    env = library_env("test")
    config = ClientConfig(endpoints=(NOBODY,), silence_s=1.0)
    routing = Routing()
    found = AsyncLink(
        NOBODY,
        env,
        config,
        routing,
        {},
        TcpTransport(),
        StreamEndpoints(routing),
        changed=lambda link: None,
        on_answers=lambda answers: None,
    )
    found._connection, found.state = FrameConnection(), LinkState.UP
    yield found
    found.disconnect("the test is over")
    await env.nursery.close()


def put_under_way(link: AsyncLink, *, deadline: float = 1e9) -> ClientOperation:
    operation = operations.put(b"k", b"v")
    operation.partition, operation.deadline = "p1", deadline
    operation.waiter = asyncio.get_running_loop().create_future()
    Numbering(b"c" * 16).begin(operation)
    link.send(operation)
    link.flush()
    return operation


async def test_silent_server_that_owes_answers_is_probed_and_left(link: AsyncLink) -> None:
    connection = cast("FrameConnection", link._connection)
    operation = put_under_way(link)
    sent_at = link._received_at
    link.tick(sent_at + 0.9)
    assert connection.probes == 0
    link.tick(sent_at + 1.1)
    link.tick(sent_at + 2.0)
    assert (connection.probes, link.state) == (1, LinkState.UP), "asked once, and waited for"
    link.tick(sent_at + 2.2)
    assert (link.state, connection.is_closed) == (LinkState.DOWN, True)
    assert isinstance(operation.waiter.result(), OutcomeUnknown)


async def test_any_message_is_a_sign_of_life(link: AsyncLink) -> None:
    connection = cast("FrameConnection", link._connection)
    put_under_way(link)
    sent_at = link._received_at
    link.tick(sent_at + 1.1)
    link.take(compact.CompactAnswers(0, [], [], [], [], [], []))
    link.tick(sent_at + 0.5)
    assert (connection.probes, link.state) == (1, LinkState.UP)


async def test_idle_server_is_probed_periodically(link: AsyncLink) -> None:
    connection, heard_at = cast("FrameConnection", link._connection), link._received_at
    link.tick(heard_at + KEEPALIVE_S * 0.9)
    assert connection.probes == 0
    link.tick(heard_at + KEEPALIVE_S * 1.1)
    assert connection.probes == 1


async def test_grpc_frame_names_its_cluster(link: AsyncLink) -> None:
    """The channel reconnects by itself: a server of another cluster may listen there by then."""
    connection = cast("FrameConnection", link._connection)
    connection.is_compact, link._routing.cluster = False, "ours"
    put_under_way(link)
    assert [frame.cluster for frame in cast("list[kv_pb2.Frame]", connection.sent)] == ["ours"]


async def test_operations_of_one_turn_share_a_frame_and_wait_when_it_is_full(link: AsyncLink) -> None:
    connection = cast("FrameConnection", link._connection)
    connection.is_ready = False
    for _ in range(3):
        put_under_way(link)
    assert connection.sent == []
    connection.is_ready = True
    link.flush()
    (frame,) = connection.sent
    assert sum(len(lane.keys) for lane in frame.lanes) == 3


async def test_second_single_operation_leaves_at_once(link: AsyncLink) -> None:
    def answer(*numbers: int) -> None:
        link.take(compact.CompactAnswers(0, [], list(numbers), [1] * len(numbers), [], [], []))

    def begin() -> None:
        operation = operations.get(b"k")
        operation.partition, operation.deadline = "p1", 1e9
        operation.waiter = asyncio.get_running_loop().create_future()
        Numbering(b"c" * 16).begin(operation)
        link.send(operation)

    def frames() -> list[int]:
        return [sum(len(lane.keys) for lane in frame.lanes) for frame in cast("FrameConnection", link._connection).sent]

    begin()
    assert frames() == [], "others of this turn may follow"
    await asyncio.sleep(0)
    assert frames() == [1]
    answer(1)
    begin()
    assert frames() == [1, 1]
    begin()
    begin()
    assert frames() == [1, 1], "they share a frame"
    await asyncio.sleep(0)
    assert frames() == [1, 1, 2]
    answer(2, 3, 4)
    begin()
    assert frames() == [1, 1, 2], "many come together here"
    await asyncio.sleep(0)
    assert frames() == [1, 1, 2, 1]


async def test_operation_without_a_waiter_is_not_sent(link: AsyncLink) -> None:
    connection = cast("FrameConnection", link._connection)
    connection.is_ready = False
    late = put_under_way(link, deadline=0.0)
    link.tick(link._received_at)
    assert late.waiter.done()
    connection.is_ready = True
    link.flush()
    assert connection.sent == []


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("what", ["make", "send"])
async def test_operations_without_a_possible_frame_are_answered(
    link: AsyncLink, monkeypatch: pytest.MonkeyPatch, count: int, what: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("a fault of ours")

    connection = cast("FrameConnection", link._connection)
    connection.is_ready = False
    wanted = [put_under_way(link) for _ in range(count)]
    connection.is_ready = True
    with monkeypatch.context() as patch:
        if what == "make":
            patch.setattr(link_module, "compact_frame_of", fail)
            patch.setattr(link_module, "single_frame_of", fail)
        else:
            patch.setattr(connection, "send", fail)
        link.flush()
    why = f"{NOBODY}: a frame of {count} operations cannot be sent: TypeError"
    assert {str(each.waiter.result()).removesuffix("; nothing was sent") for each in wanted} == {why}
    assert link.operations_pending == 0
    put_under_way(link)
    assert len(connection.sent) == 1, "what comes later is sent"


# ── the wire itself ──


class Owner:
    """Keeps what a connection delivers."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.fell: list[str] = []

    def take(self, answers: Any) -> None:
        self.taken.append(answers)

    def flush(self) -> None:
        """Do nothing: no frame waits."""

    def disconnect(self, why: str) -> None:
        self.fell.append(why)


class Transport:
    """Connects to a server that has sent `greeting`."""

    def __init__(self, *greeting: bytes) -> None:
        self._greeting = greeting
        self.sink = _Sink()

    async def connect(self, address: str, handler: Any) -> None:
        handler.connection_made(self.sink)
        for part in self._greeting:
            handler.data_received(part)


class _Sink:
    is_aborted = False

    def set_write_buffer_limits(self, high: int) -> None:
        """Do nothing: no answer is kept."""

    def write(self, data: bytes) -> None:
        """Do nothing: nobody reads the reason."""

    def abort(self) -> None:
        self.is_aborted = True


async def opened(*greeting: bytes) -> tuple[StreamConnection, Owner]:
    owner = Owner()
    connection = StreamConnection(owner, "n1")
    await connection.open(cast("Any", Transport(*greeting)), NOBODY)
    return connection, owner


async def test_connection_is_open_once_the_whole_welcome_has_come() -> None:
    connection, owner = await opened(WELCOME[:5], WELCOME[5:])
    connection.data_received(message_of(compact.CompactAnswers(3, [], [1], [7], [2], [Item(b"v", 1, 1, 1, 0)], [3])))
    connection.data_received(protobuf_message_of(kv_pb2.Answers(numbers=[4], versions=[8])))
    assert [list(answered(each)) for each in owner.taken] == [
        [(1, 7), (2, Item(b"v", 1, 1, 1, 0)), (3, None)],
        [(4, 8)],
    ]


async def test_refusing_server_has_no_stream_and_the_link_uses_grpc() -> None:
    with pytest.raises(EOFError, match="session: this is server n2"):
        await opened(b"-ERR session: this is server n2\r\n")
    with pytest.raises(EOFError):
        await opened(b"HTTP/1.1 400 Bad Request" + bytes(2_000))


async def test_abandoned_opening_leaves_no_connection() -> None:
    transport = Transport()
    opening = asyncio.ensure_future(StreamConnection(Owner(), "n1").open(cast("Any", transport), NOBODY))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert transport.sink.is_aborted


async def test_bytes_that_are_not_answers_end_the_link() -> None:
    for data in (b"\x00\x00\x00\x02\x01?", b"\x00\x00\x00\x02\x02\xff", b"\x00\x00\x00\x00", b"\xff\xff\xff\xff"):
        connection, owner = await opened(WELCOME)
        connection.data_received(data)
        assert len(owner.fell) == 1


# ── frames ──


def begun(operation: ClientOperation, numbering: Numbering) -> ClientOperation:
    operation.partition = "p1"
    assert numbering.begin(operation)
    return operation


def test_single_operation_has_the_same_frame_as_many() -> None:
    numbering = Numbering(b"c" * 16)
    numbering.see(70_000)
    for operation in (operations.get(b"k"), operations.put(b"k", b"v"), operations.get(b"k", kv_pb2.SESSION)):
        alone = begun(operation, numbering)
        frame, _ = compact_frame_of([alone], 5, ring_version=3, timeout_ms=100, tokens={"p1": 9})
        single = single_frame_of(alone, 5, ring_version=3, timeout_ms=100, token=9)
        assert isinstance(frame, compact.CompactFrame)
        for lane in (frame.lanes[0], single.lanes[0]):
            if not alone.is_read:
                lane.token = 0  # of reads only
        assert single == frame


def test_compact_frames_equal_protobuf_frames() -> None:
    first, second = Numbering(b"a" * 16), Numbering(b"b" * 16)
    mixed = [begun(operations.put(b"k%d" % place, b"v"), first if place % 2 else second) for place in range(6)]
    mixed += [begun(operations.get(b"g", level), first) for level in (0, kv_pb2.STALE)]
    frame, numbered = compact_frame_of(mixed, 10, ring_version=3, timeout_ms=100, tokens={"p1": 9})
    assert isinstance(frame, compact.CompactFrame)
    assert sorted(numbered) == list(range(10, 18))
    for lane in frame.lanes:
        for place, (code, key) in enumerate(zip(lane.codes, lane.keys, strict=True)):
            operation = numbered[lane.first + place]
            assert (code, key) == (operation.code, operation.key)
            if not operation.is_read:
                assert lane.client == operation.numbering.client
                assert lane.sequences[place] == operation.sequence
                assert lane.values[place] == operation.value
            assert lane.level == operation.level
    conditional = begun(operations.put(b"k", b"v", if_absent=True), first)
    frame, _ = compact_frame_of([conditional], 1, ring_version=3, timeout_ms=100, tokens={})
    assert isinstance(frame, kv_pb2.Frame), "it has options"


@pytest.fixture
async def servers() -> Any:
    async with serving(ModelCluster()) as running:
        yield running


def test_reason_of_a_name_without_an_address_has_no_number() -> None:
    assert text_of(socket.gaierror(socket.EAI_NONAME, "n1: no such host")) == "n1: no such host"
