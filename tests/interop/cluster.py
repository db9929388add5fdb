"""Our bookies on a real ZooKeeper, in this process, for Apache's programs to talk to."""

from __future__ import annotations

import uuid
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from kvstore.bookie import Bookie, BookieConfig
from kvstore.devcluster.zookeeper import ZooKeeperProcess, start_standalone
from kvstore.env.real import real_env
from kvstore.meta.layout import LayoutStore
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.zookeeper.store import ZooKeeperStore
from tests.interop.recording import Proxy, Recording


class Cluster:
    """ZooKeeper and a few bookies, each behind a recording proxy. An async context manager."""

    def __init__(self, directory: Path, bookies: int = 3) -> None:
        self.directory = directory
        self.recording = Recording()
        self.bookies: list[Bookie] = []
        self.zookeeper: ZooKeeperProcess
        self.ledgers: LedgerStore
        self._count = bookies
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Cluster:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        self.zookeeper = start_standalone(self.directory / "zookeeper")
        self._stack.callback(self.zookeeper.kill)
        store = await ZooKeeperStore.connect(self.zookeeper.address)
        self._stack.push_async_callback(store.close)
        await LayoutStore(store).ensure(str(uuid.uuid4()))
        self.ledgers = LedgerStore(store)
        for number in range(1, self._count + 1):
            await self._start_bookie(f"b{number}")

    async def _start_bookie(self, name: str) -> None:
        store = await ZooKeeperStore.connect(self.zookeeper.address)
        self._stack.push_async_callback(store.close)
        proxy = Proxy(self.recording)
        advertise = await proxy.listen()
        self._stack.callback(proxy.close)
        config = BookieConfig(name=name, listen="127.0.0.1:0", advertise=advertise)
        env = real_env(self.directory / name)
        self._stack.push_async_callback(env.nursery.close)
        bookie = await self._stack.enter_async_context(Bookie(env, config, store))
        proxy.target = bookie.listening
        self.bookies.append(bookie)
