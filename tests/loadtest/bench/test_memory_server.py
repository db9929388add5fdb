"""Both clients accept the in-memory server as a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client import AsyncClient, Client
from loadtest.bench import peers


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("memory")
    with peers.memory_grpc(folder) as address:
        yield f"kv://{address}?timeout=60s"


def test_blocking_client_reads_what_it_wrote(url: str) -> None:
    with Client(url) as client:
        version = client.put(b"k", b"v")
        found = client.get(b"k")
        assert found is not None
        assert (found.value, found.version) == (b"v", version)
        assert client.put(b"k", b"") > version
        assert client.get(b"nobody's") is None


async def test_asyncio_client_reads_what_it_wrote(url: str) -> None:
    async with AsyncClient(url) as client:
        versions = await client.put_many({b"a": b"1", b"b": b"2"})
        found = await client.get_many([b"a", b"b", b"c"])
    assert {key: (item.value, item.version) for key, item in found.items()} == {
        b"a": (b"1", versions[b"a"]),
        b"b": (b"2", versions[b"b"]),
    }
