"""The client for asyncio: `async with AsyncClient("kv://host:port,host:port") as client`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Self, TypeVar

from kvstore.client.aio.closing import ClosedAtExit
from kvstore.client.aio.engine import AsyncEngine
from kvstore.client.aio.transaction import AsyncTransaction
from kvstore.client.aio.watch import AsyncWatch
from kvstore.client.core import forks, operations
from kvstore.client.core.batch import Batch, operations_of
from kvstore.client.core.cluster_view import ClusterView
from kvstore.client.core.config import ClientConfig, as_config
from kvstore.client.core.fanout import PrefixDeletion, RangeCount, RangePage, RangeScan
from kvstore.client.core.first_state import FirstState
from kvstore.client.core.operation import ClientOperation
from kvstore.client.core.retries import pause_s, transaction_pauses
from kvstore.client.core.scanning import Bounds
from kvstore.client.core.values import Deleted, Item, Level, Meta, Page, Replaced, Token
from kvstore.client.core.watching import HEARTBEAT_S, WatchCursor, WatchedKeys
from kvstore.env.library_env import library_env
from kvstore.errors import InvalidRequest, Retryable, Unavailable
from kvstore.proto import kv_pb2

T = TypeVar("T")
NOT_OPEN = "the client is not open; use `async with AsyncClient(...)`"


class AsyncClient(ClosedAtExit):
    """The store's operations as coroutines, for one event loop.

    The client puts concurrent calls into one message by itself: `await client.put(key, value)` in many tasks costs as
    much as one batch. A key has 1 to 4,096 bytes, a value at most 1 MiB.

    Every call takes `timeout_s`, the maximum time for the call in seconds, retries included. The default is the
    `timeout_s` of the configuration, 5 s. The client retries by request id, so a retry is never applied twice.

    A call goes directly to the leader of the key's partition, so it costs one round trip unless its description says
    otherwise.

    All errors of calls are classes of `kvstore.errors`:

    - `Refused`: the request was definitely not carried out. `InvalidRequest` names a wrong argument, `Retryable` may
      succeed later, `PermissionDenied` and `NotAuthenticated` need an administrator.
    - `OutcomeUnknown`: a write may or may not have been carried out.

    Create the client after a fork, and use one client per event loop.

    Args:
        cluster: A URL like `kv://host:port,host:port`, or a `ClientConfig`. Some servers of the cluster are enough.

    Raises:
        ValueError: If the URL is malformed.

    Examples:
        >>> await client.put(b"greeting", b"hello") > 0
        True
        >>> found = await client.get(b"greeting")
        >>> found.value
        b'hello'
    """

    def __init__(self, cluster: str | ClientConfig) -> None:
        self._config = as_config(cluster)
        self._engine: AsyncEngine | None = None
        self._run: Callable[[ClientOperation, float | None], Coroutine[Any, Any, Any]] = _refuse
        self._opening = asyncio.Lock()
        """Lets tasks that open the client at the same time read the topology once."""
        self._closings = 0
        """How often the client was closed."""

    async def open(self) -> Self:
        """Connect to the cluster and read its topology. Entering the client does the same. Idempotent.

        Returns:
            The client itself.

        Raises:
            Unavailable: If no endpoint answers within `timeout_s` of the configuration, or the client is closed
                meanwhile.
            NotAuthenticated: If the servers reject the login.
            ConfigError: If a certificate, key or password file cannot be used.
        """
        async with self._opening:
            if self._engine is None:
                engine, closings = AsyncEngine(library_env("kvstore client"), self._config), self._closings
                try:
                    await engine.open()
                    if closings != self._closings:
                        raise Unavailable("the client is closed")
                except BaseException:
                    await engine.close()
                    raise
                self._engine, self._run = engine, engine.run
            self._engine.check_caller()
        return self

    async def close(self) -> None:
        """Close the connections. Calls in flight end with an error. Idempotent."""
        if self._engine is not None:
            self._engine.check_closing()
        engine, self._engine = self._engine, None
        self._run, self._closings = _refuse, self._closings + 1
        if engine is not None:
            await engine.close()

    __aenter__ = open

    # ── reads ──

    def get(
        self, key: bytes, *, level: Level = Level.LINEARIZABLE, timeout_s: float | None = None
    ) -> Coroutine[Any, Any, Item | None]:
        """Return the value of a key with its version and times, or None if the key is absent.

        Costs one round trip to the partition's leader. `Level.SESSION` and `Level.STALE` reads may go to any replica.

        Args:
            key: The key.
            level: How fresh the read must be.
            timeout_s: Maximum time for the call, in seconds.

        Raises:
            Unavailable: If no server that may answer does so in time.

        Examples:
            >>> version = await client.put(b"user/1", b"Ann")
            >>> found = await client.get(b"user/1")
            >>> found.value
            b'Ann'
            >>> await client.get(b"user/0") is None
            True
        """
        found: Coroutine[Any, Any, Item | None] = self._run(operations.get(key, level), timeout_s)
        return found

    async def meta(
        self, key: bytes, *, level: Level = Level.LINEARIZABLE, timeout_s: float | None = None
    ) -> Meta | None:
        """Return the length, version and times of a key without its value, or None if the key is absent.

        Costs one round trip. Use it instead of `get` for large values.

        Args:
            key: The key.
            level: How fresh the read must be.
            timeout_s: Maximum time for the call, in seconds.

        Examples:
            >>> version = await client.put(b"user/1", b"Ann")
            >>> found = await client.meta(b"user/1")
            >>> found.length
            3
        """
        found: Meta | None = await self._run(operations.meta(key, level), timeout_s)
        return found

    async def get_many(
        self, keys: Iterable[bytes], *, level: Level = Level.LINEARIZABLE, timeout_s: float | None = None
    ) -> dict[bytes, Item]:
        """Return the keys that are present, each with its value, version and times.

        Each key is read by itself, so the result is not one point in time. The client groups the reads by server, with
        some 500 in flight at a time.

        Args:
            keys: The keys. Repeated keys are read once.
            level: How fresh the reads must be.
            timeout_s: Maximum time for each key, in seconds.

        Raises:
            Unavailable: If a key could not be read in time. Raised after all reads have ended.

        Examples:
            >>> versions = await client.put_many({b"user/1": b"Ann", b"user/2": b"Bob"})
            >>> sorted(await client.get_many([b"user/1", b"user/2", b"user/3"]))
            [b'user/1', b'user/2']
        """
        wanted = operations.distinct(keys)
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
        """Iterate over keys and values in key order, read page by page.

        The range is [start, end), or all keys that begin with `prefix`. A key that is present during the whole scan is
        returned exactly once, also while keys move between partitions. The scan is not one point in time.

        Costs one request to each partition at first, then one request for each further page of up to 1,000 keys or 1
        MiB. A scan of one `{tag}` asks a single partition.

        Args:
            start: The first key of the range. Empty: from the first key of the store.
            end: The first key behind the range. Empty: to the last key of the store.
            prefix: Prefix of the keys, instead of `start` and `end`.
            limit: Maximum number of keys. 0: all.
            keys_only: Return empty values.
            reverse: Iterate from the last key to the first.
            level: How fresh the reads must be.
            timeout_s: Maximum time for each page, in seconds.

        Yields:
            A key and its item.

        Raises:
            InvalidRequest: If both a prefix and a range are given. Raised at the first iteration.
            Unavailable: If a page could not be read in time.

        Examples:
            >>> versions = await client.put_many({b"user/1": b"Ann", b"user/2": b"Bob"})
            >>> [item.value async for key, item in client.scan(prefix=b"user/")]
            [b'Ann', b'Bob']
        """
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
        """Iterate over keys alone, in key order.

        Returns the same keys as `scan`, in as many requests. Servers read no values, so the cost does not depend on
        their size.

        Args:
            start: The first key of the range. Empty: from the first key of the store.
            end: The first key behind the range. Empty: to the last key of the store.
            prefix: Prefix of the keys, instead of `start` and `end`.
            limit: Maximum number of keys. 0: all.
            reverse: Iterate from the last key to the first.
            level: How fresh the reads must be.
            timeout_s: Maximum time for each page, in seconds.

        Yields:
            A key.

        Raises:
            InvalidRequest: If both a prefix and a range are given. Raised at the first iteration.
            Unavailable: If a page could not be read in time.

        Examples:
            >>> versions = await client.put_many({b"user/1": b"Ann", b"user/2": b"Bob"})
            >>> [key async for key in client.keys(prefix=b"user/", reverse=True)]
            [b'user/2', b'user/1']
        """
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
        """Return one page of a scan, and the token of the next page.

        A token names its range and direction. Any process can use it at any time, also after failures of servers and
        moves of keys. A page ends after `limit` keys or 1 MiB of keys and values, so it may have fewer keys than
        `limit`, or none, although more pages follow.

        Args:
            token: The token of the page before. None: the first page.
            prefix: Prefix of the keys, instead of `start` and `end`.
            start: The first key of the range.
            end: The first key behind the range.
            limit: Maximum number of keys, 1 to 10,000.
            keys_only: Return empty values.
            reverse: Read from the last key to the first. Ignored with a token.
            level: How fresh the read must be.
            timeout_s: Maximum time for each request, in seconds.

        Returns:
            The items, and the token of the next page or None if there are no more keys.

        Raises:
            InvalidRequest: If the token is malformed or belongs to another range than the one given.

        Examples:
            >>> versions = await client.put_many({b"user/1": b"Ann", b"user/2": b"Bob"})
            >>> page = await client.page(prefix=b"user/", limit=1)
            >>> [key for key, item in page.items]
            [b'user/1']
            >>> page = await client.page(page.token, prefix=b"user/", limit=1)
            >>> [key for key, item in page.items]
            [b'user/2']
        """
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
        """Return the number of keys in [start, end), with a prefix, or in the whole store.

        The count of the whole store costs one request to each partition, and includes expired keys that are not deleted
        yet. For a range the servers count some thousand keys per request. The result is not one point in time.

        Args:
            start: The first key of the range.
            end: The first key behind the range.
            prefix: Prefix of the keys, instead of `start` and `end`.
            level: How fresh the reads must be.
            timeout_s: Maximum time for each request, in seconds.

        Examples:
            >>> versions = await client.put_many({b"user/1": b"Ann", b"user/2": b"Bob"})
            >>> await client.count(prefix=b"user/")
            2
        """
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
        """Watch the changes of a key, a prefix, a range, or the whole store.

        The watch returns each put and delete exactly once, and the changes of one key in order, also after failures of
        servers and moves of keys. It begins now, that is when `ready` returns or the watch is entered, unless `after`
        names a position.

        Args:
            key: Watch this key.
            prefix: Watch the keys that begin with this prefix.
            start: Watch the keys from this one on.
            end: Watch the keys before this one.
            after: Continue after this position, the `position` of an earlier watch of the same keys.
            with_state: First return the present keys as the changes that wrote them, in key order, until `has_state` is
                true. The changes that follow have no gap to that state and no duplicates.
            keys_only: Return empty values.
            heartbeat_s: Interval at which the server confirms an idle watch, in seconds, at most 86,400.

        Returns:
            The watch. It connects at the first `ready` or iteration.

        Raises:
            InvalidRequest: If the arguments contradict each other.
            PositionTrimmed: When iterated, if the log no longer reaches back to `after`.

        Examples:
            >>> async with client.watch(prefix=b"user/") as changes:  # doctest: +SKIP
            ...     version = await client.put(b"user/1", b"Ann")
            ...     change = await anext(changes)
            ...     change.key, change.item.value
            (b'user/1', b'Ann')
        """
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
        """Write a key and return its new version.

        Costs one round trip; the leader answers once the write is synced on two disks of three. Give at most one of
        `if_absent`, `if_present` and `if_version`, and not both `ttl_s` and `keep_ttl`.

        Args:
            key: The key.
            value: The value.
            ttl_s: Delete the key after this time, in seconds. None: the namespace's default, or never.
            if_absent: Write only if the key is absent.
            if_present: Write only if the key is present.
            if_version: Write only if the key has this version. 0: if it is absent.
            keep_ttl: Keep the expiry that the key has.
            timeout_s: Maximum time for the call, in seconds.

        Raises:
            ConditionFailed: If a condition is not met. `version` is the version found.
            QuotaExceeded: If the namespace has no capacity for the key or its bytes.
            OutcomeUnknown: If the write may have been carried out.

        Examples:
            >>> version = await client.put(b"counter", b"1", ttl_s=60)
            >>> await client.put(b"counter", b"2", if_version=version) > version
            True
        """
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
        """Write a key and return the item that it replaced.

        Like `put`, but an unmet condition raises no error: see `applied` in the result. Costs one round trip. Give at
        most one condition.

        Args:
            key: The key.
            value: The value.
            ttl_s: Delete the key after this time, in seconds. None: the namespace's default, or never.
            if_absent: Write only if the key is absent.
            if_present: Write only if the key is present.
            if_version: Write only if the key has this version. 0: if it is absent.
            timeout_s: Maximum time for the call, in seconds.

        Returns:
            True and the new version if the key was written, else False and the current version; and the old item.

        Raises:
            OutcomeUnknown: If the write may have been carried out.

        Examples:
            >>> version = await client.put(b"color", b"red")
            >>> replaced = await client.replace(b"color", b"blue")
            >>> replaced.applied, replaced.old.value
            (True, b'red')
        """
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
        """Write many keys and return their new versions.

        Each key is written by itself, not atomically; use `batch` for that. The client groups the writes by server,
        with some 500 in flight at a time.

        Args:
            items: Values by key.
            timeout_s: Maximum time for each key, in seconds.

        Returns:
            The new version of each key.

        Raises:
            StoreError: The first error, after all writes have ended. Other keys may have been written.

        Examples:
            >>> sorted(await client.put_many({b"user/1": b"Ann", b"user/2": b"Bob"}))
            [b'user/1', b'user/2']
        """
        items = operations.as_mapping("items", items, "keys to values")
        puts = [operations.put(key, value) for key, value in items.items()]
        return dict(zip(items, await _opened(self._engine).run_all(puts, timeout_s), strict=True))

    async def delete(self, key: bytes, *, if_version: int | None = None, timeout_s: float | None = None) -> int:
        """Delete a key and return the sequence of the deletion, or 0 if the key was absent.

        Costs one round trip.

        Args:
            key: The key.
            if_version: Delete only if the key has this version.
            timeout_s: Maximum time for the call, in seconds.

        Raises:
            ConditionFailed: If the key has another version. `version` is the version found.
            OutcomeUnknown: If the deletion may have been carried out.

        Examples:
            >>> await client.delete(b"absent")
            0
        """
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
        """Delete all keys that begin with a prefix, and return how many were deleted.

        Deletes in batches of up to 1,000 keys, each key by itself: an error may leave a batch partly done. Keys that
        others write meanwhile may remain. Each batch costs one read of its keys and one write for each key.

        Args:
            prefix: The prefix, at least one byte.
            token: Continue a deletion that another call has begun: the `token` of its last progress.
            on_progress: Called after each batch with the number of keys deleted so far and a token.
            timeout_s: Maximum time for each request, in seconds.

        Raises:
            InvalidRequest: If the prefix is empty, or the token belongs to other keys.

        Examples:
            >>> versions = await client.put_many({b"old/1": b"", b"old/2": b""})
            >>> await client.delete_prefix(b"old/")
            2
        """
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
        """Delete a key and return the item that it held, or None if the key was absent.

        Costs one round trip.

        Args:
            key: The key.
            if_version: Delete only if the key has this version.
            timeout_s: Maximum time for the call, in seconds.

        Raises:
            ConditionFailed: If the key has another version. `version` is the version found.
            OutcomeUnknown: If the deletion may have been carried out.

        Examples:
            >>> version = await client.put(b"job/1", b"run")
            >>> found = await client.pop(b"job/1")
            >>> found.value
            b'run'
        """
        operation = operations.delete(key, if_version=if_version, return_old=True)
        old: Item | None = await self._run(operation, timeout_s)
        return old

    async def increment(self, key: bytes, delta: int = 1, *, timeout_s: float | None = None) -> int:
        """Add to the decimal number that a key holds, and return the sum.

        An absent key counts as 0. Costs one round trip, and is applied exactly once also when retried.

        Args:
            key: The key.
            delta: The number to add, a signed 64-bit integer.
            timeout_s: Maximum time for the call, in seconds.

        Raises:
            InvalidRequest: If the key does not hold a decimal 64-bit integer, or the sum is not one.
            OutcomeUnknown: If the addition may have been carried out.

        Examples:
            >>> await client.increment(b"visits", 5)
            5
            >>> await client.increment(b"visits")
            6
        """
        value: int = await self._run(operations.increment(key, delta), timeout_s)
        return value

    async def append(self, key: bytes, suffix: bytes, *, timeout_s: float | None = None) -> int:
        """Append to the value of a key, and return the new length in bytes.

        An absent key counts as empty. Costs one round trip.

        Args:
            key: The key.
            suffix: The bytes to append.
            timeout_s: Maximum time for the call, in seconds.

        Raises:
            OutcomeUnknown: If the bytes may have been appended.

        Examples:
            >>> await client.append(b"log", b"begin;"), await client.append(b"log", b"end;")
            (6, 10)
        """
        length: int = await self._run(operations.append(key, suffix), timeout_s)
        return length

    async def expire(self, key: bytes, ttl_s: float | None, *, timeout_s: float | None = None) -> bool:
        """Set or remove the expiry of a key, and return True if the key is present.

        Costs one round trip.

        Args:
            key: The key.
            ttl_s: Delete the key after this time, in seconds. None: never.
            timeout_s: Maximum time for the call, in seconds.

        Raises:
            OutcomeUnknown: If the expiry may have been set.

        Examples:
            >>> await client.expire(b"absent", 60.0)
            False
        """
        changed: bool = await self._run(operations.expire(key, ttl_s), timeout_s)
        return changed

    async def batch(self, batch: Batch, *, timeout_s: float | None = None) -> list[Any]:
        """Carry out a batch atomically, and return one result for each operation, in order.

        All keys must belong to one partition; keys that share a `{tag}` do. Costs one round trip.

        Args:
            batch: Up to 10,000 operations.
            timeout_s: Maximum time for the call, in seconds.

        Raises:
            ConditionFailed: If a condition is not met. No operation was carried out. The same holds for the other
                errors of an operation.
            InvalidRequest: If the keys belong to several partitions, or the batch is empty or too large.
            OutcomeUnknown: If the batch may have been carried out.

        Examples:
            >>> from kvstore.client import Batch
            >>> batch = Batch().put(b"{cart}/total", b"5").increment(b"{cart}/items")
            >>> found = await client.batch(batch)
            >>> found[1]
            1
        """
        parts = operations_of(batch)
        return operations.decode_batch(parts, await self._run(operations.batch(parts), timeout_s))

    def transaction(self, *, timeout_s: float | None = None) -> AsyncTransaction:
        """Return a transaction, for use in `async with`: reads and writes of keys of any partitions, at one moment.

        Costs one round trip for each read and one for the commit. A commit over several partitions takes as long as two
        writes one after the other; a commit in one partition takes as long as one write. A transaction without writes
        appends nothing to a log.

        Args:
            timeout_s: Maximum time for each read and for the commit, in seconds.

        Raises:
            Conflict: At the end of the block, if what the transaction has read has changed. Nothing was written. Use
                `transact` to run it again by itself.

        Examples:
            >>> version = await client.put(b"ann", b"10")
            >>> async with client.transaction() as txn:
            ...     ann = await txn.get(b"ann")
            ...     txn.put(b"ann", b"%d" % (int(ann.value) - 3))
            ...     txn.increment(b"bob", 3)
            >>> found = await client.get_many([b"ann", b"bob"])
            >>> found[b"ann"].value, found[b"bob"].value
            (b'7', b'3')
        """
        return AsyncTransaction(_opened(self._engine), timeout_s)

    async def transact(
        self,
        function: Callable[[AsyncTransaction], Awaitable[T]],
        *,
        attempts: int = 10,
        timeout_s: float | None = None,
    ) -> T:
        """Run a function in a transaction, commit, and return the function's result. Run it again after a conflict.

        The function gets the transaction. It may run several times, so it should have no other effects. Between two
        attempts the client pauses for a random time, which grows to half a second.

        An exception of the function ends the call, and nothing is written. If what the function has read has changed
        meanwhile, the function runs again instead, so the exception never follows from values of different moments.

        Args:
            function: The work. It reads and writes through the transaction.
            attempts: Maximum number of runs.
            timeout_s: Maximum time for each read and each commit, in seconds.

        Raises:
            Conflict: If every attempt met other transactions. The same holds for other errors after which a retry may
                succeed: nothing was written.
            ConditionFailed: If a condition given to `check` or `put` is not met.
            OutcomeUnknown: If the writes may have been carried out. The client has retried the commit under its request
                id, but does not run the function again.

        Examples:
            >>> async def withdraw(txn):
            ...     balance = await txn.get(b"balance")
            ...     left = int(balance.value) - 3 if balance else 97
            ...     txn.put(b"balance", b"%d" % left)
            ...     return left
            >>> await client.transact(withdraw), await client.transact(withdraw)
            (97, 94)
        """
        if not isinstance(attempts, int) or attempts < 1:
            raise InvalidRequest(f"expected at least 1 attempt, got {attempts!r}")
        engine = _opened(self._engine)
        waits = transaction_pauses(engine.env.random)
        for left in reversed(range(attempts)):
            try:
                return await AsyncTransaction(engine, timeout_s).attempt(function)
            except Retryable as error:
                if not left:
                    raise
                await engine.pause(pause_s(error, waits))
        raise AssertionError("the last attempt returns or raises")

    # ── the session and the cluster ──

    @property
    def token(self) -> Token:
        """Sequences that this client has seen of each partition. Pass it to `absorb` of another client."""
        return _opened(self._engine).seen.token

    def absorb(self, token: Token) -> None:
        """Read at least as far as another client has seen.

        Later `Level.SESSION` reads wait for that position at the replica; other levels check it. Costs nothing.

        Args:
            token: The `token` of the other client.

        Raises:
            InvalidRequest: If the client is not open.
        """
        _opened(self._engine).absorb(token)

    @property
    def cluster(self) -> ClusterView:
        """This client's view of its cluster: partitions, their leaders, and the cluster's time. Costs no request."""
        return ClusterView(_opened(self._engine))

    def statistics(self) -> dict[str, float]:
        """Return counters since the client was opened, and gauges.

        Counters: `failed_<class of error>`, attempts that ended with this error; `retries`, attempts that followed;
        `frames`, messages sent. The gauge `ring_version` rises when partitions join or leave. Each kind of client adds
        its own counts, such as its connections.
        """
        return _opened(self._engine).statistics()


def _opened(engine: AsyncEngine | None) -> AsyncEngine:
    if engine is None:
        raise InvalidRequest(NOT_OPEN)
    return engine


async def _refuse(operation: ClientOperation, timeout_s: float | None) -> Any:
    """Reject calls while the client is not open."""
    raise InvalidRequest(NOT_OPEN)
