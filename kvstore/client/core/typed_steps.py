"""Taking a value out of the store without losing it: it is decoded before it is removed or overwritten, and only that
version of it goes. Written once for both faces: each step is a call of a client, which is answered by its result, or by
the ConditionFailed that it raised. Decides only."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from kvstore.client.core.codecs import Coding, TypedItem, TypedReplaced
from kvstore.client.core.values import Item, Replaced
from kvstore.errors import ConditionFailed, Overloaded

T = TypeVar("T")
Call = Callable[[Any], Any]
"""Of a client: gives the result, or on asyncio what is awaited for it."""
Steps = Generator[Call, Any, T]
ATTEMPTS_MAX = 1000
"""Each of which somebody else's write was in between."""


def popping(
    coding: Coding[T], key: bytes, *, if_version: int | None, timeout_s: float | None
) -> Steps[TypedItem[T] | None]:
    """Delete what could be decoded, and return it."""
    for _ in range(ATTEMPTS_MAX):
        found: Item | None = yield lambda client: client.get(key, timeout_s=timeout_s)
        version = 0 if found is None else found.version
        if if_version is not None and version != if_version:
            raise ConditionFailed(version)
        if found is None:
            return None
        value = coding.decode(key, found)
        try:
            yield _pop(key, version, timeout_s)
        except ConditionFailed:
            if if_version is not None:
                raise
            continue  # by another one, meanwhile
        return value
    raise contended(key)


def replacing(
    coding: Coding[T],
    key: bytes,
    value: T,
    *,
    ttl_s: float | None,
    if_absent: bool,
    if_present: bool,
    if_version: int | None,
    timeout_s: float | None,
) -> Steps[TypedReplaced[T]]:
    """Overwrite what could be decoded, and return it. A condition that is not met is no error."""
    data = coding.encode(key, value)
    for _ in range(ATTEMPTS_MAX):
        found: Item | None = yield lambda client: client.get(key, timeout_s=timeout_s)
        version = 0 if found is None else found.version
        old = coding.decode_or_none(key, found)
        is_refused = version > 0 if if_absent else if_present and version == 0
        if is_refused or (if_version is not None and version != if_version):
            return TypedReplaced(False, version, old)
        done: Replaced = yield _replace(key, data, version, ttl_s, timeout_s)
        if done.applied:
            return TypedReplaced(True, done.version, old)
    raise contended(key)


def contended(key: bytes) -> Overloaded:
    return Overloaded(f"{key!r} was written by others each time, {ATTEMPTS_MAX} times on end")


def _pop(key: bytes, version: int, timeout_s: float | None) -> Call:
    return lambda client: client.pop(key, if_version=version, timeout_s=timeout_s)


def _replace(key: bytes, data: bytes, version: int, ttl_s: float | None, timeout_s: float | None) -> Call:
    return lambda client: client.replace(key, data, ttl_s=ttl_s, if_version=version, timeout_s=timeout_s)
