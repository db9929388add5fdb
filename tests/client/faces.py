"""The two clients behind one interface, so that one suite tests both."""

from __future__ import annotations

import asyncio
from typing import Any

from kvstore.client import AsyncClient, Client, ClientConfig, Item


class AsyncFace:
    """AsyncClient, unchanged."""

    def __init__(self, config: ClientConfig) -> None:
        self.client = AsyncClient(config)

    async def open(self) -> AsyncFace:
        await self.client.open()
        return self

    async def close(self) -> None:
        await self.client.close()

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        return await getattr(self.client, method)(*args, **options)

    async def scan(self, *args: Any, **options: Any) -> list[tuple[bytes, Item]]:
        return [found async for found in self.client.scan(*args, **options)]

    async def keys(self, *args: Any, **options: Any) -> list[bytes]:
        return [key async for key in self.client.keys(*args, **options)]


class BlockingFace:
    """Client, with each call in a thread."""

    def __init__(self, config: ClientConfig) -> None:
        self.client = Client(config)

    async def open(self) -> BlockingFace:
        await asyncio.to_thread(self.client.open)
        return self

    async def close(self) -> None:
        await asyncio.to_thread(self.client.close)

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        return await asyncio.to_thread(getattr(self.client, method), *args, **options)

    async def scan(self, *args: Any, **options: Any) -> list[tuple[bytes, Item]]:
        return await asyncio.to_thread(lambda: list(self.client.scan(*args, **options)))

    async def keys(self, *args: Any, **options: Any) -> list[bytes]:
        return await asyncio.to_thread(lambda: list(self.client.keys(*args, **options)))


Face = AsyncFace | BlockingFace
FACES: dict[str, type[AsyncFace] | type[BlockingFace]] = {"async": AsyncFace, "blocking": BlockingFace}
