"""A fair queue for long work: it starts one piece per turn of the event loop, and takes turns between owners."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable

Piece = Callable[[Callable[[], None]], None]
"""A piece of work. It receives a function that it must call once when it has ended."""


class FairQueue:
    """A queue that starts each piece after the previous one has ended, so that other tasks can run in between."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Hashable, deque[Piece]] = {}
        self._is_at_work = False

    def add(self, owner: Hashable, piece: Piece) -> None:
        self._waiting.setdefault(owner, deque()).append(piece)
        if not self._is_at_work:
            self._resume()

    def _resume(self) -> None:
        self._is_at_work = bool(self._waiting)
        if self._is_at_work:
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        owner, pieces = next(iter(self._waiting.items()))
        del self._waiting[owner]
        piece = pieces.popleft()
        if pieces:
            self._waiting[owner] = pieces  # behind all others
        has_ended = False

        def ended() -> None:
            nonlocal has_ended
            if not has_ended:
                has_ended = True
                self._resume()

        try:
            piece(ended)
        except BaseException:
            ended()  # a piece that fails must not block the others
            raise
