"""The first connection with ZooKeeper, when kazoo's threads know more than the event loop. No server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstore.errors import MetadataUnavailable
from kvstore.meta.store import SessionState
from kvstore.meta.zookeeper import store as module
from kvstore.meta.zookeeper.session import NotSent
from kvstore.meta.zookeeper.store import ZooKeeperStore

TURNS_MAX = 10_000


class Ended(Exception):
    """Raised when the event loop had no turn for this long."""


class _Broken:
    """A client whose thread has just lost its connection, before the event loop is notified."""

    def __init__(self) -> None:
        self.refused = 0

    def __getattr__(self, name: str) -> Any:
        def refuse(*_: Any, **__: Any) -> Any:
            self.refused += 1
            if self.refused > TURNS_MAX:
                raise Ended
            raise NotSent("the connection is CONNECTING")

        return refuse


class _Session:
    """A session that still reports that it is connected."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.state, self.id, self.user = SessionState.CONNECTED, 7, "nobody"
        self.refused = asyncio.Event()
        self.client = _Broken()

    async def close(self) -> None: ...


@pytest.mark.parametrize("chroot", ["", "/kvstore"])
async def test_broken_connection_at_the_first_node_does_not_block_the_loop(
    monkeypatch: pytest.MonkeyPatch, chroot: str
) -> None:
    """Without a turn of the loop nobody would learn that the connection is broken, no deadline would end the wait, and
    no signal the process."""
    monkeypatch.setattr(module, "ZooKeeperSession", _Session)
    with pytest.raises(MetadataUnavailable, match="no ZooKeeper answers"):
        await ZooKeeperStore.connect(f"h:1{chroot}", connect_timeout_s=0.2)
