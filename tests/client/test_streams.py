"""Clients' sessions on Redis ports: taken where there is one, given up where there is none, and watched for silence."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from kvstore.client import AsyncClient, ClientConfig
from kvstore.client.aio import engine as engine_module
from kvstore.client.aio import link as link_module
from kvstore.client.aio.engine import AsyncEngine
from kvstore.client.aio.link import KEEPALIVE_S, Link, State
from kvstore.client.aio.wires import GrpcWire, StreamWire
from kvstore.client.core import operations
from kvstore.client.core.batching import answered, brief_frame_of, single_frame_of
from kvstore.client.core.operation import Numbering, Operation
from kvstore.client.core.routing import Routing
from kvstore.client.core.stream_doors import BARRED_S, StreamDoors, door_in
from kvstore.client.core.values import Item
from kvstore.env.library_env import library_env
from kvstore.env.transport import TcpTransport
from kvstore.errors import OutcomeUnknown
from kvstore.partition.state.commands import Code, Op
from kvstore.proto import brief, kv_pb2
from kvstore.proto.session_stream import WELCOME, message_of, protobuf_message_of
from kvstore.types import PartitionId, ServerId
from tests.client.model import Endpoint, ModelCluster
from tests.client.serving import Servers, serving
from tests.waiting import PATIENCE_S, wait_until

NOBODY = "127.0.0.1:1"


async def test_operations_go_over_the_redis_port(servers: Servers) -> None:
    async with AsyncClient(servers.patient_url) as client:
        versions = await asyncio.gather(*(client.put(b"key-%d" % number, b"v") for number in range(100)))
        assert min(versions) > 0
        assert (await client.increment(b"n", 5), await client.increment(b"n", 2)) == (5, 7)
        statistics = client.statistics()
        assert statistics["streams_up"] == statistics["links_up"] > 0
        assert sum(each.statistics()["session_streams"] for each in servers.streams.values()) > 0


async def test_a_client_that_names_a_server_otherwise_than_the_cluster_does_finds_its_redis_port(
    servers: Servers,
) -> None:
    port = servers.cluster.endpoints[ServerId("n1")].grpc.rpartition(":")[2]
    async with AsyncClient(ClientConfig(endpoints=(f"localhost:{port}",), timeout_s=PATIENCE_S)) as client:
        assert client.statistics()["streams_up"] == 1


async def test_where_the_redis_port_cannot_be_reached_grpc_carries_the_session(servers: Servers) -> None:
    cluster = servers.cluster
    cluster.endpoints = {id: Endpoint(each.grpc, NOBODY) for id, each in cluster.endpoints.items()}
    cluster.changed()
    async with AsyncClient(servers.patient_url) as client:
        await client.put(b"k", b"v")
        assert client.statistics()["streams_up"] == 0
        assert client.statistics()["links_up"] > 0


async def test_a_redis_port_of_another_server_is_not_used(servers: Servers) -> None:
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


async def test_calls_end_in_their_time_though_a_look_at_a_link_has_failed(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, failed = Link.tick, 0

    def fails_at_first(self: Link, now: float) -> None:
        nonlocal failed
        failed += 1
        if failed < 3:
            raise RuntimeError("a fault of ours")
        original(self, now)

    async def has_failed() -> bool:
        return failed > 2

    async with AsyncClient(servers.patient_url) as client:
        monkeypatch.setattr(Link, "tick", fails_at_first)
        await wait_until(has_failed)
        monkeypatch.setattr(StreamWire, "send", lambda _wire, _message: None)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(OutcomeUnknown):
                await client.put(b"k", b"v", timeout_s=0.01)


async def test_a_topology_that_nobody_understands_is_not_the_last_one(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    async with AsyncClient(servers.patient_url):
        monkeypatch.setattr(AsyncEngine, "_learn", fails_at_first)
        await wait_until(has_learnt)
        assert failed


async def test_answers_that_nobody_understands_end_a_session_of_grpc(servers: Servers) -> None:
    class Call:
        def cancel(self) -> None:
            """It has ended."""

        async def read(self) -> kv_pb2.Answers:
            return kv_pb2.Answers(numbers=[1])

    class Puzzled(Owner):
        def take(self, answers: Any) -> None:
            list(answered(answers))

    owner = Puzzled()
    wire = GrpcWire(owner, cast("Any", None), cast("Any", None), 1.0)
    wire._call = Call()
    async with asyncio.timeout(PATIENCE_S):
        await wire._read()
    assert len(owner.fell) == 1


async def test_a_write_whose_stream_breaks_is_applied_once(servers: Servers) -> None:
    cluster, key = servers.cluster, servers.cluster.key_of(PartitionId("p1"))
    leader = next(each for each in cluster.servers if each.id == cluster.leaders[PartitionId("p1")])
    broken = 0

    def apply_and_break(op: Op, answer: Any) -> bool:
        nonlocal broken
        if op[0] != Code.INCREMENT or broken:
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


def test_who_has_no_stream_is_not_asked_again_for_a_while() -> None:
    doors = StreamDoors(Routing(open_listeners={"a:1": ("n1", "a:2")}))
    assert (doors.door_or_none("a:1"), doors.door_or_none("b:1")) == (("n1", "a:2"), None)
    assert doors.may_try("a:1", 100.0)
    doors.bar("a:1", 100.0)
    assert not doors.may_try("a:1", 100.0 + BARRED_S / 2)
    assert doors.may_try("b:1", 100.0)
    assert doors.may_try("a:1", 100.0 + BARRED_S)


def test_the_door_of_who_gives_a_topology_is_in_it() -> None:
    listed = [kv_pb2.Server(id="n1", grpc="a:1", resp="a:2"), kv_pb2.Server(id="n2", grpc="b:1")]
    assert door_in(kv_pb2.TopologyResponse(servers=listed, server="n1")) == ("n1", "a:2")
    assert door_in(kv_pb2.TopologyResponse(servers=listed, server="n2")) is None
    assert door_in(kv_pb2.TopologyResponse(servers=listed)) is None
    routing = Routing()
    routing.learn(kv_pb2.TopologyResponse(servers=listed))
    assert routing.doors == {"a:1": ("n1", "a:2")}


# ── a link and its wire ──


class Wire:
    """Counts what it is asked for."""

    is_brief = True

    def __init__(self) -> None:
        self.is_ready = True
        self.sent: list[brief.Frame] = []
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
    found = Link(
        NOBODY,
        env,
        config,
        routing,
        {},
        TcpTransport(),
        StreamDoors(routing),
        changed=lambda link: None,
        heard=lambda answers: None,
    )
    found._wire, found.state = Wire(), State.UP
    yield found
    found.fall("the test is over")
    await env.nursery.close()


def put_under_way(link: Link, *, deadline: float = 1e9) -> Operation:
    operation = operations.put(b"k", b"v")
    operation.partition, operation.deadline = "p1", deadline
    operation.waiter = asyncio.get_running_loop().create_future()
    Numbering(b"c" * 16).begin(operation)
    link.send(operation)
    link.go_on()
    return operation


async def test_a_server_that_owes_answers_and_is_silent_is_asked_and_given_up(link: Link) -> None:
    wire = cast("Wire", link._wire)
    operation = put_under_way(link)
    sent_at = link._heard_at
    link.tick(sent_at + 0.9)
    assert wire.probes == 0
    link.tick(sent_at + 1.1)
    link.tick(sent_at + 2.0)
    assert (wire.probes, link.state) == (1, State.UP), "asked once, and waited for"
    link.tick(sent_at + 2.2)
    assert (link.state, wire.is_closed) == (State.DOWN, True)
    assert isinstance(operation.waiter.result(), OutcomeUnknown)


async def test_any_message_is_a_sign_of_life(link: Link) -> None:
    wire = cast("Wire", link._wire)
    put_under_way(link)
    sent_at = link._heard_at
    link.tick(sent_at + 1.1)
    link.take(brief.Answers(0, [], [], [], [], [], []))
    link.tick(sent_at + 0.5)
    assert (wire.probes, link.state) == (1, State.UP)


async def test_an_idle_server_is_asked_now_and_then(link: Link) -> None:
    wire, heard_at = cast("Wire", link._wire), link._heard_at
    link.tick(heard_at + KEEPALIVE_S * 0.9)
    assert wire.probes == 0
    link.tick(heard_at + KEEPALIVE_S * 1.1)
    assert wire.probes == 1


async def test_a_frame_over_grpc_names_its_cluster(link: Link) -> None:
    """The channel connects again by itself: another cluster's server may be there by then."""
    wire = cast("Wire", link._wire)
    wire.is_brief, link._routing.cluster = False, "ours"
    put_under_way(link)
    assert [frame.cluster for frame in cast("list[kv_pb2.Frame]", wire.sent)] == ["ours"]


async def test_operations_of_one_turn_share_a_frame_and_wait_while_the_wire_is_full(link: Link) -> None:
    wire = cast("Wire", link._wire)
    wire.is_ready = False
    for _ in range(3):
        put_under_way(link)
    assert wire.sent == []
    wire.is_ready = True
    link.go_on()
    (frame,) = wire.sent
    assert sum(len(lane.keys) for lane in frame.lanes) == 3


async def test_a_lone_operation_behind_a_lone_one_leaves_at_once_and_others_together(link: Link) -> None:
    def answer(*numbers: int) -> None:
        link.take(brief.Answers(0, [], list(numbers), [1] * len(numbers), [], [], []))

    def begin() -> None:
        operation = operations.get(b"k")
        operation.partition, operation.deadline = "p1", 1e9
        operation.waiter = asyncio.get_running_loop().create_future()
        Numbering(b"c" * 16).begin(operation)
        link.send(operation)

    def frames() -> list[int]:
        return [sum(len(lane.keys) for lane in frame.lanes) for frame in cast("Wire", link._wire).sent]

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


async def test_what_nobody_waits_for_any_more_is_not_sent(link: Link) -> None:
    wire = cast("Wire", link._wire)
    wire.is_ready = False
    late = put_under_way(link, deadline=0.0)
    link.tick(link._heard_at)
    assert late.waiter.done()
    wire.is_ready = True
    link.go_on()
    assert wire.sent == []


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("what", ["make", "send"])
async def test_operations_of_which_no_frame_can_be_made_are_answered(
    link: Link, monkeypatch: pytest.MonkeyPatch, count: int, what: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("a fault of ours")

    wire = cast("Wire", link._wire)
    wire.is_ready = False
    wanted = [put_under_way(link) for _ in range(count)]
    wire.is_ready = True
    with monkeypatch.context() as patch:
        if what == "make":
            patch.setattr(link_module, "brief_frame_of", fail)
            patch.setattr(link_module, "single_frame_of", fail)
        else:
            patch.setattr(wire, "send", fail)
        link.go_on()
    why = f"{NOBODY}: a frame of {count} operations cannot be sent: TypeError"
    assert {str(each.waiter.result()).removesuffix("; nothing was sent") for each in wanted} == {why}
    assert link.owed == 0
    put_under_way(link)
    assert len(wire.sent) == 1, "what comes later is sent"


# ── the wire itself ──


class Owner:
    """Keeps what a wire brings."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.fell: list[str] = []

    def take(self, answers: Any) -> None:
        self.taken.append(answers)

    def go_on(self) -> None:
        """Nothing waits."""

    def fall(self, why: str) -> None:
        self.fell.append(why)


class Transport:
    """Connects to a server that has said `greeting`."""

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
        """Nothing is kept."""

    def write(self, data: bytes) -> None:
        """Nobody reads it."""

    def abort(self) -> None:
        self.is_aborted = True


async def opened(*greeting: bytes) -> tuple[StreamWire, Owner]:
    owner = Owner()
    wire = StreamWire(owner, "n1")
    await wire.open(cast("Any", Transport(*greeting)), NOBODY)
    return wire, owner


async def test_a_wire_is_open_once_the_whole_welcome_has_come() -> None:
    wire, owner = await opened(WELCOME[:5], WELCOME[5:])
    wire.data_received(message_of(brief.Answers(3, [], [1], [7], [2], [Item(b"v", 1, 1, 1, 0)], [3])))
    wire.data_received(protobuf_message_of(kv_pb2.Answers(numbers=[4], versions=[8])))
    assert [list(answered(each)) for each in owner.taken] == [
        [(1, 7), (2, Item(b"v", 1, 1, 1, 0)), (3, None)],
        [(4, 8)],
    ]


async def test_who_refuses_has_no_stream_and_the_link_goes_on_without() -> None:
    with pytest.raises(EOFError, match="session: this is server n2"):
        await opened(b"-ERR session: this is server n2\r\n")
    with pytest.raises(EOFError):
        await opened(b"HTTP/1.1 400 Bad Request" + bytes(2_000))


async def test_who_gives_up_opening_leaves_no_connection() -> None:
    transport = Transport()
    opening = asyncio.ensure_future(StreamWire(Owner(), "n1").open(cast("Any", transport), NOBODY))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert transport.sink.is_aborted


async def test_bytes_that_are_no_answers_end_the_link() -> None:
    for data in (b"\x00\x00\x00\x02\x01?", b"\x00\x00\x00\x02\x02\xff", b"\x00\x00\x00\x00", b"\xff\xff\xff\xff"):
        wire, owner = await opened(WELCOME)
        wire.data_received(data)
        assert len(owner.fell) == 1


# ── frames ──


def begun(operation: Operation, numbering: Numbering) -> Operation:
    operation.partition = "p1"
    assert numbering.begin(operation)
    return operation


def test_a_lone_operation_has_the_frame_that_many_would_have() -> None:
    numbering = Numbering(b"c" * 16)
    numbering.see(70_000)
    for operation in (operations.get(b"k"), operations.put(b"k", b"v"), operations.get(b"k", kv_pb2.SESSION)):
        alone = begun(operation, numbering)
        frame, _ = brief_frame_of([alone], 5, ring_version=3, timeout_ms=100, tokens={"p1": 9})
        single = single_frame_of(alone, 5, ring_version=3, timeout_ms=100, token=9)
        assert isinstance(frame, brief.Frame)
        for lane in (frame.lanes[0], single.lanes[0]):
            if not alone.is_read:
                lane.token = 0  # of reads only
        assert single == frame


def test_brief_frames_are_what_protobuf_frames_are() -> None:
    first, second = Numbering(b"a" * 16), Numbering(b"b" * 16)
    mixed = [begun(operations.put(b"k%d" % place, b"v"), first if place % 2 else second) for place in range(6)]
    mixed += [begun(operations.get(b"g", level), first) for level in (0, kv_pb2.STALE)]
    frame, numbered = brief_frame_of(mixed, 10, ring_version=3, timeout_ms=100, tokens={"p1": 9})
    assert isinstance(frame, brief.Frame)
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
    frame, _ = brief_frame_of([conditional], 1, ring_version=3, timeout_ms=100, tokens={})
    assert isinstance(frame, kv_pb2.Frame), "it has options"


@pytest.fixture
async def servers() -> Any:
    async with serving(ModelCluster()) as running:
        yield running
