"""Clients of asyncio that are called on another event loop than the one on which they were opened."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from kvstore.client import AsyncClient
from kvstore.errors import InvalidRequest
from tests.client.model import ModelCluster
from tests.client.serving import Servers, serving_in_a_thread


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with serving_in_a_thread(ModelCluster()) as running:
        yield running


async def scanned(client: AsyncClient) -> list[Any]:
    return [found async for found in client.scan()]


CALLS: dict[str, Callable[[AsyncClient], Awaitable[object]]] = {
    "get": lambda client: client.get(b"k"),
    "put": lambda client: client.put(b"k", b"v"),
    "get_many": lambda client: client.get_many([b"a", b"b"]),
    "scan": scanned,
    "open": lambda client: client.open(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("has_ended", [True, False], ids=["ended", "running"])
def test_call_on_another_loop_is_refused(servers: Servers, call: str, has_ended: bool) -> None:
    client = AsyncClient(servers.patient_url)

    async def ask() -> None:
        with pytest.raises(InvalidRequest, match="expected a call on the event loop on which the client was opened"):
            await CALLS[call](client)

    async def open_and_ask_elsewhere() -> None:
        await client.open()
        if not has_ended:
            await asyncio.to_thread(asyncio.run, ask())
            with pytest.raises(InvalidRequest, match="got another event loop"):
                await asyncio.to_thread(asyncio.run, client.close())
            await client.put(b"k", b"v")
            await client.close()

    asyncio.run(open_and_ask_elsewhere())
    if has_ended:
        asyncio.run(ask())
        asyncio.run(client.close())


def test_client_can_be_opened_again_after_its_loop_has_ended(servers: Servers) -> None:
    client = AsyncClient(servers.patient_url)
    asyncio.run(_discard(client.open()))

    async def use() -> int:
        await client.close()
        async with client:
            return await client.put(b"k", b"v")

    assert asyncio.run(use()) > 0


async def _discard(opening: Awaitable[object]) -> None:
    await opening
