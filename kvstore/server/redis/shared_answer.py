"""Answers about the server that are costly to make. All waiting clients share one answer, made after they asked. Making
answers takes at most a tenth of the event loop, however many clients ask, because everything else in the process waits
meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from kvstore.env.nursery import shielded

log = logging.getLogger(__name__)

T = TypeVar("T")

PAUSE_FACTOR = 9
"""Pause after an answer, as a multiple of the time that it took to make."""


class SharedAnswer(Generic[T]):
    """An answer that `make` recreates when a client waits for it."""

    def __init__(self, make: Callable[[], T], now: Callable[[], float]) -> None:
        self._make, self._now = make, now
        self._next: asyncio.Future[T] | None = None
        self._pause_until = 0.0

    async def take(self) -> T:
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            loop.call_later(max(0.0, self._pause_until - self._now()), self._make_next, self._next)
        return await shielded(self._next)

    def _make_next(self, due: asyncio.Future[T]) -> None:
        self._next = None  # callers that ask from here on get a later answer
        began = self._now()
        try:
            due.set_result(self._make())
        except Exception as error:  # the root of a turn: the waiting clients get the error
            log.exception("failed to describe the server to clients")
            due.set_exception(error)
        ended = self._now()
        self._pause_until = ended + PAUSE_FACTOR * (ended - began)
