"""etcd as the conformance suite sees it."""

from __future__ import annotations

from kvstore.meta.etcd import EtcdStore
from kvstore.meta.etcd.link import EtcdLink
from kvstore.meta.store import MetadataStore, SessionState
from tests.meta.drivers import SESSION_S, States
from tests.waiting import PATIENCE_S


class EtcdDriver:
    def __init__(self, address: str) -> None:
        self._address = address
        self._stores: list[EtcdStore] = []

    async def connect(self) -> MetadataStore:
        store = await EtcdStore.connect(
            self._address, session_timeout_s=SESSION_S, call_timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S
        )
        self._stores.append(store)
        return store

    async def blink(self, store: MetadataStore) -> None:
        assert isinstance(store, EtcdStore)
        states = States(store)
        store.break_connection()
        await states.wait_for(SessionState.CONNECTED)

    async def expire(self, store: MetadataStore) -> None:
        """End the session as an expiry does: the lease and all keys on it are deleted."""
        states = States(store)
        link = EtcdLink(self._address.partition("/")[0], None)
        await link.revoke(store.session)
        await link.close()
        await states.wait_for(SessionState.LOST)
        await states.wait_for(SessionState.CONNECTED)

    async def close(self) -> None:
        for store in self._stores:
            await store.close()
