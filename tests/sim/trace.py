"""The events of a run: a digest that distinguishes two runs, and their text on request."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TextIO

_BATCH = 1000


class Trace:
    """A SHA-256 over (virtual time, node, kind, details). It is cheap enough to be always on."""

    def __init__(
        self, now: Callable[[], float], text: TextIO | None = None, *, order: Callable[[], int] = lambda: 0
    ) -> None:
        """`order` distinguishes two schedules and is part of the digest."""
        self._now = now
        self._order = order
        self._text = text
        self._hash = hashlib.sha256()
        self._batch: list[tuple[object, ...]] = []
        self._before: list[tuple[object, ...]] = []
        self.count = 0

    def event(self, node: str, kind: str, *details: str | int | float) -> None:
        """Record one event. Details are values whose repr is the same in every process."""
        self._batch.append((self._now(), node, kind, *details))
        self.count += 1
        if len(self._batch) >= _BATCH or self._text is not None:
            self._flush()

    def digest(self) -> str:
        """The digest of all events so far."""
        self._flush()
        whole = self._hash.copy()
        whole.update(b"%d" % self._order())
        return whole.hexdigest()

    def tail(self, count: int) -> str:
        """Return the last `count` events, one per line."""
        return "".join(map(_line, [*self._before, *self._batch][-count:]))

    def _flush(self) -> None:
        self._hash.update("".join(map(repr, self._batch)).encode())
        if self._text is not None:
            self._text.writelines(map(_line, self._batch))
        self._before, self._batch = (self._before + self._batch)[-_BATCH:], []


def _line(event: tuple[object, ...]) -> str:
    now, node, kind, *details = event
    return f"{now:12.6f} {node:8} {kind:12} {' '.join(map(str, details))}\n"
