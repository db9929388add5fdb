"""Watching users. Each follows one key or all keys through any node, disconnects at random, continues at another
node from its position, and compares the changes that it received with the answers of the writers."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from itertools import islice
from random import Random
from typing import Any

from kvstore.client.core.watching import Change, WatchCursor, WatchedKeys, is_final
from kvstore.errors import ConditionFailed, StoreError
from kvstore.partition.state.commands import Code, Put
from kvstore.proto import kv_pb2
from kvstore.server.feed.watch import send_watch
from tests.sim.cluster import Cluster
from tests.sim.judges.operations import Operation, Status
from tests.sim.judges.probes import declare, probe
from tests.sim.nodes import Node

declare("watch.went_on_elsewhere", "watch.node_died")

PATIENCE_S = 3.0
"""Seconds without a message after which a watcher leaves a node."""
STAY_S = 1.5
"""Mean time in seconds that a watcher stays with a node."""
CAUGHT_UP_S_MAX = 60.0


class Stream:
    """A stream from a node to a watcher, with one message in flight at a time."""

    def __init__(self) -> None:
        self.messages: deque[kv_pb2.WatchResponse] = deque()
        self.error: StoreError | None = None
        self.news, self._taken = asyncio.Event(), asyncio.Event()

    async def write(self, message: kv_pb2.WatchResponse) -> None:
        """Send a message. Called on the node."""
        self.messages.append(kv_pb2.WatchResponse.FromString(message.SerializeToString()))
        self._taken.clear()
        self.news.set()
        await self._taken.wait()

    def end(self, error: StoreError) -> None:
        self.error = error
        self.news.set()

    async def read(self) -> kv_pb2.WatchResponse:
        """Return the next message. Raises the error that ended the watch, or TimeoutError. Called by the watcher."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.messages:
                if self.error is not None:
                    raise self.error
                self.news.clear()
                await self.news.wait()
        self._taken.set()
        return self.messages.popleft()


class Watcher:
    """One watcher. It begins at once; call `check` when all writers have stopped."""

    def __init__(self, cluster: Cluster, random: Random, key: bytes | None = None) -> None:
        self.changes: list[Change] = []
        self.ready_at: float | None = None
        self.positions: list[dict[str, int]] = []
        self._cluster, self._random, self._key = cluster, random, key
        watched = WatchedKeys.of(key, b"", b"", b"", keys_only=False, heartbeat_s=0.3)
        self._reading = WatchCursor(watched, None, {})
        self._failure: StoreError | None = None
        self._checked = 0
        self._latest: dict[bytes, int] = {}
        """By key: the last version among the checked changes."""
        self._is_ready = asyncio.Event()
        self._is_here = asyncio.Event()
        self._is_here.set()
        self._task = cluster.spawn(self._live(), name="watcher")

    async def ready(self) -> None:
        await self._is_ready.wait()

    def stay_away(self) -> None:
        """Watch through no node until `come_back`."""
        self._is_here.clear()

    def come_back(self) -> None:
        self._is_here.set()

    async def _live(self) -> None:
        while self._failure is None:
            await self._is_here.wait()
            node = self._random.choice(self._cluster.servers)
            if node.endpoint is None or not hasattr(node.served, "feeds"):
                await asyncio.sleep(0.05)
                continue
            await self._stay(node)
            probe("watch.went_on_elsewhere")

    async def _stay(self, node: Node) -> None:
        """Watch through one node until the node dies, falls silent, or the watcher leaves."""
        assert node.endpoint is not None
        process, stream = node.endpoint[0], Stream()
        serving: Any = process.context.run(self._serve, node, stream)
        process.on_death.append(stream.news.set)
        until = asyncio.get_running_loop().time() + self._random.expovariate(1 / STAY_S)
        try:
            while asyncio.get_running_loop().time() < until and self._is_here.is_set():
                if not process.alive:
                    probe("watch.node_died")
                    return
                if not self._take(await stream.read()):
                    return
        except TimeoutError:
            return
        except StoreError as error:
            if is_final(error):
                self._failure = error
        finally:
            with contextlib.suppress(ValueError):
                process.on_death.remove(stream.news.set)
            if process.alive:
                serving.cancel()
            await asyncio.sleep(self._random.uniform(0, 0.05))

    def _serve(self, node: Node, stream: Stream) -> Any:
        """Serve the watch on the node."""
        served, request = node.served, self._reading.request()
        assert served is not None

        async def serve() -> None:
            try:
                await send_watch(served.feeds, request, stream)
            except StoreError as error:
                stream.end(error)

        return served.env.nursery.spawn(serve(), name="watch")

    def _take(self, message: kv_pb2.WatchResponse) -> bool:
        """Take a message. Return False if the rest of the message is lost in transit and has to be requested again."""
        self._reading.take(message)
        if self.ready_at is None:
            self.ready_at = asyncio.get_running_loop().time()
            self._is_ready.set()
        while self._reading.has_more:
            self.changes.append(self._reading.give())
            if self._random.random() < 0.01:
                break
        self._check_order()
        return not self._reading.has_more

    def _check_order(self) -> None:
        for change in islice(self.changes, self._checked, None):
            if change.version <= self._latest.get(change.key, 0):
                self._cluster.broken(f"F3 {change} is shown after version {self._latest[change.key]}")
                return
            self._latest[change.key] = change.version
        self._checked = len(self.changes)

    # ── judging ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def check(self) -> None:
        """Raise AssertionError unless every write was shown exactly once."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CAUGHT_UP_S_MAX
        while missing := self._missing():
            assert self._failure is None, f"the watch of {self._key!r} ended: {self._failure!r}"
            assert loop.time() < deadline, f"never shown to the watch of {self._key!r}: {missing[:3]}"
            await asyncio.sleep(0.1)
        self._task.cancel()
        self._check_order()
        self._check_not_made_up()

    def _writes(self) -> list[Operation]:
        writes = [each for each in self._cluster.recorder.operations if each.is_write]
        return [each for each in writes if self._key is None or each.key == self._key]

    def _missing(self) -> list[Operation]:
        """Return the writes that succeeded, began after the watch, and were not shown."""
        assert self.ready_at is not None, "the watch never began"
        shown = {(change.key, change.version) for change in self.changes}
        known = [each for each in self._writes() if each.status is Status.OK and each.began >= self.ready_at]
        return [each for each in known if (version := _version_of(each)) and (each.key, version) not in shown]

    def _check_not_made_up(self) -> None:
        """Check that each change is a requested write and that none is shown twice."""
        shown = Counter((change.key, change.version) for change in self.changes)
        twice = [each for each, count in shown.items() if count > 1]
        assert not twice, f"shown twice: {twice}"
        asked = {(each.key, each.op.value) for each in self._writes() if isinstance(each.op, Put)}
        for change in self.changes:
            if change.key[:1] == b"k" and change.item is not None:
                assert (change.key, change.item.value) in asked, f"no client wrote {change}"
                assert change.item.version == change.version
        failed = [each.op for each in self._writes() if each.status is Status.FAIL]
        refused = {op.value for op in failed if isinstance(op, Put)}
        wrong = [change for change in self.changes if change.item is not None and change.item.value in refused]
        assert not wrong, f"refused, but shown: {wrong}"


def _version_of(operation: Operation) -> int:
    """Return the version in the answer to a write, or 0 if the write changed nothing."""
    result = operation.result
    if isinstance(result, ConditionFailed):
        return 0
    if operation.code is Code.INCREMENT:
        return int(result[1])
    return int(result) if operation.code in (Code.PUT, Code.DELETE) else 0
