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
    """An iterator over changes, as `AsyncClient.watch` returns it.

    After an error the watch continues by itself, at another server if necessary, without a gap and without duplicates.
    It can be iterated again after it has raised an error.

    If its caller was cancelled while it waited for a change, the watch continues over another connection.

    Raises:
        PositionTrimmed: If the watch was away for longer than the log is kept.
        Unavailable: If no server watches within `timeout_s` of the client.

    Examples:
        >>> async with client.watch(b"user/1") as changes:  # doctest: +SKIP
        ...     version = await client.put(b"user/1", b"Ann")
        ...     change = await anext(changes)
        ...     change.item.value
        b'Ann'
    """

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
        """With a `state`, the watch reads it with `read` and returns it first."""
        super().__init__(env, config, reading, addresses, check)
        self._state, self._read = state, read

    @property
    def position(self) -> Mapping[str, int]:
        """Position behind all changes returned so far. Pass it as `after` to continue in a later watch of the same
        keys.

        Empty before `ready`, and with `with_state` until the whole state has been returned.
        """
        return dict(self._reading.position) if self.has_state else {}

    @property
    def has_state(self) -> bool:
        """True once the whole state has been returned, or if no state was requested."""
        return self._state is None or self._state.is_over

    async def ready(self) -> Self:
        """Wait until a server watches: no change from then on is missed. Raises the errors of an iteration."""
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
        """Read as much of the state as the watch needs to return something."""
        state, read = self._state, self._read
        while state is not None and read is not None and state.is_short and not self._is_closed:
            state.take(await read(state.wanted()))
            if state.should_restart():
                self._reading.restart()  # first: the reader may stop waiting while the channel closes
                await self._disconnect()
                await self._make_ready()

    async def __aenter__(self) -> Self:
        return await self.ready()
