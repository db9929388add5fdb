"""Links between servers: admission, calls between replicas, and malformed bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest, NotLeader, OutcomeUnknown, Overloaded, PeerRefused, Unavailable
from kvstore.partition.election.peer_replicas import HOLD
from kvstore.server.peer import calls as peer_calls
from kvstore.server.peer import frames
from kvstore.server.peer import server as peer_server
from kvstore.server.peer.frames import Call, Operations, Ping, Results
from kvstore.server.peer.proof import CallingSide
from kvstore.types import PartitionId, ServerId
from kvstore.versions import FIRST, LINK_FIRST, LINK_LATEST, Fixed
from tests.server.redis.resp_port import Raw
from tests.server.redis.test_parser import packed
from tests.server.servers import Server, Servers, servers
from tests.waiting import PATIENCE_S, wait_until

NONCE = bytes(32)
P1, N1, N2 = PartitionId("p1"), ServerId("n1"), ServerId("n2")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Servers]:
    async with servers(tmp_path, ["n1", "n2"]) as started:
        yield started


async def connect(cluster: Servers, name: str = "n2") -> Raw:
    host, _, port = cluster.addresses[ServerId(name)].rpartition(":")
    return Raw(*await asyncio.open_connection(host, int(port)))


def hello(
    version: int = LINK_FIRST,
    to: str = "n2",
    caller: str = "n1",
    of: str = "the cluster",
    nonce: bytes = NONCE,
) -> bytes:
    return packed(b"KVSTORE.PEER", b"%d" % version, caller.encode(), to.encode(), of.encode(), nonce)


# ── the greeting ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_another_version_is_refused_by_number(cluster: Servers) -> None:
    raw = await connect(cluster)
    raw.writer.write(hello(version=99))
    assert await raw.read_line() == b"-ERR peer version: expected %d to %d, got '99'\r\n" % (LINK_FIRST, LINK_LATEST)
    raw.close()


async def test_link_meant_for_another_server_is_refused(cluster: Servers) -> None:
    """An address may belong to another server by now."""
    raw = await connect(cluster)
    raw.writer.write(hello(to="n7"))
    assert await raw.read_line() == b"-ERR peer: this is server n2, not 'n7'\r\n"
    raw.close()
    cluster["n1"].links._addresses[ServerId("n7")] = cluster.addresses[N2]
    with pytest.raises(Unavailable, match="not 'n7'"):
        await cluster["n1"].links.call(ServerId("n7"), P1, "m", b"", PATIENCE_S)


async def test_link_greeting_is_accepted_only_as_first_command(cluster: Servers) -> None:
    raw = await connect(cluster)
    raw.writer.write(packed(b"PING") + hello() + packed(b"PING"))
    assert await raw.read_line() == b"+PONG\r\n"
    assert await raw.read_line() == b"-ERR KVSTORE.PEER must be the first command\r\n"
    assert await raw.read_line() == b"+PONG\r\n"
    raw.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        frames.HEADER.pack(3) + b"abc",
        frames.encode(Results()),
        frames.encode(Operations(1, [frames.Lane("p1", gets=[(1, (1, b"", 0, 0))])])),
    ],
    ids=["length", "body", "kind", "field"],
)
async def test_garbage_closes_only_its_link(cluster: Servers, garbage: bytes) -> None:
    await cluster.lead("p1", "n2")
    raw, other = await connect(cluster), await connect(cluster)
    for each in (raw, other):
        await cluster["n1"].introduce(each, "n2")
    raw.writer.write(garbage)
    with suppress(ConnectionResetError):
        assert await raw.read_to_end() == b""
    call = frames.encode(Call(1, "p9", "m", b""))
    other.writer.write(call)
    header = await other.read(4)
    (answer,) = frames.Frames().feed(header + await other.read(*frames.HEADER.unpack(header)))
    assert isinstance(answer, frames.Answer)
    assert isinstance(answer.error, NotLeader)
    raw.close()
    other.close()


async def test_commands_after_the_greeting_have_no_effect(cluster: Servers) -> None:
    await cluster.lead("p1", "n2")
    raw = await connect(cluster)
    raw.writer.write(hello() + packed(b"SET", b"k", b"v"))
    assert (await raw.read_line()).startswith(b"+")
    async with cluster["n2"].redis() as client:
        assert await client.get("k") is None
    raw.close()


# ── calls between replicas ────────────────────────────────────────────────────────────────────────────────────────────


async def echo(server: ServerId, method: str, body: bytes) -> bytes:
    return f"{server} {method} ".encode() + body


async def refuse(server: ServerId, method: str, body: bytes) -> bytes:
    raise InvalidRequest("not that")


async def forever(server: ServerId, method: str, body: bytes) -> bytes:
    await asyncio.Event().wait()
    return b""


async def broken(server: ServerId, method: str, body: bytes) -> bytes:
    raise ValueError("a bug")


async def link(cluster: Servers) -> None:
    """Open a link from n1 to n2, so that a call is sent at once."""
    cluster["n2"].peers.serve(P1, echo)
    await cluster["n1"].links.call(N2, P1, "ask", b"", PATIENCE_S)


async def test_call_is_answered_by_the_other_replica(cluster: Servers) -> None:
    cluster["n2"].peers.serve(P1, echo)
    links = cluster["n1"].links
    assert await links.call(N2, P1, "ask", b"body", PATIENCE_S) == b"n1 ask body"
    large = b"x" * (4 << 20)
    assert await links.call(N2, P1, "ask", large, PATIENCE_S) == b"n1 ask " + large
    answers = await asyncio.gather(*(links.call(N2, P1, "ask", b"%d" % i, PATIENCE_S) for i in range(50)))
    assert answers == [b"n1 ask %d" % i for i in range(50)]
    assert len(cluster["n2"].peers._connections) == 1, "one link serves all"


async def test_call_to_oneself_needs_no_link(cluster: Servers) -> None:
    cluster["n1"].peers.serve(P1, echo)
    assert await cluster["n1"].links.call(N1, P1, "ask", b"", PATIENCE_S) == b"n1 ask "


async def test_error_of_the_replica_arrives(cluster: Servers) -> None:
    cluster["n2"].peers.serve(P1, refuse)
    with pytest.raises(InvalidRequest, match="not that"):
        await cluster["n1"].links.call(N2, P1, "ask", b"", PATIENCE_S)
    cluster["n2"].peers.forget(P1)
    with pytest.raises(NotLeader):
        await cluster["n1"].links.call(N2, P1, "ask", b"", PATIENCE_S)


async def test_missing_answer_is_unknown_outcome(cluster: Servers) -> None:
    await link(cluster)
    cluster["n2"].peers.serve(P1, forever)
    with pytest.raises(OutcomeUnknown, match="within"):
        await cluster["n1"].links.call(N2, P1, "ask", b"", 0.1)


async def test_concurrent_calls_are_limited(cluster: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_calls, "CALLS_MAX", 2)
    await link(cluster)
    cluster["n2"].peers.serve(P1, forever)
    calls = [cluster["n1"].links.call(N2, P1, "ask", b"", 0.3) for _ in range(3)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert sorted(type(each).__name__ for each in results) == ["OutcomeUnknown", "OutcomeUnknown", Overloaded.__name__]


async def test_held_calls_do_not_delay_others(cluster: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server has one call open per partition that it follows and the other server leads: hundreds of them."""
    monkeypatch.setattr(peer_calls, "CALLS_MAX", 2)
    monkeypatch.setattr(peer_server, "CALLS_MAX", 2)
    await link(cluster)
    links, peers = cluster["n1"].links, cluster["n2"].peers
    partitions = [PartitionId(f"q{number}") for number in range(9)]
    for each in partitions:
        peers.serve(each, forever)
    holding = [asyncio.ensure_future(links.call(N2, each, HOLD, b"", PATIENCE_S)) for each in partitions]
    await asyncio.sleep(0)
    assert await links.call(N2, P1, "ask", b"date", PATIENCE_S) == b"n1 ask date"
    assert not any(each.done() for each in holding)
    monkeypatch.setattr(peer_calls, "HOLDS_MAX", len(holding))
    with pytest.raises(Overloaded):
        await links.call(N2, P1, HOLD, b"", PATIENCE_S)
    for call in holding:
        call.cancel()


async def test_immediate_calls_are_answered_beyond_the_limit(cluster: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "CALLS_MAX", 2)
    await link(cluster)
    links, peers, dates = cluster["n1"].links, cluster["n2"].peers, PartitionId("@dates of a test")
    peers.serve(P1, forever)
    peers.serve_at_once(dates, lambda server, method, body: b"now")
    for _ in range(2):
        with pytest.raises(OutcomeUnknown):
            await links.call(N2, P1, "ask", b"", 0.1)
    with pytest.raises(Overloaded):
        await links.call(N2, P1, "ask", b"", PATIENCE_S)
    assert await links.call(N2, dates, "date", b"", PATIENCE_S) == b"now"


async def test_dead_peer_differs_from_silent_peer(cluster: Servers) -> None:
    links = cluster["n1"].links
    address = cluster.addresses[N2]
    await cluster["n2"].resp.close()
    assert cluster.addresses[N2] == address
    with pytest.raises(PeerRefused):
        await links.call(N2, P1, "ask", b"", PATIENCE_S)
    with pytest.raises(Unavailable, match="no address"):
        await links.call(ServerId("n9"), P1, "ask", b"", PATIENCE_S)
    accepted: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda reader, writer: accepted.append(writer), "127.0.0.1", 0)
    links._addresses[ServerId("n8")] = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    with pytest.raises(Unavailable) as raised:
        await links.call(ServerId("n8"), P1, "ask", b"", 0.2)
    assert not isinstance(raised.value, PeerRefused)
    silent.close()
    for writer in accepted:
        writer.close()
        await writer.wait_closed()


async def test_link_lost_during_a_call_is_unknown_outcome(cluster: Servers) -> None:
    cluster["n2"].peers.serve(P1, forever)
    call = asyncio.ensure_future(cluster["n1"].links.call(N2, P1, "ask", b"", PATIENCE_S))
    await wait_until(lambda: has_calls(cluster["n2"]), what="the call is at n2")
    for connection in list(cluster["n2"].peers._connections.values()):
        connection.close()
    with pytest.raises(OutcomeUnknown, match="broke"):
        await asyncio.wait_for(call, PATIENCE_S)


async def has_calls(server: Server) -> bool:
    return any(connection._calls for connection in server.peers._connections.values())


async def test_bug_in_an_answer_costs_only_the_link(cluster: Servers) -> None:
    cluster["n2"].peers.serve(P1, broken)
    with pytest.raises(OutcomeUnknown):
        await cluster["n1"].links.call(N2, P1, "ask", b"", PATIENCE_S)
    cluster["n2"].peers.serve(P1, echo)
    assert await cluster["n1"].links.call(N2, P1, "ask", b"", PATIENCE_S) == b"n1 ask "


async def test_oversized_call_is_not_sent(cluster: Servers) -> None:
    with pytest.raises(InvalidRequest, match="at most"):
        await cluster["n1"].links.call(N2, P1, "ask", b"x" * (frames.BODY_BYTES_MAX + 1), PATIENCE_S)


# docs/protocol.md V2
async def test_links_of_lower_version_end_after_a_rise(cluster: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller may not know more, or not be able to do more."""
    monkeypatch.setattr(peer_server, "OUTDATED_S", 0.0)
    peers = cluster["n2"].peers
    lower, half_open = await connect(cluster), await connect(cluster)
    await cluster["n1"].introduce(lower, "n2")
    assert [each.version for each in peers._connections.values()] == [LINK_FIRST]
    caller = CallingSide(cluster["n1"].credentials, N2)
    half_open.writer.write(caller.hello())
    proof, _ = caller.take(await half_open.read_line())
    peers.versions = Fixed(cluster=FIRST + 1)
    half_open.writer.write(proof)
    assert (
        await half_open.read_line()
        == b"-ERR peer version: expected at least %d, got %d; the cluster version has risen\r\n"
        % (LINK_FIRST + 1, LINK_FIRST)
    )
    assert len(peers._connections) == 1, "the link of before is still there"
    peers.end_outdated()
    with suppress(ConnectionResetError):
        assert await lower.read_to_end() == b""
    assert peers._connections == {}
    higher = await connect(cluster)
    await cluster["n1"].introduce(higher, "n2", LINK_LATEST)
    peers.end_outdated()
    higher.writer.write(frames.encode(Ping(7)))
    assert await higher.read(4) == frames.HEADER.pack(len(frames.encode(Ping(7))) - 4)
    higher.close()
    half_open.close()
