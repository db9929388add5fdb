"""The stream under a watch on asyncio: the part of a watch that differs from threads (blocking/stream.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import grpc

from kvstore.backoff import delays
from kvstore.client.aio.closing import ClosedAtExit
from kvstore.client.aio.loops import check_loop
from kvstore.client.core import forks
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.login_refusals import LoginRefusals
from kvstore.client.core.watching import Check, WatchCursor, is_final
from kvstore.env.events import is_cancelled
from kvstore.env.library_env import LibraryEnv
from kvstore.errors import ConfigError, StoreError, Unavailable
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc.channels import open_aio_channel
from kvstore.rpc.status import from_rpc_error


class WatchStream(ClosedAtExit):
    """Reads the messages of one watch, from one server after another, on the event loop of the first caller."""

    def __init__(
        self,
        env: LibraryEnv,
        config: ClientConfig,
        reading: WatchCursor,
        addresses: Callable[[], list[str]],
        check: Check | None,
    ) -> None:
        """With a `check`, the stream requests a server's topology before the watch begins: a server of another cluster
        may listen at the address by then, and a watch that begins cannot detect that."""
        self._env, self._config, self._reading, self._addresses = env, config, reading, addresses
        self._check = check
        self._channel: grpc.aio.Channel | None = None
        self._call: grpc.aio.UnaryStreamCall[kv_pb2.WatchRequest, kv_pb2.WatchResponse] | None = None
        self._turns = self._servers()
        self._address = ""
        """Address of the server that was asked last."""
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the first caller."""
        self.connections = 0
        self.is_forked = False
        forks.watch(self)

    def after_fork_in_child(self) -> None:
        """See kvstore.client.core.forks."""
        forks.keep(self._channel, self._call)
        self._channel = self._call = None
        self.is_forked = True

    def _check_caller(self) -> None:
        """Raise InvalidRequest in the child of a fork, and on another event loop than the first caller's."""
        forks.check(self)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        check_loop(self._loop)

    def _run_step(self, step: Callable[[], Awaitable[None]]) -> Awaitable[None]:
        """Run a step of the watch."""
        return step()

    async def close(self) -> None:
        """End the watch. `position` stays readable. Idempotent."""
        self._is_closed = True
        await self._disconnect()

    def _read_more(self) -> Awaitable[None]:
        """Read one message for a caller that waits for a change."""
        return self._read_message()

    async def _read_message(self) -> None:
        """Read the next message, from as many servers as necessary."""
        deadline = None if self._call is not None else self._env.clock.now() + self._config.timeout_s
        pauses = delays(self._env.random, first_s=0.02, cap_s=0.5)
        failure: StoreError = Unavailable("no server watches")
        refusals = LoginRefusals()
        while not self._is_closed:
            try:
                message = await self._next_message()
            except StoreError as error:
                failure = error
                await self._disconnect()
            else:
                return self._reading.take(message)
            failure = refusals.judge(self._address, failure, self._addresses(), has_served=deadline is None)
            if is_final(failure):
                raise failure
            now = self._env.clock.now()
            deadline = now + self._config.timeout_s if deadline is None else deadline
            if now >= deadline:
                late = refusals.error_or_none(self._addresses(), is_late=True)
                raise late or Unavailable(f"no server watches: {failure}") from failure
            await asyncio.sleep(next(pauses))

    async def _next_message(self) -> kv_pb2.WatchResponse:
        config, patience_s = self._config, self._reading.watched.patience_s
        try:
            if (call := self._call) is None:
                # Half of the caller's time, so that there is time for another server behind a silent one.
                async with asyncio.timeout(max(config.timeout_s / 2, config.connect_timeout_s)):
                    call = await self._connect()
                    await call.initial_metadata()
                # The server is there. It has this long to find its place in the logs, or to report why it cannot.
                patience_s = max(config.timeout_s / 2, 2 * config.silence_s)
            async with asyncio.timeout(patience_s):
                message = await call.read()
        except TimeoutError:
            raise Unavailable("the server sends nothing any more") from None
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.CancelledError:
            if self._is_closed and not is_cancelled():
                raise Unavailable("the watch is closed") from None
            await self._disconnect()  # gRPC has ended the call together with the wait for it
            raise
        if not isinstance(message, kv_pb2.WatchResponse):
            raise Unavailable("the server has ended the watch")
        return message

    async def _connect(self) -> grpc.aio.UnaryStreamCall[kv_pb2.WatchRequest, kv_pb2.WatchResponse]:
        self._address = address = next(self._turns)
        try:
            self._channel = channel = await open_aio_channel(address, self._config.tls, self._config.login)
        except (OSError, ConfigError) as error:  # files that are being replaced, or a name without an address
            raise Unavailable(f"cannot connect to {address}: {error}") from error
        self.connections += 1
        if self._is_closed:
            await self._disconnect()
            raise Unavailable("the watch is closed")
        stub = kv_pb2_grpc.KVStub(channel)
        if self._check is not None:
            self._check(await stub.Topology(kv_pb2.TopologyRequest(), timeout=self._config.connect_timeout_s), address)
            if self._is_closed:
                raise Unavailable("the watch is closed")
        self._call = stub.Watch(self._reading.request())
        assert self._call is not None
        return self._call

    async def _disconnect(self) -> None:
        channel, self._channel, self._call = self._channel, None, None
        if channel is not None:
            await channel.close()

    def _servers(self) -> Iterator[str]:
        """Yield the servers to ask, without end."""
        while True:
            yield from self._addresses()
