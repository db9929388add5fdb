# Written by `make generate` from kvstore/client/aio/typed.py. Edit that file.
"""Values of an application's own types, over a client that speaks bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from kvstore.client.blocking.client import Client
from kvstore.client.core.codecs import Codec, Coding, TypedItem, TypedReplaced
from kvstore.client.core.retries import ATTEMPTS_MAX, contended
from kvstore.client.core.values import Item, Level
from kvstore.errors import ConditionFailed

T = TypeVar("T")


class TypedClient(Generic[T]):
    """The reads and writes of a `Client` whose values a codec encodes and decodes; keys stay bytes. What has no
    value, as `delete`, and everything else is the client's own, which several codecs may share.

    A value that the codec does not know raises InvalidRequest, and nothing is sent; stored bytes that it does not read
    raise Corrupted, which names the key.
    """

    def __init__(self, client: Client, codec: Codec[T]) -> None:
        self._client, self._coding = client, Coding(codec)

    def get(
        self, key: bytes, *, level: Level = Level.LINEARIZABLE, timeout_s: float | None = None
    ) -> TypedItem[T] | None:
        """The key's value and version; None if it is absent."""
        return self._coding.decode_or_none(key, self._client.get(key, level=level, timeout_s=timeout_s))

    def get_many(
        self, keys: Iterable[bytes], *, level: Level = Level.LINEARIZABLE, timeout_s: float | None = None
    ) -> dict[bytes, TypedItem[T]]:
        """Those of `keys` that are there. Each is read by itself: not one point in time."""
        found = self._client.get_many(keys, level=level, timeout_s=timeout_s)
        return {key: self._coding.decode(key, item) for key, item in found.items()}

    def scan(
        self,
        start: bytes = b"",
        end: bytes = b"",
        *,
        prefix: bytes = b"",
        limit: int = 0,
        level: Level = Level.LINEARIZABLE,
        timeout_s: float | None = None,
    ) -> Iterator[tuple[bytes, TypedItem[T]]]:
        """Keys in [start, end), or those that begin with `prefix`, in order, as the client scans them."""
        found = self._client.scan(start, end, prefix=prefix, limit=limit, level=level, timeout_s=timeout_s)
        for key, item in found:
            yield key, self._coding.decode(key, item)

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
        timeout_s: float | None = None,
    ) -> int:
        """Write, and return the new version. Raises ConditionFailed, with the version found, if a condition is not met.
        `if_version=0` is met by an absent key."""
        return self._client.put(
            key,
            self._coding.encode(key, value),
            ttl_s=ttl_s,
            if_absent=if_absent,
            if_present=if_present,
            if_version=if_version,
            keep_ttl=keep_ttl,
            timeout_s=timeout_s,
        )

    def replace(
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
        """Write, and return what was there before. A condition that is not met is no error here: see `applied`. What
        cannot be decoded is not overwritten, so it is read before: two round trips, and `timeout_s` is for each."""
        data = self._coding.encode(key, value)
        for _ in range(ATTEMPTS_MAX):
            found = self._client.get(key, timeout_s=timeout_s)
            version = 0 if found is None else found.version
            old = self._coding.decode_or_none(key, found)
            is_refused = version > 0 if if_absent else if_present and version == 0
            if is_refused or (if_version is not None and version != if_version):
                return TypedReplaced(False, version, old)
            done = self._client.replace(key, data, ttl_s=ttl_s, if_version=version, timeout_s=timeout_s)
            if done.applied:
                return TypedReplaced(True, done.version, old)
        raise contended(key)

    def put_many(self, items: Mapping[bytes, T], *, timeout_s: float | None = None) -> dict[bytes, int]:
        """Write each by itself and return the versions. Not atomic: an error is raised after all have ended. A value
        that cannot be encoded is one before any was sent."""
        encoded = {key: self._coding.encode(key, value) for key, value in items.items()}
        return self._client.put_many(encoded, timeout_s=timeout_s)

    def pop(self, key: bytes, *, if_version: int | None = None, timeout_s: float | None = None) -> TypedItem[T] | None:
        """Delete, and return what was there. Raises ConditionFailed. What cannot be decoded is not deleted, so it is
        read before: two round trips, and `timeout_s` is for each."""
        for _ in range(ATTEMPTS_MAX):
            found = self._client.get(key, timeout_s=timeout_s)
            version = 0 if found is None else found.version
            if if_version is not None and version != if_version:
                raise ConditionFailed(version)
            if found is None:
                return None
            item = self._coding.decode(key, found)
            try:
                self._client.pop(key, if_version=version, timeout_s=timeout_s)
            except ConditionFailed:
                if if_version is not None:
                    raise
                continue  # another client has written the key
            return item
        raise contended(key)

    def encoded(self, key: bytes, value: T) -> bytes:
        """The bytes for a value, for a `Batch`. `key` is for errors."""
        return self._coding.encode(key, value)

    def decoded(self, key: bytes, item: Item) -> TypedItem[T]:
        """An item of the client's own, as watches and batches give it."""
        return self._coding.decode(key, item)
