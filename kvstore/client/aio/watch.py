"""A watch on asyncio: `async for change in client.watch(prefix=b"user/")`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Self

import grpc

from kvstore.backoff import delays
from kvstore.client.aio.closing import ClosedAtExit
from kvstore.client.aio.loops import check_loop
from kvstore.client.core import forks
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.fanout import Answers
from kvstore.client.core.first_state import FirstState
from kvstore.client.core.operation import Operation
from kvstore.client.core.strangers import Strangers
from kvstore.client.core.watching import Change, Check, Reading, is_final
from kvstore.env.events import is_cancelled
from kvstore.env.library_env import LibraryEnv
from kvstore.errors import ConfigError, StoreError, Unavailable
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc.channels import open_aio_channel
from kvstore.rpc.status import from_rpc_error


class AsyncWatch(ClosedAtExit):
    """Goes on by itself after errors, at another server if need be, without a gap and without repeating anything; and,
    over another connection, after a caller who was cancelled while it waited for the next change.
    Raises PositionTrimmed if it was away for longer than the log is kept, and Unavailable if no server watches for
    `timeout_s` (of the client); it can be iterated again after that."""

    def __init__(
        self,
        env: LibraryEnv,
        config: ClientConfig,
        reading: Reading,
        addresses: Callable[[], list[str]],
        state: FirstState | None = None,
        read: Callable[[Sequence[Operation]], Awaitable[Answers]] | None = None,
        check: Check | None = None,
    ) -> None:
        """With `state` that comes first, by means of `read`. With `check` a server is asked for its topology before it
        is asked to watch: another one may listen at an address than did, and a watch that begins cannot tell."""
        self._state, self._read, self._check = state, read, check
        self._env, self._config, self._reading, self._addresses = env, config, reading, addresses
        self._channel: grpc.aio.Channel | None = None
        self._call: grpc.aio.UnaryStreamCall[kv_pb2.WatchRequest, kv_pb2.WatchResponse] | None = None
        self._turns = self._servers()
        self._address = ""
        """Of the server that was asked last."""
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        """On which it is read."""
        self.connections = 0
        self.is_forked = False
        forks.watch(self)

    def leave_to_parent(self) -> None:
        """See kvstore.client.core.forks."""
        forks.keep(self._channel, self._call)
        self._channel = self._call = None
        self.is_forked = True

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
        while not self._reading.is_ready and not self._closed:
            await self._hear()
        if self._state is not None and self._reading.is_ready:
            self._state.begin(self._reading.position)
            await self._look()
        return self

    def __aiter__(self) -> Self:
        return self

    def _check_caller(self) -> None:
        """Raises InvalidRequest in the child of a fork, and on another event loop than the first caller's."""
        forks.check(self)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        check_loop(self._loop)

    async def __anext__(self) -> Change:
        self._check_caller()
        while self._state is not None and not self._state.is_over and not self._closed:
            await self.ready()
            if self._state.has_more:
                return self._state.give()
        while True:
            while not self._reading.has_more:
                if self._closed:
                    raise StopAsyncIteration
                await self._hear()
            change = self._reading.give()
            if self._state is None or self._state.is_news(change, self._reading.position):
                return change

    async def _look(self) -> None:
        """Read of the state what is needed to give something out."""
        state, read = self._state, self._read
        while state is not None and read is not None and state.is_short and not self._closed:
            state.take(await read(state.wanted()))
            if state.begins_anew():
                self._reading.begin_anew()  # before anything at which a reader may stop waiting
                await self._hang_up()
                await self.ready()

    async def close(self) -> None:
        """End the watch. `position` stays."""
        self._closed = True
        await self._hang_up()

    async def __aenter__(self) -> Self:
        return await self.ready()

    async def _hear(self) -> None:
        """The next message, over as many servers as it takes."""
        deadline = None if self._call is not None else self._env.clock.now() + self._config.timeout_s
        pauses = delays(self._env.random, first_s=0.02, cap_s=0.5)
        failure: StoreError = Unavailable("no server watches")
        strangers = Strangers()
        while not self._closed:
            try:
                message = await self._next_message()
            except StoreError as error:
                failure = error
                await self._hang_up()
            else:
                return self._reading.take(message)
            failure = strangers.judge(self._address, failure, self._addresses(), has_served=deadline is None)
            if is_final(failure):
                raise failure
            now = self._env.clock.now()
            deadline = now + self._config.timeout_s if deadline is None else deadline
            if now >= deadline:
                late = strangers.why_or_none(self._addresses(), is_late=True)
                raise late or Unavailable(f"no server watches: {failure}") from failure
            await asyncio.sleep(next(pauses))

    async def _next_message(self) -> kv_pb2.WatchResponse:
        config, patience_s = self._config, self._reading.watched.patience_s
        try:
            if (call := self._call) is None:
                # Half of the time in which one is looked for, so that there is some for another behind a silent one.
                async with asyncio.timeout(max(config.timeout_s / 2, config.connect_timeout_s)):
                    call = await self._dial()
                    await call.initial_metadata()
                # The server is there. It has so long to find its place in the logs, or to say why it cannot.
                patience_s = max(config.timeout_s / 2, 2 * config.silence_s)
            async with asyncio.timeout(patience_s):
                message = await call.read()
        except TimeoutError:
            raise Unavailable("the server has fallen silent") from None
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.CancelledError:
            if self._closed and not is_cancelled():
                raise Unavailable("the watch is closed") from None
            await self._hang_up()  # gRPC has ended the call together with the wait for it
            raise
        if not isinstance(message, kv_pb2.WatchResponse):
            raise Unavailable("the server has ended the watch")
        return message

    async def _dial(self) -> grpc.aio.UnaryStreamCall[kv_pb2.WatchRequest, kv_pb2.WatchResponse]:
        self._address = address = next(self._turns)
        try:
            self._channel = channel = await open_aio_channel(address, self._config.tls, self._config.login)
        except (OSError, ConfigError) as error:  # files that are replaced just now, or no address of the name
            raise Unavailable(f"no connection to {address} can be made: {error}") from error
        self.connections += 1
        if self._closed:
            await self._hang_up()
            raise Unavailable("the watch is closed")
        stub = kv_pb2_grpc.KVStub(channel)
        if self._check is not None:
            self._check(await stub.Topology(kv_pb2.TopologyRequest(), timeout=self._config.connect_timeout_s), address)
            if self._closed:
                raise Unavailable("the watch is closed")
        self._call = stub.Watch(self._reading.request())
        assert self._call is not None
        return self._call

    async def _hang_up(self) -> None:
        channel, self._channel, self._call = self._channel, None, None
        if channel is not None:
            await channel.close()

    def _servers(self) -> Iterator[str]:
        """Whom to ask, for ever."""
        while True:
            yield from self._addresses()
