"""A watch on asyncio: `async for change in client.watch(prefix=b"user/")`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Self

from kvstore.client.aio.stream import WatchStream
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.fanout import Answers
from kvstore.client.core.first_state import FirstState
from kvstore.client.core.operation import ClientOperation
from kvstore.client.core.watching import Change, Check, WatchCursor
from kvstore.env.library_env import LibraryEnv


class AsyncWatch(WatchStream):
    """Goes on by itself after errors, at another server if need be, without a gap and without repeating anything; and,
    over another connection, after a caller who was cancelled while it waited for the next change.
    Raises PositionTrimmed if it was away for longer than the log is kept, and Unavailable if no server watches for
    `timeout_s` (of the client); it can be iterated again after that."""

    def __init__(
        self,
        env: LibraryEnv,
        config: ClientConfig,
        reading: WatchCursor,
        addresses: Callable[[], list[str]],
        state: FirstState | None = None,
        read: Callable[[Sequence[ClientOperation]], Awaitable[Answers]] | None = None,
        check: Check | None = None,
    ) -> None:
        """If there is a `state`, the watch reads it with `read` and gives it first."""
        super().__init__(env, config, reading, addresses, check)
        self._state, self._read = state, read

    @property
    def position(self) -> Mapping[str, int]:
        """Where a later watch of the same keys goes on (`after`): behind all changes that were given out. Empty before
        `ready`, and until all of the state has been given out if that was wanted first."""
        return dict(self._reading.position) if self.has_state else {}

    @property
    def has_state(self) -> bool:
        """Whether all that was there when the watch began has been given out, if that was wanted: changes follow."""
        return self._state is None or self._state.is_over

    async def ready(self) -> Self:
        """Return once a server watches: nothing that is written from now on is missed. Raises as iterating does."""
        self._check_caller()
        await self._run_step(self._make_ready)
        return self

    async def _make_ready(self) -> None:
        while not self._reading.is_ready and not self._is_closed:
            await self._read_message()
        if self._state is not None and self._reading.is_ready:
            self._state.begin(self._reading.position)
            await self._read_state()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        self._check_caller()
        while self._state is not None and not self._state.is_over and not self._is_closed:
            await self._run_step(self._make_ready)
            if self._state.has_more:
                return self._state.give()
        while True:
            while not self._reading.has_more:
                if self._is_closed:
                    raise StopAsyncIteration
                await self._run_step(self._read_more)
            if self._state is None or self._state.is_news(self._reading.next_change(), self._reading.position):
                return self._reading.give()
            self._reading.give()

    async def _read_state(self) -> None:
        """Read as much of the state as the watch needs to give something."""
        state, read = self._state, self._read
        while state is not None and read is not None and state.is_short and not self._is_closed:
            state.take(await read(state.wanted()))
            if state.should_restart():
                self._reading.restart()  # first: the reader may stop waiting while the channel closes
                await self._disconnect()
                await self._make_ready()

    async def __aenter__(self) -> Self:
        return await self.ready()
