# Written by `make generate` from kvstore/client/aio/closing.py. Edit that file.
"""Base class of objects that are closed at the end of a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import NoReturn


class ClosedAtExit(ABC):
    """An object that is closed at the end of its block, also after an exception."""

    def __getstate__(self) -> NoReturn:
        """Refuse pickle and copy: they failed on a part of the object, or shared its connections."""
        raise TypeError(f"{type(self).__name__} cannot be pickled or copied; open one in each process")

    @abstractmethod
    def close(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
