"""A client for values of an application's own types, on top of a client for bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Generic, TypeVar

from kvstore.client.aio.client import AsyncClient
from kvstore.client.aio.transaction import AsyncTransaction
from kvstore.client.core.codecs import Codec, Coding, TypedItem, TypedReplaced
from kvstore.client.core.operations import as_mapping
from kvstore.client.core.retries import ATTEMPTS_MAX, contended
from kvstore.client.core.values import Item, Level
from kvstore.errors import ConditionFailed

T = TypeVar("T")


class AsyncTypedTransaction(Generic[T]):
    """The calls of a transaction that carry values, which a codec encodes and decodes.

    Create it with `AsyncTypedClient.within`. For all other calls, for example `delete`, use the transaction itself.
    """

    def __init__(self, transaction: AsyncTransaction, coding: Coding[T]) -> None:
        self._transaction, self._coding = transaction, coding

    async def get(self, key: bytes, *, level: Level = Level.LINEARIZABLE) -> TypedItem[T] | None:
        """Return the decoded value of a key as the transaction sees it, or None. See `AsyncTransaction.get`."""
        return self._coding.decode_or_none(key, await self._transaction.get(key, level=level))

    async def get_many(self, keys: Iterable[bytes], *, level: Level = Level.LINEARIZABLE) -> dict[bytes, TypedItem[T]]:
        """Return the keys that are present, each with its decoded value. See `AsyncTransaction.get_many`."""
        found = await self._transaction.get_many(keys, level=level)
        return {key: self._coding.decode(key, item) for key, item in found.items()}

    def put(
        self,
        key: bytes,
        value: T,
        *,
        ttl_s: float | None = None,
        if_absent: bool = False,
        if_present: bool = False,
        if_version: int | None = None,
        keep_ttl: bool = False,
    ) -> None:
        """Write a key at the commit. See `AsyncTransaction.put`."""
        self._transaction.put(
            key,
            self._coding.encode(key, value),
            ttl_s=ttl_s,
            if_absent=if_absent,
            if_present=if_present,
            if_version=if_version,
            keep_ttl=keep_ttl,
        )


class AsyncTypedClient(Generic[T]):
    """The calls of an `AsyncClient` that carry values, which a codec encodes and decodes. Keys stay bytes.

    For all other calls, for example `delete`, use the client itself. Several typed clients with different codecs may
    share one client.

    Args:
        client: The client that carries the calls.
        codec: `json_codec()`, `typed_codec(...)`, or an object with `encode` and `decode`.

    Raises:
        InvalidRequest: If the codec cannot encode a value. Nothing is sent.
        Corrupted: If the codec cannot decode the stored bytes. Names the key.

    Examples:
        >>> from kvstore.client import json_codec
        >>> users = AsyncTypedClient(client, json_codec())
        >>> version = await users.put(b"user/1", {"name": "Ann"})
        >>> found = await users.get(b"user/1")
        >>> found.value
        {'name': 'Ann'}
    """

    def __init__(self, client: AsyncClient, codec: Codec[T]) -> None:
        self._client, self._coding = client, Coding(codec)

    async def get(
        self, key: bytes, *, level: Level = Level.LINEARIZABLE, timeout_s: float | None = None
    ) -> TypedItem[T] | None:
        """Return the decoded value of a key with its version and times, or None if the key is absent. See
        `AsyncClient.get`."""
        return self._coding.decode_or_none(key, await self._client.get(key, level=level, timeout_s=timeout_s))

    async def get_many(
        self, keys: Iterable[bytes], *, level: Level = Level.LINEARIZABLE, timeout_s: float | None = None
    ) -> dict[bytes, TypedItem[T]]:
        """Return the keys that are present, each with its decoded value. See `AsyncClient.get_many`."""
        found = await self._client.get_many(keys, level=level, timeout_s=timeout_s)
        return {key: self._coding.decode(key, item) for key, item in found.items()}

    async def scan(
        self,
        start: bytes = b"",
        end: bytes = b"",
        *,
        prefix: bytes = b"",
        limit: int = 0,
        level: Level = Level.LINEARIZABLE,
        timeout_s: float | None = None,
    ) -> AsyncIterator[tuple[bytes, TypedItem[T]]]:
        """Iterate over keys and decoded values in key order. See `AsyncClient.scan`."""
        found = self._client.scan(start, end, prefix=prefix, limit=limit, level=level, timeout_s=timeout_s)
        async for key, item in found:
            yield key, self._coding.decode(key, item)

    async def put(
        self,
        key: bytes,
        value: T,
        *,
        ttl_s: float | None = None,
        if_absent: bool = False,
        if_present: bool = False,
        if_version: int | None = None,
        keep_ttl: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """Write a key and return its new version. See `AsyncClient.put`."""
        return await self._client.put(
            key,
            self._coding.encode(key, value),
            ttl_s=ttl_s,
            if_absent=if_absent,
            if_present=if_present,
            if_version=if_version,
            keep_ttl=keep_ttl,
            timeout_s=timeout_s,
        )

    async def replace(
        self,
        key: bytes,
        value: T,
        *,
        ttl_s: float | None = None,
        if_absent: bool = False,
        if_present: bool = False,
        if_version: int | None = None,
        timeout_s: float | None = None,
    ) -> TypedReplaced[T]:
        """Write a key and return the item that it replaced. See `AsyncClient.replace`.

        Costs two round trips, each with `timeout_s`: the old value is read first, because a value that cannot be
        decoded is not overwritten.

        Raises:
            Overloaded: If other clients changed the key between read and write 1,000 times in a row.
        """
        data = self._coding.encode(key, value)
        for _ in range(ATTEMPTS_MAX):
            found = await self._client.get(key, timeout_s=timeout_s)
            version = 0 if found is None else found.version
            old = self._coding.decode_or_none(key, found)
            is_refused = version > 0 if if_absent else if_present and version == 0
            if is_refused or (if_version is not None and version != if_version):
                return TypedReplaced(False, version, old)
            done = await self._client.replace(key, data, ttl_s=ttl_s, if_version=version, timeout_s=timeout_s)
            if done.applied:
                return TypedReplaced(True, done.version, old)
        raise contended(key)

    async def put_many(self, items: Mapping[bytes, T], *, timeout_s: float | None = None) -> dict[bytes, int]:
        """Write many keys and return their new versions. See `AsyncClient.put_many`.

        All values are encoded before any is sent.
        """
        encoded = {
            key: self._coding.encode(key, value) for key, value in as_mapping("items", items, "keys to values").items()
        }
        return await self._client.put_many(encoded, timeout_s=timeout_s)

    async def pop(
        self, key: bytes, *, if_version: int | None = None, timeout_s: float | None = None
    ) -> TypedItem[T] | None:
        """Delete a key and return the item that it held, or None if the key was absent. See `AsyncClient.pop`.

        Costs two round trips, each with `timeout_s`: the value is read first, because a value that cannot be decoded is
        not deleted.

        Raises:
            ConditionFailed: If `if_version` is given and the key has another version.
            Overloaded: If other clients changed the key between read and delete 1,000 times in a row.
        """
        for _ in range(ATTEMPTS_MAX):
            found = await self._client.get(key, timeout_s=timeout_s)
            version = 0 if found is None else found.version
            if if_version is not None and version != if_version:
                raise ConditionFailed(version)
            if found is None:
                return None
            item = self._coding.decode(key, found)
            try:
                await self._client.pop(key, if_version=version, timeout_s=timeout_s)
            except ConditionFailed:
                if if_version is not None:
                    raise
                continue  # another client has written the key
            return item
        raise contended(key)

    def within(self, transaction: AsyncTransaction) -> AsyncTypedTransaction[T]:
        """Return a view of a transaction of the client, with this client's codec. Several typed clients may share a
        transaction.

        Examples:
            >>> from kvstore.client import json_codec
            >>> users = AsyncTypedClient(client, json_codec())
            >>> async with client.transaction() as txn:
            ...     users.within(txn).put(b"user/1", {"name": "Ann"})
            >>> found = await users.get(b"user/1")
            >>> found.value
            {'name': 'Ann'}
        """
        return AsyncTypedTransaction(transaction, self._coding)

    def encoded(self, key: bytes, value: T) -> bytes:
        """Return the bytes of a value, for use in a `Batch`. `key` is named in errors."""
        return self._coding.encode(key, value)

    def decoded(self, key: bytes, item: Item) -> TypedItem[T]:
        """Return an item of the client itself, as watches and batches return it, with its value decoded."""
        return self._coding.decode(key, item)
