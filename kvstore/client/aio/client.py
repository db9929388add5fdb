"""The client for asyncio: `async with AsyncClient("kv://host:port,host:port") as client`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from kvstore.client.aio.engine import AsyncEngine
from kvstore.client.aio.watch import AsyncWatch
from kvstore.client.core import operations
from kvstore.client.core.batch import Batch
from kvstore.client.core.config import ClientConfig, parse_url
from kvstore.client.core.fanout import Count, Scan
from kvstore.client.core.known import Known
from kvstore.client.core.operation import Operation
from kvstore.client.core.scanning import scan_bounds
from kvstore.client.core.values import Item, Level, Meta, Replaced, Token
from kvstore.client.core.watching import HEARTBEAT_S, Reading, Watched
from kvstore.env.library_env import library_env
from kvstore.errors import InvalidRequest

NOT_OPEN = "the client is not open; use `async with AsyncClient(...)`"


class AsyncClient:
    """The store's operations as coroutines. Concurrent calls are gathered into frames by themselves, so
    `await client.put(k, v)` in many tasks costs what a batch costs.

    Every call raises errors of `kvstore.errors` only: Refused was definitely not done, OutcomeUnknown may have been.
    Retries happen inside, until `timeout_s`, and are applied once. Use one client per event loop, made after a fork.
    """

    def __init__(self, cluster: str | ClientConfig) -> None:
        self._config = parse_url(cluster) if isinstance(cluster, str) else cluster
        self._engine: AsyncEngine | None = None
        self._run: Callable[[Operation, float | None], Coroutine[Any, Any, Any]] = _refuse
        self._opening = asyncio.Lock()

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
        return self

    async def close(self) -> None:
        """End the connections. Calls under way end with an error."""
        engine, self._engine = self._engine, None
        self._run = _refuse
        if engine is not None:
            await engine.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ── reads ──

    def get(
        self, key: bytes, *, level: Level = Level.LINEARIZABLE, timeout_s: float | None = None
    ) -> Coroutine[Any, Any, Item | None]:
        """The key's value and version; None if it is absent."""
        return self._run(operations.get(key, level), timeout_s)

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
        found = await self._open_engine.run_all([operations.get(key, level) for key in wanted], timeout_s)
        return {key: item for key, item in zip(wanted, found, strict=True) if item is not None}

    async def scan(
        self,
        start: bytes = b"",
        end: bytes = b"",
        *,
        prefix: bytes = b"",
        limit: int = 0,
        keys_only: bool = False,
        level: Level = Level.LINEARIZABLE,
        timeout_s: float | None = None,
    ) -> AsyncIterator[tuple[bytes, Item]]:
        """Keys in [start, end), or those that begin with `prefix`, in order, page by page; `timeout_s` is for a page.
        No `end`: to the last. No `limit`: all. `keys_only`: the values are empty. A key that is there all the time is
        given once."""
        start, end = scan_bounds(start, end, prefix)
        scan = Scan(self._open_engine.routing, start, end, limit=limit, keys_only=keys_only, level=level)
        while not scan.is_done:
            for found in scan.take(await self._open_engine.run_whole(scan.wanted(), timeout_s)):
                yield found

    async def count(self, *, level: Level = Level.LINEARIZABLE, timeout_s: float | None = None) -> int:
        """How many keys there are, counted partition by partition."""
        count = Count(self._open_engine.routing, level)
        while count.total is None:
            count.take(await self._open_engine.run_whole(count.wanted(), timeout_s))
        return count.total

    def watch(
        self,
        key: bytes | None = None,
        *,
        prefix: bytes = b"",
        start: bytes = b"",
        end: bytes = b"",
        after: Token | None = None,
        keys_only: bool = False,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> AsyncWatch:
        """The changes of a key, of a prefix, of [start, end), or of everything, as they happen: each put and delete
        once, those of one key in order, over failures of servers and moves of keys. From now on (from `ready`, or
        entering it), or behind `after`: the `position` of an earlier watch of the same keys. `heartbeat_s`: how often
        an idle watch hears of its server. Raises InvalidRequest here, other errors when iterated: PositionTrimmed if
        the log does not reach back to `after` any more."""
        watched = Watched.of(key, prefix, start, end, keys_only=keys_only, heartbeat_s=heartbeat_s)
        engine = self._open_engine
        reading = Reading(watched, after, engine.seen.tokens)
        return AsyncWatch(
            engine.env,
            self._config,
            reading,
            lambda: engine.routing.watchers_of(watched.key, engine.env.random, self._config.endpoints),
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
        return self._run(
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
        return dict(zip(items, await self._open_engine.run_all(puts, timeout_s), strict=True))

    async def delete(self, key: bytes, *, if_version: int | None = None, timeout_s: float | None = None) -> int:
        """Delete, and return the sequence of it; 0 if the key was absent. Raises ConditionFailed."""
        sequence: int = await self._run(operations.delete(key, if_version=if_version), timeout_s)
        return sequence

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
        return self._open_engine.seen.token

    def absorb(self, token: Token) -> None:
        """From now on read at least as far as `token` says (with Level.SESSION; other levels check it)."""
        self._open_engine.seen.absorb(token)

    @property
    def cluster(self) -> Known:
        """This client's view of its cluster: partitions, their leaders, the date."""
        return Known(self._open_engine)

    def statistics(self) -> dict[str, float]:
        """Counters since the client was opened, and gauges."""
        return self._open_engine.statistics()

    @property
    def _open_engine(self) -> AsyncEngine:
        if self._engine is None:
            raise InvalidRequest(NOT_OPEN)
        return self._engine


async def _refuse(operation: Operation, timeout_s: float | None) -> Any:
    """Stand for the engine as long as there is none."""
    raise InvalidRequest(NOT_OPEN)
