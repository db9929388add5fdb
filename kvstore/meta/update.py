"""The compare-and-set loop: read a value, compute the change, and write it unless another writer came first. If one
did, start again."""

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
"""Delay in seconds between attempts after a broken connection, so that a short outage of the store does not end in
an unknown outcome."""


async def update(
    read: Callable[[], Awaitable[tuple[T, int]]],
    write: Callable[[T, int], Awaitable[int]],
    change: Callable[[T], T],
) -> tuple[T, int]:
    """Replace a value by `change(value)` atomically, and return the stored value and its version. If another writer
    comes first, `change` is called again with the new value.

    `change` must accept its own result: after a write of unknown outcome, the loop reads the value again, and a change
    that finds its work done returns the value unchanged. `change` may raise an error to abandon the update.

    Raises MetadataUnavailable if nothing was written, MetadataUnknown if the outcome of a write could not be learned in
    time, VersionConflict if other writers came first at every attempt.
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
    """Read again, and wait for the connection to come back. Raises `unknown` if it does not come back in time."""
    for _ in range(RECONNECT_ATTEMPTS_MAX):
        try:
            return await read()
        except (MetadataUnavailable, MetadataUnknown):
            await asyncio.sleep(RECONNECT_DELAY_S)
    raise unknown


async def until_known(call: Callable[[], Awaitable[R]]) -> R:
    """Repeat `call` until its outcome is known. `call` must recognise the effect of its own earlier attempt.

    Raises MetadataUnavailable if the call was never sent, MetadataUnknown if the store did not come back in time.
    """
    try:
        return await call()
    except MetadataUnknown as error:
        return await _read_again(call, error)
