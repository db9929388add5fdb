"""ZooKeeper as the conformance suite sees it."""

from __future__ import annotations

import asyncio

from kazoo.client import KazooClient

from kvstore.meta.login import MetadataLogin
from kvstore.meta.store import MetadataStore, SessionState
from kvstore.meta.zookeeper.store import ZooKeeperStore
from tests.meta.drivers import SESSION_S, States
from tests.waiting import PATIENCE_S


class ZooKeeperDriver:
    def __init__(self, address: str, login: MetadataLogin | None = None) -> None:
        """With a login every node has an ACL that names only its user."""
        self._address, self._login = address, login
        self._stores: list[ZooKeeperStore] = []

    async def connect(self) -> MetadataStore:
        store = await ZooKeeperStore.connect(
            self._address,
            login=self._login,
            session_timeout_s=SESSION_S,
            call_timeout_s=PATIENCE_S,
            connect_timeout_s=PATIENCE_S,
        )
        self._stores.append(store)
        return store

    async def blink(self, store: MetadataStore) -> None:
        assert isinstance(store, ZooKeeperStore)
        states = States(store)
        store.break_connection()
        await states.wait_for(SessionState.CONNECTED)

    async def expire(self, store: MetadataStore) -> None:
        """End the session as ZooKeeper's own tests do: enter the same session from elsewhere and close it."""
        assert isinstance(store, ZooKeeperStore)
        identity = store._session.client.client_id
        states = States(store)
        await asyncio.to_thread(_close_session, self._address.partition("/")[0], identity)
        await states.wait_for(SessionState.LOST)
        if store.state is not SessionState.CONNECTED:
            await States(store).wait_for(SessionState.CONNECTED)

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


def _close_session(hosts: str, identity: tuple[int, bytes]) -> None:
    other = KazooClient(hosts=hosts, client_id=identity)
    other.start()
    other.stop()
    other.close()
