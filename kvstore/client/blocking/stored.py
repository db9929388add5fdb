"""A part of the store as a Python mapping, for code that works with a dict."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, MutableMapping, ValuesView
from contextlib import suppress
from typing import Any, TypeVar, overload

from kvstore.client.blocking.client import Client
from kvstore.client.blocking.typed import TypedClient
from kvstore.client.core.codecs import Codec
from kvstore.client.core.retries import ATTEMPTS_MAX, contended
from kvstore.errors import ConditionFailed, InvalidRequest

T = TypeVar("T")
D = TypeVar("D")
_ABSENT: Any = object()
"""Marks that no default was given."""


class StoredMapping(MutableMapping[bytes, T]):
    """A mapping of the keys that begin with `prefix`, without the prefix, to decoded values.

    Each call costs one round trip or more and is linearizable by itself; nothing is cached. Iteration reads pages of a
    scan in key order. It is not one point in time, and unlike with a dict it continues if keys are written or deleted
    meanwhile. A key that is present all the time is returned once. `len`, and so `list(stored)`, first counts the keys.
    `update` writes each key by itself. `pop`, `popitem` and `setdefault` are atomic for all clients. Use
    `dict(stored.items())` instead of `dict(stored)`, which reads each key by itself.

    Args:
        client: An open client.
        prefix: The prefix of the keys.
        codec: The codec of the values.

    Raises:
        KeyError: If the key is absent. All other errors are those of the client.

    Examples:
        >>> visits = StoredMapping(client, b"visits/", json_codec())
        >>> visits[b"ann"] = {"page": "home", "seconds": 7}
        >>> visits.update({b"bob": {"page": "map"}, b"cy": {"page": "home"}})
        >>> visits[b"ann"]["page"], len(visits), b"dan" in visits
        ('home', 3, False)
        >>> [key for key, visit in visits.items() if visit["page"] == "home"]
        [b'ann', b'cy']
        >>> visits.pop(b"bob")
        {'page': 'map'}
        >>> visits.setdefault(b"cy", {"page": "map"})
        {'page': 'home'}
        >>> client.get(b"visits/cy").value
        b'{"page":"home"}'
        >>> del visits[b"dan"]
        Traceback (most recent call last):
        KeyError: b'dan'
        >>> visits.clear()
        >>> bool(visits)
        False
    """

    def __init__(self, client: Client, prefix: bytes, codec: Codec[T]) -> None:
        self._client, self._prefix = client, prefix
        self._typed = TypedClient(client, codec)

    def __repr__(self) -> str:
        return f"StoredMapping({self._prefix!r})"

    # ── one key ──

    def __getitem__(self, key: bytes) -> T:
        item = self._typed.get(self._stored(key))
        if item is None:
            raise KeyError(key)
        return item.value

    def __setitem__(self, key: bytes, value: T) -> None:
        """Write the value, without an expiry unless the namespace has a default one."""
        self._typed.put(self._stored(key), value)

    def __delitem__(self, key: bytes) -> None:
        if not self._client.delete(self._stored(key)):
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        """Return True if the key is present. Costs one round trip; the value is not read."""
        return self._client.meta(self._stored(key)) is not None

    @overload
    def pop(self, key: bytes, /) -> T: ...
    @overload
    def pop(self, key: bytes, /, default: T) -> T: ...
    @overload
    def pop(self, key: bytes, /, default: D) -> T | D: ...
    def pop(self, key: bytes, /, default: Any = _ABSENT) -> Any:
        """Delete the key and return its value. If several clients do so, one of them gets it. Costs two round trips."""
        item = self._typed.pop(self._stored(key))
        if item is not None:
            return item.value
        if default is _ABSENT:
            raise KeyError(key)
        return default

    @overload
    def setdefault(self: StoredMapping[T | None], key: bytes, default: None = None, /) -> T | None: ...
    @overload
    def setdefault(self, key: bytes, default: T, /) -> T: ...
    def setdefault(self, key: bytes, default: Any = None, /) -> Any:
        """Return the current value, or write `default` and return it. If several clients do so, all get the
        same value."""
        stored = self._stored(key)
        for _ in range(ATTEMPTS_MAX):
            item = self._typed.get(stored)
            if item is not None:
                return item.value
            with suppress(ConditionFailed):  # another client was faster: its value is the answer, unless it was deleted
                self._typed.put(stored, default, if_absent=True)
                return default
        raise contended(stored)

    # ── all keys ──

    def __iter__(self) -> Iterator[bytes]:
        start = len(self._prefix)
        return (key[start:] for key in self._client.keys(prefix=self._prefix))

    def __len__(self) -> int:
        return self._client.count(prefix=self._prefix)

    def __bool__(self) -> bool:
        """Return True if there is a key. Reads at most one key."""
        return any(True for _ in self._client.keys(prefix=self._prefix, limit=1))

    def items(self) -> ItemsView[bytes, T]:
        """Keys and values, read page by page when iterated."""
        return _Items(self, self._pairs)

    def values(self) -> ValuesView[T]:
        """The values, read page by page when iterated."""
        return _Values(self, self._pairs)

    def _pairs(self) -> Iterator[tuple[bytes, T]]:
        start = len(self._prefix)
        for key, item in self._typed.scan(prefix=self._prefix):
            yield key[start:], item.value

    def popitem(self) -> tuple[bytes, T]:
        """Delete the first key, and return it with its value. A dict would return the key that was added last."""
        for _ in range(ATTEMPTS_MAX):
            first = next(self._client.keys(prefix=self._prefix, limit=1), None)
            if first is None:
                raise KeyError(f"no key begins with {self._prefix!r}")
            item = self._typed.pop(first)
            if item is not None:  # else another client was faster
                return first[len(self._prefix) :], item.value
        raise contended(self._prefix)

    def update(self, other: Mapping[bytes, T] | Iterable[tuple[bytes, T]] = (), /, **named: T) -> None:  # type: ignore[override]
        """Write each key by itself, many at a time. An error is raised after all writes have ended."""
        if named:
            raise InvalidRequest(f"expected keys to be bytes, got the name {next(iter(named))!r}")
        pairs = other.items() if isinstance(other, Mapping) else other
        self._typed.put_many({self._stored(key): value for key, value in pairs})

    def clear(self) -> None:
        """Delete all keys that begin with the prefix, in batches, each key by itself. Raises InvalidRequest if the
        prefix is empty, because that would delete the whole store."""
        self._client.delete_prefix(self._prefix)

    def _stored(self, key: object) -> bytes:
        if not isinstance(key, bytes):
            raise InvalidRequest(f"expected key to be bytes, got {key!r}")
        return self._prefix + key


class _Items(ItemsView[bytes, T]):
    """An items view that reads pages. Python's own view would read each value by itself, and fail for a key that is
    deleted meanwhile."""

    def __init__(self, stored: StoredMapping[T], pairs: Callable[[], Iterator[tuple[bytes, T]]]) -> None:
        super().__init__(stored)
        self._pairs = pairs

    def __iter__(self) -> Iterator[tuple[bytes, T]]:
        return self._pairs()


class _Values(ValuesView[T]):
    """A values view that reads pages."""

    def __init__(self, stored: StoredMapping[T], pairs: Callable[[], Iterator[tuple[bytes, T]]]) -> None:
        super().__init__(stored)
        self._pairs = pairs

    def __iter__(self) -> Iterator[T]:
        return (value for _, value in self._pairs())

    def __contains__(self, value: object) -> bool:
        return any(each is value or each == value for each in self)
