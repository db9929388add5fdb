"""A metadata store in memory that runs a step of a test right before a chosen call, and records calls and trust."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.meta import paths
from kvstore.meta.memory import Generations, MemoryStore, MemoryTree
from kvstore.meta.store import Change, Stat


class RecordedHistory(Generations):
    """Records whether the current connection is trusted, as a driver would."""

    def __init__(self) -> None:
        super().__init__(1)
        self.trusted: dict[int, bool] = {}
        """Number of a connection → what was last said about it."""

    def trust(self, is_trusted: bool) -> None:
        self.trusted[self.generation] = is_trusted

    @property
    def is_trusted(self) -> bool:
        """True if the current connection is trusted, which is the default."""
        return self.trusted.get(self.generation, True)


class Interleaved(MemoryStore):
    """One session in which another process, an operator or a broken connection can come between two calls."""

    def __init__(self, tree: MemoryTree) -> None:
        super().__init__(tree)
        self.history = self.recorded = RecordedHistory()
        self.calls: list[tuple[str, str]] = []
        """(method, path) of each call."""
        self._before: dict[tuple[str, str], Callable[[], None]] = {}

    def before(self, method: str, path: str, step: Callable[[], None]) -> None:
        """Run `step` once, right before the next call of this method for this path."""
        self._before[method, path] = step

    def count(self, method: str, path: str) -> int:
        """Return the number of calls of this method for this path."""
        return self.calls.count((method, path))

    def blink(self) -> None:
        """Break the connection and make a new one."""
        self.suspend()
        self.resume()

    async def get(self, path: str) -> tuple[bytes, Stat]:
        self._note("get", path)
        return await super().get(path)

    async def children(self, path: str) -> list[str]:
        self._note("children", path)
        return await super().children(path)

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False, sequential: bool = False) -> str:
        self._note("create", path)
        return await super().create(path, data, ephemeral=ephemeral, sequential=sequential)

    async def set(self, path: str, data: bytes, version: int) -> int:
        self._note("set", path)
        return await super().set(path, data, version)

    async def delete(self, path: str, version: int) -> None:
        self._note("delete", path)
        await super().delete(path, version)

    async def multi(self, changes: Sequence[Change]) -> None:
        self._note("multi", changes[0].path)
        await super().multi(changes)

    def _note(self, method: str, path: str) -> None:
        self.calls.append((method, path))
        step = self._before.pop((method, path), None)
        if step is not None:
            step()


def count_of(tree: MemoryTree, node: str) -> bytes:
    """Return the high-water mark of a node as the store has it."""
    return tree.get(paths.high_water(node))[0]
