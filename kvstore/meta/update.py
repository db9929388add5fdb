"""The compare-and-set loop: read, decide, write if nobody wrote in between, else decide again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvstore.errors import MetadataUnavailable, MetadataUnknown, VersionConflict

T = TypeVar("T")
R = TypeVar("R")

ATTEMPTS_MAX = 16
RECONNECT_ATTEMPTS_MAX = 50
RECONNECT_DELAY_S = 0.1
"""Delay between attempts after a broken connection, in seconds, so that a short outage of the store is not an unknown
outcome."""


async def update(
    read: Callable[[], Awaitable[tuple[T, int]]],
    write: Callable[[T, int], Awaitable[int]],
    change: Callable[[T], T],
) -> tuple[T, int]:
    """Store `change(value)`, recomputed whenever another writer came first, and return the stored value and its
    version.

    `change` must accept its own result: after a write of unknown outcome the value is read again, and a change that
    finds its work done returns the value as it is. It may raise to abandon the update. Raises MetadataUnavailable if
    nothing was written, MetadataUnknown if a write's outcome could not be learned in time, VersionConflict if other
    writers were always first.
    """
    unknown: MetadataUnknown | None = None
    for _ in range(ATTEMPTS_MAX):
        value, version = await _read_again(read, unknown) if unknown else await _read_first(read)
        wanted = change(value)
        if wanted == value:
            return value, version
        try:
            return wanted, await write(wanted, version)
        except VersionConflict:
            continue
        except MetadataUnknown as error:
            unknown = error
        except MetadataUnavailable:
            if unknown is None:
                raise
    if unknown is not None:
        raise unknown
    raise VersionConflict(f"lost {ATTEMPTS_MAX} times in a row against other writers")


async def _read_first(read: Callable[[], Awaitable[R]]) -> R:
    try:
        return await read()
    except MetadataUnknown as error:
        raise MetadataUnavailable(f"could not read: {error}") from error  # nothing was written


async def _read_again(read: Callable[[], Awaitable[R]], unknown: MetadataUnknown) -> R:
    """Read, waiting for the connection to come back. Raises `unknown` if it does not in time."""
    for _ in range(RECONNECT_ATTEMPTS_MAX):
        try:
            return await read()
        except (MetadataUnavailable, MetadataUnknown):
            await asyncio.sleep(RECONNECT_DELAY_S)
    raise unknown


async def until_known(call: Callable[[], Awaitable[R]]) -> R:
    """Repeat `call`, which must recognise its own earlier effect, while its outcome is unknown.

    Raises MetadataUnavailable if it was never sent, MetadataUnknown if the store did not come back in time.
    """
    try:
        return await call()
    except MetadataUnknown as error:
        return await _read_again(call, error)
