"""The number of connections between servers, and the last messages of a link that closes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvstore.env.beat import Beat
from kvstore.env.traces import Traces
from kvstore.errors import NotLeader, NotYetRaised, OutcomeUnknown, Unavailable
from kvstore.partition.state import commands, traits
from kvstore.partition.state.commands import Code
from kvstore.server.peer import frames
from kvstore.server.peer import link as peer_link
from kvstore.server.peer.frames import Frames, Lane, Operations, Results
from kvstore.server.peer.link import SWEEP_S, PeerLink
from kvstore.server.peer.proof import NONCE_BYTES, Credentials
from kvstore.server.peer.server import PeerConnection
from kvstore.server.routing.flight import Flight
from kvstore.server.routing.pending import Pending
from kvstore.types import PartitionId, ServerId
from kvstore.versions import LINK_FIRST, LINK_LATEST
from tests.server.backends import Collector
from tests.server.servers import Server, servers
from tests.waiting import PATIENCE_S, wait_until

P1, N2 = PartitionId("p1"), ServerId("n2")


async def echo(server: ServerId, method: str, body: bytes) -> bytes:
    return body


async def test_calls_share_one_link_when_idle(tmp_path: Path) -> None:
    """A link without operations in progress is still a link. A second one would leave the first connected for good, and
    operations on the two would arrive in any order."""
    async with servers(tmp_path, ["n1", "n2"]) as cluster:
        cluster["n2"].peers.serve(P1, echo)
        for _ in range(5):
            assert await cluster["n1"].links.call(N2, P1, "ask", b"x", PATIENCE_S) == b"x"
        assert cluster["n2"].peers.statistics()["peer_sessions"] == 1
        await wait_until(lambda: has_links(cluster["n1"], 1), what="n1 has one link")


async def test_call_to_own_server_ends_like_one_over_a_link(tmp_path: Path) -> None:
    """Work that a call started used to end with its caller: a logged freeze was not completed by anybody."""
    async with servers(tmp_path, ["n1", "n2"]) as cluster:
        begun, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def answer(server: ServerId, method: str, body: bytes) -> bytes:
            begun.set()
            await may_end.wait()
            ended.set()
            if method == "refuse":
                raise NotLeader(P1)
            return server.encode() + body

        links = cluster["n1"].links
        cluster["n1"].peers.serve(P1, answer)
        caller = asyncio.create_task(links.call(ServerId("n1"), P1, "ask", b"", PATIENCE_S))
        await begun.wait()
        caller.cancel()
        with pytest.raises(OutcomeUnknown, match="n1 did not answer ask"):
            await links.call(ServerId("n1"), P1, "ask", b"", 0.01)
        may_end.set()
        await asyncio.wait_for(ended.wait(), PATIENCE_S)
        assert await links.call(ServerId("n1"), P1, "ask", b"x", PATIENCE_S) == b"n1x"
        with pytest.raises(NotLeader):
            await links.call(ServerId("n1"), P1, "refuse", b"", PATIENCE_S)
        may_end.clear()
        waiting = asyncio.create_task(links.call(ServerId("n1"), P1, "ask", b"", PATIENCE_S))
        await asyncio.sleep(0)
        await links.close()
        with pytest.raises(OutcomeUnknown, match="stopped before"):
            await waiting
        with pytest.raises(Unavailable, match="n1 is stopping"):
            await links.call(ServerId("n1"), P1, "ask", b"", PATIENCE_S)


async def has_links(server: Server, count: int) -> bool:
    return server.links.statistics()["peer_links"] == count


# ── the order of forwarded operations ─────────────────────────────────────────────────────────────────────────────────


async def test_writes_keep_order_when_lead_comes_here(tmp_path: Path) -> None:
    """The first is at the former leader, which will refuse it. The second must not be executed here before that."""
    async with servers(tmp_path, ["n1", "n2"]) as cluster:
        former = await cluster.lead("p1", "n2")
        former.is_up = False
        server = cluster["n1"]
        server.dispatcher.submit((commands.Put(b"k", b"first"),), server.sink, (1,))
        await wait_until(lambda: holds(cluster["n2"]), what="the first is at n2")
        await cluster.host("p1", "n1")
        server.dispatcher.submit((commands.Put(b"k", b"second"),), server.sink, (2,))
        await cluster.announce_leader("p1", "n1")
        first, second = await server.sink.wait(1, 2)
        assert first < second


async def test_writes_keep_order_when_lead_moves(tmp_path: Path) -> None:
    async with servers(tmp_path, ["n1", "n2", "n3"]) as cluster:
        former = await cluster.lead("p1", "n2")
        former.is_up = False
        server = cluster["n1"]
        cluster["n3"].peers.serve(P1, echo)
        await server.links.call(ServerId("n3"), P1, "ask", b"there is a link", PATIENCE_S)
        server.dispatcher.submit((commands.Put(b"k", b"first"),), server.sink, (1,))
        await wait_until(lambda: holds(cluster["n2"]), what="the first is at n2")
        await cluster.host("p1", "n3")
        server.membership.note_leader(P1, ServerId("n3"))
        server.dispatcher.submit((commands.Put(b"k", b"second"),), server.sink, (2,))
        await cluster.announce_leader("p1", "n3")
        first, second = await server.sink.wait(1, 2)
        assert first < second


async def test_stopping_server_answers_before_it_ends_links(tmp_path: Path) -> None:
    """It leads nothing any more, and says so. A link that just ended would leave writes with unknown outcome."""
    async with servers(tmp_path, ["n1", "n2", "n3"]) as cluster:
        await cluster.lead("p1", "n2")
        server, stops = cluster["n1"], cluster["n2"]
        server.dispatcher.submit((commands.Put(b"k", b"there is a link"),), server.sink, (1,))
        await server.sink.wait(1)
        await cluster.host("p1", "n3")
        stops.dispatcher.host(P1, None)
        server.dispatcher.submit((commands.Put(b"k", b"on its way"),), server.sink, (2,))
        await asyncio.sleep(0)
        await stops.resp.close()
        await stops.peers.close()
        await cluster.announce_leader("p1", "n3")
        assert isinstance((await server.sink.wait(2))[0], int)


async def holds(server: Server) -> bool:
    return server.dispatcher.statistics()["waiting_for_leader"] > 0


class Stream:
    """A stream that records written bytes."""

    def __init__(self) -> None:
        self.frames = Frames()
        self.written: list[frames.Message] = []
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        if data[:1] not in b"+*":
            self.written += self.frames.feed(data)

    def abort(self) -> None:
        self.is_aborted = True

    def set_write_buffer_limits(self, high: int) -> None:
        """Do nothing: the buffer never fills."""

    def get_write_buffer_size(self) -> int:
        return 0


class Leader:
    """A dispatcher of a server that leads, or does not lead."""

    def __init__(self) -> None:
        self.leads = False
        self.done: list[int] = []

    def replica_here(self, *_: Any) -> None:
        """Return nothing: no operation may be executed directly."""

    def submit_here(self, partition: PartitionId, op: commands.Op, sink: Any, token: int, ring_version: int) -> None:
        if self.leads:
            self.done.append(token)
        sink.complete(token, token if self.leads else NotLeader(partition))

    def progress(self, partition: PartitionId) -> tuple[int, int]:
        return (0, 0)


def sent(number: int, received: int, partition: str = "p1") -> bytes:
    lane = Lane(partition, puts=[(number, (3, b"k", b"v", 0, 0, 0, None))])
    return frames.encode(Operations(1, [lane], received))


async def test_operations_sent_before_a_refusal_arrived_are_not_done() -> None:
    """Otherwise the refused one, sent again, would be executed after later ones."""
    leader, stream = Leader(), Stream()
    connection = PeerConnection(cast(Any, LinkOwner(leader)), N2, cast(Any, stream))
    connection.data_received(sent(1, 0))
    connection.flush()
    leader.leads = True
    connection.data_received(sent(2, 0))
    connection.data_received(sent(3, 0, "p2"))
    connection.flush()
    assert leader.done == [3], "another partition's order is another matter"
    refused = [number for each in stream.written if isinstance(each, Results) for number, _ in each.others]
    assert refused == [1, 2]
    connection.data_received(sent(4, 1))
    connection.flush()
    assert leader.done == [3]
    connection.data_received(sent(5, len(stream.written)))
    assert leader.done == [3, 5]


async def test_paused_process_reads_before_it_declares_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop runs timers before it reads: the answers may already have arrived."""
    monkeypatch.setattr(peer_link, "SILENCE_S", 3.0)
    links, stream, sink = Links(), Stream(), Collector()
    link = PeerLink(cast(Any, links), N2)
    link.connection_made(cast(Any, stream))
    prove(link)
    submit(link, Pending(1, commands.Put(b"k", b"v"), sink, 7))
    await asyncio.sleep(0)
    links.time += 60.0
    link._sweep()
    assert not stream.is_aborted
    link.data_received(frames.encode(Results(numbers=[(1, 42)])))
    assert await sink.wait(7) == [42]
    submit(link, Pending(2, commands.Put(b"k", b"v"), sink, 8))
    await asyncio.sleep(0)
    for _ in range(7):
        links.time += SWEEP_S
        link._sweep()
    assert stream.is_aborted, "the other side is silent while this one looks"
    link.connection_lost(None)


async def test_closing_link_accepts_nothing() -> None:
    link = PeerLink(cast(Any, Links()), N2)
    link.connection_made(cast(Any, Stream()))
    prove(link)
    assert link.flight.has_capacity()
    link.close()
    assert not link.flight.has_capacity()


# docs/protocol.md V3
async def test_link_is_replaced_by_higher_version_when_idle() -> None:
    """A link is opened with the version known at that time, when the other server may not have registered yet."""
    owner, sink, stream = Older(), Collector(), Stream()
    link = PeerLink(cast(Any, owner), N2)
    link.connection_made(cast(Any, stream))
    link.is_open = True
    number = link.flight.next_number()
    link.flight.pending[number] = P1, Pending(number, commands.Get(b"k"), sink, 0)
    link.received_at = link._swept_at = owner.now()
    link._sweep()
    assert link.flight.has_capacity()
    owner.version_to = Links().version_to  # type: ignore[method-assign]
    link._sweep()
    assert (link.is_open, link.flight.has_capacity()) == (True, False)
    link.flight.pending.clear()
    link._sweep()
    assert not link.is_open


async def test_link_lost_while_opening_fails_the_waiting_call() -> None:
    """A write to it would end the process."""
    link, stream = PeerLink(cast(Any, Links()), N2), Stream()
    link.connection_made(cast(Any, stream))
    prove(link)
    await link.opened
    link.connection_lost(None)
    with pytest.raises(Unavailable):
        await link.call(P1, "ask", b"", 0.0)


def submit(link: PeerLink, pending: Pending) -> None:
    link.add(P1, link.flight.begin(P1, pending), pending.op)


def prove(link: PeerLink) -> None:
    """Let the other side prove its identity."""
    link._caller.is_proven = True
    link.data_received(b"")


class Links:
    """The owner of a link, as the link sees it."""

    credentials = Credentials(ServerId("n1"), "the cluster", (bytes(32),), lambda: bytes(NONCE_BYTES))

    time = 100.0
    beat = Beat()
    server = ServerId("n1")
    topology = SimpleNamespace(ring=SimpleNamespace(routed=1))
    forwarded_max = 10
    traces = Traces()

    def now(self) -> float:
        return self.time

    def version_to(self, server: ServerId) -> int:
        return LINK_LATEST

    def lost(self, link: PeerLink) -> None:
        """Do nothing: it is not used again."""

    @property
    def dispatcher(self) -> Any:
        return self

    def link_opened(self, flight: Flight) -> None:
        """Do nothing: operations may be sent."""

    def link_lost(self, flight: Flight, first_unsent: int) -> None:
        """Do nothing: no operation is sent again."""


def test_result_too_large_for_a_frame_is_reported_as_done() -> None:
    stream = Stream()
    connection = PeerConnection(cast(Any, LinkOwner(Leader())), N2, cast(Any, stream))
    connection.complete(1, [b"x" * (1 << 20)] * 33)
    connection.complete(2, 7)
    connection.flush()
    found = {number: each for frame in stream.written if isinstance(frame, Results) for number, each in frame.others}
    assert isinstance(found[1], OutcomeUnknown)
    assert [frame.numbers for frame in stream.written if isinstance(frame, Results) and frame.numbers] == [[(2, 7)]]


# docs/protocol.md P22
def test_result_frame_carries_unsent_progress() -> None:
    """Each frame used to name every partition ever requested on the link: half a millisecond for a small GET."""
    leader, stream, at = Leader(), Stream(), dict.fromkeys(("p1", "p2", "p3"), (7, 70))
    leader.submit_here = lambda *_: None  # type: ignore[method-assign]
    leader.progress = at.__getitem__  # type: ignore[assignment]
    connection = PeerConnection(cast(Any, LinkOwner(leader)), N2, cast(Any, stream))

    def told() -> list[tuple[str, int, int]]:
        connection.flush()
        frame = stream.written[-1]
        assert isinstance(frame, Results)
        return [tuple(each) for each in frame.progress]

    for number, partition in enumerate(at, 1):
        connection.data_received(sent(number, 0, partition))
    connection.complete(1, 7)
    assert told() == [("p1", 7, 70), ("p2", 7, 70), ("p3", 7, 70)]
    at["p3"] = (8, 80)
    connection.complete(2, 7)
    assert told() == [("p3", 8, 80)], "an answer of it is to come"
    connection.complete(3, 8)
    assert told() == []
    at.update(p1=(9, 90), p3=(9, 90))
    connection.data_received(sent(4, 0, "p3"))
    connection.complete(4, 9)
    assert told() == [("p3", 9, 90)], "nobody waits for an answer of the other"
    connection.data_received(sent(5, 0, "p1"))
    connection.complete(5, 9)
    assert told() == [("p1", 9, 90)]


class LinkOwner:
    def __init__(self, dispatcher: Leader) -> None:
        self.dispatcher, self.operations, self.operations_max = dispatcher, 0, 100
        self.now = lambda: 0.0


async def test_isolated_server_reports_it_and_keeps_trying(tmp_path: Path) -> None:
    """It retries by itself: once a load balancer has removed the server, no client connects and triggers it."""
    async with servers(tmp_path, ["n1", "n2", "n3"]) as cluster:
        links, others = cluster["n1"].links, [N2, ServerId("n3")]
        assert not links.is_cut_off(others), "nothing is known yet"
        for name in ("n2", "n3"):
            await cluster[name].resp.close()
        for other in others:
            with pytest.raises(Unavailable):
                await links.call(other, P1, "ask", b"", PATIENCE_S)
        assert links.is_cut_off(others)
        assert not links.is_cut_off(others[:1]), "one that is silent may itself be what is wrong"
        await cluster["n2"].resp.open(cluster.addresses[N2])

        async def is_back() -> bool:
            return not links.is_cut_off(others)

        await wait_until(is_back, what="n1 reaches n2 again")
        assert links.statistics()["peer_links"] == 1


class Older(Links):
    """Links to a server of the first release."""

    def version_to(self, server: ServerId) -> int:
        return LINK_FIRST


# docs/protocol.md V3
@pytest.mark.parametrize(("owner", "is_sent"), [(Links, True), (Older, False)], ids=("it knows it", "it does not"))
async def test_operation_unknown_to_peer_is_refused_here(
    owner: type[Links], is_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(traits.SINCE, int(Code.COUNT), 2)
    link, stream, sink = PeerLink(cast(Any, owner()), N2), Stream(), Collector()
    link.connection_made(cast(Any, stream))
    link.is_open = True
    stream.written.clear()
    for token, op in enumerate((commands.Get(b"k"), commands.Count(), commands.Scan(b"", b"", 1))):
        number = link.flight.next_number()
        link.flight.pending[number] = P1, Pending(number, op, sink, token)
        link.add(P1, number, op)
    link.flush()
    sent = [frame for frame in stream.written if isinstance(frame, Operations)]
    codes = [op.code for lane in sent[0].lanes for _, op in lane.in_order()[0]]
    assert codes == [Code.GET, *([Code.COUNT] if is_sent else []), Code.SCAN]
    if not is_sent:
        (refused,) = await sink.wait(1)
        assert isinstance(refused, NotYetRaised)
        assert "cluster version 2" in str(refused)
        assert "0.2.0" in str(refused)


def test_unknown_trailing_fields_are_ignored() -> None:
    body = msgspec.msgpack.encode([1, 7, [["p1", [[1, [1, b"k", 0, 0]]], [], [], "more"]], 3, {"traced": True}])
    (found,) = frames.Frames().feed(frames.HEADER.pack(len(body)) + body)
    assert isinstance(found, Operations)
    assert (found.ring_version, found.received, found.lanes[0].gets) == (7, 3, [(1, commands.Get(b"k"))])
