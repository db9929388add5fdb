"""Things that are closed when their block ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType


class ClosedAtExit(ABC):
    """Something that is closed at the end of its block, whatever has happened in it."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
