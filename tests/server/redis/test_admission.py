"""Connections beyond the limit on the Redis port."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvstore.server.config import Limits
from kvstore.server.peer import handshake
from kvstore.server.peer import server as peer_server
from kvstore.server.peer.frames import FrameError
from kvstore.server.peer.proof import CallingSide
from kvstore.server.redis import listener as resp_listener
from kvstore.types import PartitionId, ServerId
from tests.server.peer.test_link_calls import connect, echo, hello
from tests.server.redis.resp_port import Raw, redis_port
from tests.server.redis.test_parser import packed
from tests.server.servers import servers
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize("words", [b"", packed(b"PING"), packed(b"KVSTORE.PEER"), b"*6\r\n$12\r\nKVSTORE.PEER"])
async def test_client_above_the_limit_gets_the_error_whatever_it_sends(tmp_path: Path, words: bytes) -> None:
    async with redis_port(tmp_path, limits=Limits(connections_max=1)) as resp, resp.raw() as first:
        await first.ask(packed(b"PING"), b"+PONG\r\n")
        async with resp.raw() as second:
            second.writer.write(words)
            # Not to the end: later input of the client was not read, so the end may be a reset.
            assert await second.read_line() == b"-ERR max number of clients reached\r\n"
        found = resp.server.statistics()
        assert (found["resp_connections"], found["resp_connections_refused_total"]) == (1, 1)
        assert await first.ask(packed(b"PING"), b"+PONG\r\n") == b"+PONG\r\n"


async def test_silent_connection_gives_way_to_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resp_listener, "SILENT_S", 0.0)
    async with redis_port(tmp_path, limits=Limits(connections_max=3)) as resp, AsyncExitStack() as stack:
        first, idle, _ = [await stack.enter_async_context(resp.raw()) for _ in range(3)]
        await first.ask(packed(b"PING"), b"+PONG\r\n")
        idle.writer.write(b"*2\r\n$3\r\nGE")
        for _ in range(2):
            late = await stack.enter_async_context(resp.raw())
            assert await late.ask(packed(b"PING"), b"+PONG\r\n") == b"+PONG\r\n"
        assert await idle.read_to_end() == b""
        assert await first.ask(packed(b"PING"), b"+PONG\r\n") == b"+PONG\r\n"
        refused = await stack.enter_async_context(resp.raw())
        assert (await refused.read_to_end()).startswith(b"-ERR max number of clients")
        found = resp.server.statistics()
        assert (found["resp_connections"], found["resp_silent_closed_total"]) == (3, 2)


async def test_trials_are_bounded_and_others_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resp_listener, "SERVERS_MAX", 2)
    async with redis_port(tmp_path, limits=Limits(connections_max=1)) as resp, AsyncExitStack() as stack:
        raws = [await stack.enter_async_context(resp.raw()) for _ in range(6)]
        assert await raws[0].ask(packed(b"PING"), b"+PONG\r\n") == b"+PONG\r\n"
        for raw in raws[1:]:
            assert await raw.read_to_end() == b"-ERR max number of clients reached\r\n"


async def test_many_clients_do_not_keep_other_servers_out(tmp_path: Path) -> None:
    async with servers(tmp_path, ["n1", "n2"], limits=Limits(connections_max=2)) as cluster, AsyncExitStack() as stack:
        await cluster.lead("p1", "n2")

        async def echo(server: ServerId, method: str, body: bytes) -> bytes:
            return body

        cluster["n2"].peers.serve(PartitionId("p1"), echo)
        for name in ("n1", "n2"):
            for _ in range(2):
                client = await stack.enter_async_context(cluster[name].redis())
                await client.ping()
        links = cluster["n1"].links
        assert await links.call(ServerId("n2"), PartitionId("p1"), "m", b"!", PATIENCE_S) == b"!"
        found = cluster["n2"].resp.statistics()
        assert found["resp_connections"] == 2, "a server's link is no client"


async def test_client_that_claims_to_be_a_server_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resp_listener, "SERVERS_MAX", 4)
    monkeypatch.setattr(handshake, "PROOF_S", 10 * PATIENCE_S)
    async with servers(tmp_path, ["n1", "n2"], limits=Limits(connections_max=1)) as cluster, AsyncExitStack() as stack:
        cluster["n2"].peers.serve(PartitionId("p1"), echo)
        client = await stack.enter_async_context(cluster["n2"].redis())
        await client.ping()
        strangers = [await connect(cluster) for _ in range(4)]
        for each in strangers:
            each.writer.write(hello())
            assert (await each.read_line()).startswith(b"+"), "a nonce: it has a place until it has proven itself"
        assert await cluster["n1"].links.call(ServerId("n2"), PartitionId("p1"), "m", b"!", PATIENCE_S) == b"n1 m !"
        assert await strangers[0].read_to_end() == b"-ERR max number of clients reached\r\n", "the oldest gave way"
        assert await client.ping()
        for each in strangers:
            each.close()


async def test_trial_of_the_address_with_most_trials_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resp_listener, "SERVERS_MAX", 3)
    async with servers(tmp_path, ["n1", "n2"], limits=Limits(connections_max=1)) as cluster, AsyncExitStack() as stack:
        client = await stack.enter_async_context(cluster["n2"].redis())
        await client.ping()
        host, _, port = cluster.addresses[ServerId("n2")].rpartition(":")
        caller = CallingSide(cluster["n1"].credentials, ServerId("n2"))
        server = Raw(*await asyncio.open_connection(host, int(port), local_addr=("127.0.0.2", 0)))
        server.writer.write(caller.hello())
        proof, _ = caller.take(await server.read_line())
        strangers = []
        for _ in range(6):
            strangers.append(await connect(cluster))
            strangers[-1].writer.write(hello())
            assert (await strangers[-1].read_line()).startswith(b"+")
        server.writer.write(proof)
        caller.take(await server.read_line())
        assert caller.is_proven
        for each in (server, *strangers):
            each.close()


async def test_links_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "LINKS_MAX", 1)
    async with servers(tmp_path, ["n1", "n2", "n3"]) as cluster:
        one, two = await connect(cluster), await connect(cluster)
        await cluster["n1"].introduce(one, "n2")
        with pytest.raises(FrameError, match="max number of links reached: 1"):
            await cluster["n3"].introduce(two, "n2")
        one.close()
        two.close()
