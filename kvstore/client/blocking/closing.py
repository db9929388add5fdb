# Written by `make generate` from kvstore/client/aio/closing.py. Edit that file.
"""Things that are closed when their block ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType


class ClosedAtExit(ABC):
    """Something that is closed at the end of its block, whatever has happened in it."""

    @abstractmethod
    def close(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
