"""Delivers the calls of watches. All drivers of the metadata store use it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable


class WatchCall:
    """The call of one watch: on the next turn of the event loop, in the context in which the watch was opened. Calls
    that are not delivered yet coalesce."""

    def __init__(self, changed: Callable[[], None], is_open: Callable[[], bool]) -> None:
        """`is_open` returns False once the watch is closed; then it is not called any more."""
        self._changed, self._is_open = changed, is_open
        self._context = contextvars.copy_context()
        self._is_scheduled = False

    def call_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._deliver, context=self._context)

    def _deliver(self) -> None:
        self._is_scheduled = False
        if self._is_open():
            self._changed()
