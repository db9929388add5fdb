"""Standing watches on top of ZooKeeper's one-shot watches.

A one-shot watch is used up by its event and ends with its connection. Here it is armed again before anybody is called,
so a caller that reads then sees everything that changed while it was not armed: the server handles the requests of one
session in order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from kazoo import exceptions as kazoo
from kazoo.protocol.states import EventType, WatchedEvent

from kvstore.meta.watch_call import WatchCall
from kvstore.meta.zookeeper.session import GuardedClient, NotSent

log = logging.getLogger(__name__)

REARM_S = 10.0
"""Seconds until a watch is requested again that the server refused for a temporary reason, such as throttling."""


class RearmedWatch:
    """The server's two one-shot watches of one path, for its existence and data and for its children, armed while there
    are callers."""

    def __init__(self, path: str, loop: asyncio.AbstractEventLoop, among: dict[str, RearmedWatch]) -> None:
        self.watches: list[PathWatch] = []
        self._path, self._loop, self._among = path, loop, among
        self._client: GuardedClient | None = None
        self._is_armed = {"data": False, "children": False}
        self._generation = 0
        """Rises with each connection: events of an earlier one are stale."""
        self._births = 0
        """Rises with each event of the data watch, including creations."""

    def join(self, changed: Callable[[], None]) -> PathWatch:
        """Add a caller."""
        return PathWatch(self, changed)

    def renew(self, client: GuardedClient) -> None:
        """Arm again on a new connection: the old watches ended with the old one, and anything may have changed."""
        self._generation += 1
        self._is_armed = dict.fromkeys(self._is_armed, False)
        self._rearm_and_call(client)

    def arm(self, client: GuardedClient) -> None:
        """Request the watches that are not armed. If the connection breaks meanwhile, the next one arms all again."""
        self._client = client
        if not self._is_armed["data"]:
            self._ask("data", client.exists_async)
        if not self._is_armed["children"]:
            self._ask("children", client.get_children_async)

    def _rearm_and_call(self, client: GuardedClient) -> None:
        if not self.watches:
            if (
                self._among.get(self._path) is self
            ):  # else it was removed by an earlier event, and there may be a new one
                del self._among[self._path]
            return
        self.arm(client)
        for watch in list(self.watches):
            watch.call_soon()

    def _ask(self, kind: str, request: Callable[..., Any]) -> None:
        fired = partial(self._fired, kind, self._generation)
        with suppress(NotSent):
            self._is_armed[kind] = True
            answered = partial(self._answered, kind, self._generation, self._births)
            request(self._path, watch=fired).rawlink(answered)
            return
        self._is_armed[kind] = False

    def _fired(self, kind: str, generation: int, event: WatchedEvent) -> None:
        """Pass on an event, on a thread of kazoo's."""
        if event.type != EventType.NONE:  # the connection broke: the next one calls
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._on_event, kind, generation)

    def _answered(self, kind: str, generation: int, births: int, answer: Any) -> None:
        """Pass on a refusal, on a thread of kazoo's."""
        if answer.exception is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._on_refusal, kind, generation, births, answer.exception)

    def _on_refusal(self, kind: str, generation: int, births: int, error: Exception) -> None:
        """Handle a refused watch. If there is no node whose children could be watched, its creation will be reported,
        or has been already: events and answers come by different threads."""
        if generation != self._generation:
            return
        self._is_armed[kind] = False
        if births != self._births and self._client is not None:
            self._rearm_and_call(self._client)
        if not isinstance(error, kazoo.NoNodeError | kazoo.ConnectionLoss | kazoo.SessionExpiredError):
            log.warning("cannot watch path=%s: %s", self._path, type(error).__name__)
            self._loop.call_later(REARM_S, self._ask_again, kind, generation)

    def _ask_again(self, kind: str, generation: int) -> None:
        """Request a refused watch again. The connection works, so nothing else would arm it, and changes meanwhile were
        not reported."""
        if generation == self._generation and not self._is_armed[kind] and self._client is not None:
            self._rearm_and_call(self._client)

    def _on_event(self, kind: str, generation: int) -> None:
        if generation != self._generation:
            return
        self._is_armed[kind] = False
        self._births += kind == "data"
        if self._client is not None:
            self._rearm_and_call(self._client)


class PathWatch:
    """One caller's watch of a path."""

    def __init__(self, standing: RearmedWatch, changed: Callable[[], None]) -> None:
        self._standing = standing
        self.call_soon = WatchCall(changed, lambda: self in standing.watches).call_soon
        standing.watches.append(self)

    def close(self) -> None:
        if self in self._standing.watches:
            self._standing.watches.remove(self)
