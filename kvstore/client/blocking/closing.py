# Written by `make generate` from kvstore/client/aio/closing.py. Edit that file.
"""Base class of objects that are closed at the end of a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType


class ClosedAtExit(ABC):
    """An object that is closed at the end of its block, also after an exception."""

    @abstractmethod
    def close(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
