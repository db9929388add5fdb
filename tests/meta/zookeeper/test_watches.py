"""Watches of one path while callers come and go, and events come late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kazoo.protocol.states import EventType, WatchedEvent

from kvstore.meta.zookeeper.watches import Standing

PATH = "/a"


class Client:
    """Kazoo's, which arms whatever it is asked for, and whose server fires it when told."""

    def __init__(self) -> None:
        self.armed: list[tuple[str, Callable[[WatchedEvent], None]]] = []

    def exists_async(self, path: str, watch: Callable[[WatchedEvent], None]) -> Client:
        self.armed.append(("data", watch))
        return self

    def get_children_async(self, path: str, watch: Callable[[WatchedEvent], None]) -> Client:
        self.armed.append(("children", watch))
        return self

    def rawlink(self, answered: Any) -> None:
        pass

    async def fire(self, kind: str) -> None:
        """The oldest watch of this kind."""
        place = next(at for at, (each, _) in enumerate(self.armed) if each == kind)
        self.armed.pop(place)[1](WatchedEvent(EventType.CHANGED, "CONNECTED", PATH))
        await asyncio.sleep(0)


async def test_a_late_event_of_watches_that_nobody_has_any_more_leaves_those_alone_that_came_later() -> None:
    client: Any = Client()
    among: dict[str, Standing] = {}
    loop = asyncio.get_running_loop()
    first = among[PATH] = Standing(PATH, loop, among)
    gone = first.join(lambda: None)
    first.arm(client)
    gone.close()
    await client.fire("data")
    assert among == {}
    second = among[PATH] = Standing(PATH, loop, among)
    second.join(lambda: None)
    second.arm(client)
    await client.fire("children")
    assert among == {PATH: second}, "who is in here is armed again on the next connection"
