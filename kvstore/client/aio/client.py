"""The client for asyncio: `async with AsyncClient("kv://host:port,host:port") as client`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any, Self

from kvstore.client.aio.closing import ClosedAtExit
from kvstore.client.aio.engine import AsyncEngine
from kvstore.client.aio.watch import AsyncWatch
from kvstore.client.core import forks, operations
from kvstore.client.core.batch import Batch
from kvstore.client.core.cluster_view import ClusterView
from kvstore.client.core.config import ClientConfig, parse_url
from kvstore.client.core.fanout import PrefixDeletion, RangeCount, RangePage, RangeScan
from kvstore.client.core.first_state import FirstState
from kvstore.client.core.operation import ClientOperation
from kvstore.client.core.scanning import Bounds
from kvstore.client.core.values import Deleted, Item, Level, Meta, Page, Replaced, Token
from kvstore.client.core.watching import HEARTBEAT_S, WatchCursor, WatchedKeys
from kvstore.env.library_env import library_env
from kvstore.errors import InvalidRequest
from kvstore.proto import kv_pb2

NOT_OPEN = "the client is not open; use `async with AsyncClient(...)`"


class AsyncClient(ClosedAtExit):
    """The store's operations as coroutines. Concurrent calls are gathered into frames by themselves, so
    `await client.put(k, v)` in many tasks costs what a batch costs.

    Every call raises errors of `kvstore.errors` only: Refused was definitely not done, OutcomeUnknown may have been.
    Retries happen inside, until `timeout_s`, and are applied once. Use one client per event loop, made after a fork.
    """

    def __init__(self, cluster: str | ClientConfig) -> None:
        self._config = parse_url(cluster) if isinstance(cluster, str) else cluster
        self._engine: AsyncEngine | None = None
        self._run: Callable[[ClientOperation, float | None], Coroutine[Any, Any, Any]] = _refuse
        self._opening = asyncio.Lock()
        """Tasks that open the client at the same time find the cluster once."""

    async def open(self) -> Self:
        """Find the cluster. Raises Unavailable if no endpoint answers in time."""
        async with self._opening:
            if self._engine is None:
                engine = AsyncEngine(library_env("kvstore client"), self._config)
                try:
                    await engine.open()
                except BaseException:
                    await engine.close()
                    raise
                self._engine, self._run = engine, engine.run
            self._engine.check_caller()
        return self

    async def close(self) -> None:
        """End the connections. Calls under way end with an error."""
        if self._engine is not None:
            self._engine.check_closing()
        engine, self._engine = self._engine, None
        self._run = _refuse
        if engine is not None:
            await engine.close()

    __aenter__ = open

    # ── reads ──

    def get(
        self, key: bytes, *, level: Level = Level.LINEARIZABLE, timeout_s: float | None = None
    ) -> Coroutine[Any, Any, Item | None]:
        """The key's value and version; None if it is absent."""
        found: Coroutine[Any, Any, Item | None] = self._run(operations.get(key, level), timeout_s)
        return found

    async def meta(
        self, key: bytes, *, level: Level = Level.LINEARIZABLE, timeout_s: float | None = None
    ) -> Meta | None:
        """The same without the value."""
        found: Meta | None = await self._run(operations.meta(key, level), timeout_s)
        return found

    async def get_many(
        self, keys: Iterable[bytes], *, level: Level = Level.LINEARIZABLE, timeout_s: float | None = None
    ) -> dict[bytes, Item]:
        """Those of `keys` that are there. Each is read by itself: not one point in time."""
        wanted = list(dict.fromkeys(keys))
        found = await _opened(self._engine).run_all([operations.get(key, level) for key in wanted], timeout_s)
        return {key: item for key, item in zip(wanted, found, strict=True) if item is not None}

    async def scan(
        self,
        start: bytes = b"",
        end: bytes = b"",
        *,
        prefix: bytes = b"",
        limit: int = 0,
        keys_only: bool = False,
        reverse: bool = False,
        level: Level = Level.LINEARIZABLE,
        timeout_s: float | None = None,
    ) -> AsyncIterator[tuple[bytes, Item]]:
        """Keys in [start, end), or those that begin with `prefix`, in order, page by page; `timeout_s` is for a page.
        No `end`: to the last. No `limit`: all. `keys_only`: the values are empty. `reverse`: from the last key down. A
        key that is there all the time is given once. Raises InvalidRequest when iterated."""
        flags = kv_pb2.KEYS_ONLY * keys_only | kv_pb2.REVERSE * reverse
        bounds = Bounds.of(start, end, prefix)
        engine = _opened(self._engine)
        scan = RangeScan(engine.routing, bounds, limit=limit, level=level, flags=flags)
        while not scan.is_done:
            for found in scan.take(await engine.run_whole(scan.wanted(), timeout_s)):
                yield found

    async def keys(
        self,
        start: bytes = b"",
        end: bytes = b"",
        *,
        prefix: bytes = b"",
        limit: int = 0,
        reverse: bool = False,
        level: Level = Level.LINEARIZABLE,
        timeout_s: float | None = None,
    ) -> AsyncIterator[bytes]:
        """The keys alone of what `scan` gives. Servers read no record for them, so it costs the same however large the
        values are."""
        flags = kv_pb2.BARE | kv_pb2.REVERSE * reverse
        bounds = Bounds.of(start, end, prefix)
        engine = _opened(self._engine)
        scan = RangeScan(engine.routing, bounds, limit=limit, level=level, flags=flags)
        while not scan.is_done:
            for key, _ in scan.take(await engine.run_whole(scan.wanted(), timeout_s)):
                yield key

    async def page(
        self,
        token: str | None = None,
        *,
        prefix: bytes = b"",
        start: bytes = b"",
        end: bytes = b"",
        limit: int = 100,
        keys_only: bool = False,
        reverse: bool = False,
        level: Level = Level.LINEARIZABLE,
        timeout_s: float | None = None,
    ) -> Page:
        """Some keys of what `scan` gives, and the token of the next page; None: there is none. A page has at most
        `limit` keys (up to 10,000), and 1 MiB. A token knows its range and direction, and is good in every process, for
        as long as anybody keeps it, over failures of servers and moves of keys. Raises InvalidRequest for what is no
        token, or one of other bounds than are given beside it."""
        flags = kv_pb2.KEYS_ONLY * keys_only | kv_pb2.REVERSE * reverse
        bounds = Bounds.of(start, end, prefix)
        engine = _opened(self._engine)
        reading = RangePage(engine.routing, bounds, token, limit=limit, level=level, flags=flags)
        while not reading.is_done:
            reading.take(await engine.run_whole(reading.wanted(), timeout_s))
        return reading.page

    async def count(
        self,
        start: bytes = b"",
        end: bytes = b"",
        *,
        prefix: bytes = b"",
        level: Level = Level.LINEARIZABLE,
        timeout_s: float | None = None,
    ) -> int:
        """How many keys there are in [start, end), or that begin with `prefix`; or in all. Servers count, some thousand
        keys at a time, for each of which `timeout_s` is; the number of all keys they know, in which keys past their
        expiry are until they are deleted. Not one point in time."""
        engine = _opened(self._engine)
        count = RangeCount(engine.routing, level, Bounds.of(start, end, prefix))
        while count.total is None:
            count.take(await engine.run_whole(count.wanted(), timeout_s))
        return count.total

    def watch(
        self,
        key: bytes | None = None,
        *,
        prefix: bytes = b"",
        start: bytes = b"",
        end: bytes = b"",
        after: Token | None = None,
        with_state: bool = False,
        keys_only: bool = False,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> AsyncWatch:
        """The changes of a key, of a prefix, of [start, end), or of everything, as they happen: each put and delete
        once, those of one key in order, over failures of servers and moves of keys. From now on (from `ready`, or
        entering it), or behind `after`: the `position` of an earlier watch of the same keys. `with_state`: first what
        is there, as the changes that wrote it, in the order of keys, until `has_state`; then what changes from there
        on, without a gap and without anything twice. `heartbeat_s`: how often
        an idle watch hears of its server. Raises InvalidRequest here, other errors when iterated: PositionTrimmed if
        the log does not reach back to `after` any more."""
        watched = WatchedKeys.of(key, prefix, start, end, keys_only=keys_only, heartbeat_s=heartbeat_s)
        engine = _opened(self._engine)
        forks.check(engine)
        state = FirstState.of(watched, after, engine.seen, engine.absorb) if with_state else None
        reading = WatchCursor(watched, after, engine.seen.tokens)
        return AsyncWatch(
            engine.env,
            self._config,
            reading,
            lambda: engine.watchers_of(watched.key),
            state,
            lambda wanted: engine.run_whole(wanted, None),
            engine.check,
        )

    # ── writes ──

    def put(
        self,
        key: bytes,
        value: bytes,
        *,
        ttl_s: float | None = None,
        if_absent: bool = False,
        if_present: bool = False,
        if_version: int | None = None,
        keep_ttl: bool = False,
        timeout_s: float | None = None,
    ) -> Coroutine[Any, Any, int]:
        """Write, and return the new version. Raises ConditionFailed, with the version found, if a condition is not met.
        `if_version=0` is met by an absent key."""
        version: Coroutine[Any, Any, int] = self._run(
            operations.put(
                key,
                value,
                ttl_s=ttl_s,
                if_absent=if_absent,
                if_present=if_present,
                if_version=if_version,
                keep_ttl=keep_ttl,
            ),
            timeout_s,
        )
        return version

    async def replace(
        self,
        key: bytes,
        value: bytes,
        *,
        ttl_s: float | None = None,
        if_absent: bool = False,
        if_present: bool = False,
        if_version: int | None = None,
        timeout_s: float | None = None,
    ) -> Replaced:
        """Write, and return what was there before. A condition that is not met is no error here: see `applied`."""
        operation = operations.put(
            key,
            value,
            ttl_s=ttl_s,
            if_absent=if_absent,
            if_present=if_present,
            if_version=if_version,
            return_old=True,
        )
        replaced: Replaced = await self._run(operation, timeout_s)
        return replaced

    async def put_many(self, items: Mapping[bytes, bytes], *, timeout_s: float | None = None) -> dict[bytes, int]:
        """Write each by itself and return the versions. Not atomic: an error is raised after all have ended."""
        puts = [operations.put(key, value) for key, value in items.items()]
        return dict(zip(items, await _opened(self._engine).run_all(puts, timeout_s), strict=True))

    async def delete(self, key: bytes, *, if_version: int | None = None, timeout_s: float | None = None) -> int:
        """Delete, and return the sequence of it; 0 if the key was absent. Raises ConditionFailed."""
        sequence: int = await self._run(operations.delete(key, if_version=if_version), timeout_s)
        return sequence

    async def delete_prefix(
        self,
        prefix: bytes,
        *,
        token: str | None = None,
        on_progress: Callable[[Deleted], None] | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Delete all keys that begin with `prefix`, and return how many there were; `timeout_s` is for a batch of up to
        1,000. After each batch `on_progress` is told how many it were so far, and a token with which another call, in
        any process, goes on. Each key is deleted by itself: an error leaves the batch in part done. What is written
        meanwhile may stay. Raises InvalidRequest for an empty prefix, or a token of other keys."""
        engine = _opened(self._engine)
        deletion, deleted = PrefixDeletion(engine.routing, prefix, token), 0
        while not deletion.is_done:
            deletion.take(await engine.run_whole(deletion.wanted(), timeout_s))
            progress = deletion.deleted(await engine.run_all(deletion.deletes(), timeout_s))
            if progress is not None:
                deleted = progress.total
                if on_progress is not None:
                    on_progress(progress)
        return deleted

    async def pop(self, key: bytes, *, if_version: int | None = None, timeout_s: float | None = None) -> Item | None:
        """Delete, and return what was there. Raises ConditionFailed."""
        operation = operations.delete(key, if_version=if_version, return_old=True)
        old: Item | None = await self._run(operation, timeout_s)
        return old

    async def increment(self, key: bytes, delta: int = 1, *, timeout_s: float | None = None) -> int:
        """Add to the decimal number that the key holds (none: 0) and return the sum. Raises InvalidRequest if it holds
        no number of 64 bits."""
        value: int = await self._run(operations.increment(key, delta), timeout_s)
        return value

    async def append(self, key: bytes, suffix: bytes, *, timeout_s: float | None = None) -> int:
        """Lengthen the value and return its length."""
        length: int = await self._run(operations.append(key, suffix), timeout_s)
        return length

    async def expire(self, key: bytes, ttl_s: float | None, *, timeout_s: float | None = None) -> bool:
        """Let the key vanish after `ttl_s`, or never if None. False if it is absent."""
        changed: bool = await self._run(operations.expire(key, ttl_s), timeout_s)
        return changed

    async def batch(self, batch: Batch, *, timeout_s: float | None = None) -> list[Any]:
        """Carry out a batch atomically; one result for each operation, in order. Raises the error of the first that
        failed: then none was carried out. All keys must be in one partition, else InvalidRequest names both."""
        whole = operations.batch(batch.operations)
        return operations.decode_batch(batch.operations, await self._run(whole, timeout_s))

    # ── the session and the cluster ──

    @property
    def token(self) -> Token:
        """How far this client has seen each partition."""
        return _opened(self._engine).seen.token

    def absorb(self, token: Token) -> None:
        """From now on read at least as far as `token` says (with Level.SESSION; other levels check it)."""
        _opened(self._engine).absorb(token)

    @property
    def cluster(self) -> ClusterView:
        """This client's view of its cluster: partitions, their leaders, the date."""
        return ClusterView(_opened(self._engine))

    def statistics(self) -> dict[str, float]:
        """Counters since the client was opened, and gauges."""
        return _opened(self._engine).statistics()


def _opened(engine: AsyncEngine | None) -> AsyncEngine:
    if engine is None:
        raise InvalidRequest(NOT_OPEN)
    return engine


async def _refuse(operation: ClientOperation, timeout_s: float | None) -> Any:
    """Stand for the engine as long as there is none."""
    raise InvalidRequest(NOT_OPEN)
