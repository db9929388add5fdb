"""Connections beyond the limit on the Redis port."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvstore.server import peer_server, resp
from kvstore.server.config import Limits
from kvstore.server.peer_frames import FrameError
from kvstore.types import PartitionId, ServerId
from tests.server.redis_door import redis_door
from tests.server.servers import servers
from tests.server.test_peer import connect
from tests.server.test_resp_parser import packed


@pytest.mark.parametrize("words", [b"", packed(b"PING"), packed(b"KVSTORE.PEER"), b"*6\r\n$12\r\nKVSTORE.PEER"])
async def test_one_client_too_many_is_told_so_whatever_it_says(tmp_path: Path, words: bytes) -> None:
    async with redis_door(tmp_path, limits=Limits(connections_max=1)) as door, door.raw() as first:
        await first.ask(packed(b"PING"), b"+PONG\r\n")
        async with door.raw() as second:
            second.writer.write(words)
            assert await second.read_to_end() == b"-ERR max number of clients reached\r\n"
        found = door.server.statistics()
        assert (found["resp_connections"], found["resp_connections_refused_total"]) == (1, 1)
        assert await first.ask(packed(b"PING"), b"+PONG\r\n") == b"+PONG\r\n"


async def test_who_never_sent_a_command_gives_way_to_who_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resp, "SILENT_S", 0.0)
    async with redis_door(tmp_path, limits=Limits(connections_max=3)) as door, AsyncExitStack() as stack:
        first, idle, _ = [await stack.enter_async_context(door.raw()) for _ in range(3)]
        await first.ask(packed(b"PING"), b"+PONG\r\n")
        idle.writer.write(b"*2\r\n$3\r\nGE")
        for _ in range(2):
            late = await stack.enter_async_context(door.raw())
            assert await late.ask(packed(b"PING"), b"+PONG\r\n") == b"+PONG\r\n"
        assert await idle.read_to_end() == b""
        assert await first.ask(packed(b"PING"), b"+PONG\r\n") == b"+PONG\r\n"
        refused = await stack.enter_async_context(door.raw())
        assert (await refused.read_to_end()).startswith(b"-ERR max number of clients")
        found = door.server.statistics()
        assert (found["resp_connections"], found["resp_silent_closed_total"]) == (3, 2)


async def test_so_many_more_are_looked_at_and_the_rest_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resp, "SERVERS_MAX", 2)
    async with redis_door(tmp_path, limits=Limits(connections_max=1)) as door, AsyncExitStack() as stack:
        raws = [await stack.enter_async_context(door.raw()) for _ in range(6)]
        assert await raws[0].ask(packed(b"PING"), b"+PONG\r\n") == b"+PONG\r\n"
        for raw in raws[1:]:
            assert await raw.read_to_end() == b"-ERR max number of clients reached\r\n"


async def test_a_crowd_of_clients_does_not_keep_other_servers_out(tmp_path: Path) -> None:
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
        assert await links.call(ServerId("n2"), PartitionId("p1"), "m", b"!", 5) == b"!"
        found = cluster["n2"].resp.statistics()
        assert found["resp_connections"] == 2, "a server's link is no client"


async def test_links_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "LINKS_MAX", 1)
    async with servers(tmp_path, ["n1", "n2", "n3"]) as cluster:
        one, two = await connect(cluster), await connect(cluster)
        await cluster["n1"].introduce(one, "n2")
        with pytest.raises(FrameError, match="max number of links reached: 1"):
            await cluster["n3"].introduce(two, "n2")
        one.close()
        two.close()
