"""Watches of one path while callers come and go, and events come late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.exceptions import NoNodeError, ThrottledOpError
from kazoo.protocol.states import EventType, WatchedEvent

from kvstore.meta.zookeeper import watches as module
from kvstore.meta.zookeeper.watches import RearmedWatch
from tests.waiting import PATIENCE_S

PATH = "/a"


class Client:
    """Kazoo's client, which arms whatever is requested, and whose server fires it on demand."""

    def __init__(self) -> None:
        self.armed: list[tuple[str, Callable[[WatchedEvent], None]]] = []
        self.answers: list[Callable[[Any], None]] = []

    def exists_async(self, path: str, watch: Callable[[WatchedEvent], None]) -> Client:
        self.armed.append(("data", watch))
        return self

    def get_children_async(self, path: str, watch: Callable[[WatchedEvent], None]) -> Client:
        self.armed.append(("children", watch))
        return self

    def rawlink(self, answered: Any) -> None:
        self.answers.append(answered)

    async def fire(self, kind: str) -> None:
        """Return the oldest watch of this kind."""
        place = next(at for at, (each, _) in enumerate(self.armed) if each == kind)
        self.armed.pop(place)[1](WatchedEvent(EventType.CHANGED, "CONNECTED", PATH))
        await asyncio.sleep(0)


async def test_late_event_of_dropped_watches_leaves_later_ones_alone() -> None:
    client: Any = Client()
    among: dict[str, RearmedWatch] = {}
    loop = asyncio.get_running_loop()
    first = among[PATH] = RearmedWatch(PATH, loop, among)
    gone = first.join(lambda: None)
    first.arm(client)
    gone.close()
    await client.fire("data")
    assert among == {}
    second = among[PATH] = RearmedWatch(PATH, loop, among)
    second.join(lambda: None)
    second.arm(client)
    await client.fire("children")
    assert among == {PATH: second}, "watches in this table are armed again on the next connection"


async def test_watch_refused_on_a_working_connection_is_requested_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that throttles also refuses reads; and no change would be reported until the next connection."""
    monkeypatch.setattr(module, "REARM_S", 0.01)
    client: Any = Client()
    among: dict[str, RearmedWatch] = {}
    called = asyncio.Event()
    standing = among[PATH] = RearmedWatch(PATH, asyncio.get_running_loop(), among)
    standing.join(called.set)
    standing.arm(client)
    client.armed.clear()
    for answered in client.answers:
        answered(SimpleNamespace(exception=ThrottledOpError()))
    async with asyncio.timeout(PATIENCE_S):
        await called.wait()  # changes made meanwhile are read
    assert sorted(kind for kind, _ in client.armed) == ["children", "data"]


async def test_children_of_an_absent_node_are_watched_once_it_is_created(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REARM_S", 0.0)
    client: Any = Client()
    among: dict[str, RearmedWatch] = {}
    standing = among[PATH] = RearmedWatch(PATH, asyncio.get_running_loop(), among)
    standing.join(lambda: None)
    standing.arm(client)
    client.answers[1](SimpleNamespace(exception=NoNodeError()))
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(client.armed) == 2, "requested again although the node does not exist"
    await client.fire("data")
    assert sorted(kind for kind, _ in client.armed) == ["children", "children", "data"]
