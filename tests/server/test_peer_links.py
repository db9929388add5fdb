"""How many connections servers have with each other, and what a link that is going down says."""

from __future__ import annotations

from pathlib import Path

from kvstore.types import PartitionId, ServerId
from tests.server.servers import Server, servers
from tests.waiting import wait_until

P1, N2 = PartitionId("p1"), ServerId("n2")


async def echo(server: ServerId, method: str, body: bytes) -> bytes:
    return body


async def test_calls_share_one_link_also_while_it_is_idle(tmp_path: Path) -> None:
    """A link without an operation under way is a link all the same: another one in its place would leave the first one
    connected for good, and what is under way on the two would come in any order."""
    async with servers(tmp_path, ["n1", "n2"]) as cluster:
        cluster["n2"].peers.serve(P1, echo)
        for _ in range(5):
            assert await cluster["n1"].links.call(N2, P1, "ask", b"x", 5) == b"x"
        assert cluster["n2"].peers.statistics()["peer_sessions"] == 1
        await wait_until(lambda: has_links(cluster["n1"], 1), what="n1 has one link")


async def has_links(server: Server, count: int) -> bool:
    return server.links.statistics()["peer_links"] == count
