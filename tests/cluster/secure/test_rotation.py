"""The CA is replaced by another one, at nodes and at a Python client that stays open. Real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import trustme

from kvstore.client import AsyncClient
from tests.cluster.harness import TIMEOUT_S
from tests.cluster.test_tls import Secured, secured_cluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster]


def replace(path: Path, data: bytes) -> None:
    """Replace the file atomically."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.replace(path)


def trust(secured: Secured, *authorities: trustme.CA) -> None:
    """Let nodes and client trust these CAs through the file that they share."""
    replace(secured.ca, b"".join(each.cert_pem.bytes() for each in authorities))


def test_open_client_follows_its_nodes_to_another_ca(tmp_path: Path) -> None:
    with secured_cluster(tmp_path) as secured:
        cluster = secured.cluster
        before, after = secured.authority, trustme.CA()

        async def work() -> None:
            own = f"&cert={secured.cert}&key={secured.key}&timeout=60s"
            async with AsyncClient(secured.url(*cluster.ids) + own) as client:

                async def is_on_streams() -> bool:
                    await client.put_many({b"key-%d" % number: b"value" for number in range(60)})
                    told = client.statistics()
                    return told["streams_up"] == told["links_up"] == len(cluster.ids)

                await wait_until(is_on_streams, timeout_s=TIMEOUT_S, what="streams to all nodes")
                trust(secured, before, after)
                secured.authority = after
                secured.issue()
                for node in cluster.ids:
                    await asyncio.to_thread(cluster.terminate, node)
                    cluster.start_node(node)
                    await wait_until(lambda node=node: is_ready(node), timeout_s=TIMEOUT_S, what=f"{node} is ready")
                trust(secured, after)
                await wait_until(is_on_streams, timeout_s=TIMEOUT_S, what="streams to all nodes, by the new authority")
                assert await client.get(b"key-7") is not None

        async def is_ready(node: str) -> bool:
            return await asyncio.to_thread(secured.https, node, "/clusterz") == b"ok\n"

        asyncio.run(work())
