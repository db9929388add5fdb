"""The stream under a blocking watch: the part of a watch that differs from asyncio (aio/stream.py).

A worker thread asks servers and receives their messages, so an exception that strikes the caller's thread leaves the
stream consistent. The next call waits for the worker that the interrupted call has left behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import grpc

from kvstore.backoff import delays
from kvstore.client.blocking.closing import ClosedAtExit
from kvstore.client.blocking.link import CLOSE_S
from kvstore.client.core import forks
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.login_refusals import LoginRefusals
from kvstore.client.core.watching import Check, WatchCursor, is_final
from kvstore.env.library_env import LibraryEnv
from kvstore.errors import ConfigError, StoreError, Unavailable
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc import workers
from kvstore.rpc.channels import open_channel
from kvstore.rpc.status import from_rpc_error

STREAM_HEARTBEATS, STREAM_S_MIN = 60, 60.0
"""Maximum time of one stream: in heartbeats, and in seconds at least. A thread cannot stop waiting for a message, so a
silent server is left at the end of the stream, after five minutes by default. However short the heartbeat, the server
needs this time to find its place in the logs of all partitions."""


class WatchStream(ClosedAtExit):
    """Reads the messages of one watch, from one server after another, for one thread. Another thread may `close` it."""

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
        self._job: workers.Job[None] | None = None
        """The job of the worker that reads for the caller."""
        self._has_left = False
        """True if the caller of `_job` was interrupted. Nobody may come back to close the watch."""
        self._channel: grpc.Channel | None = None
        self._call: Any = None
        self._turns = self._servers()
        self._address = ""
        """Address of the server that was asked last."""
        self._closing = threading.Event()
        self._until = inf
        self.connections = 0
        self.is_forked = False
        forks.watch(self)

    def after_fork_in_child(self) -> None:
        """See kvstore.client.core.forks."""
        forks.keep(self._channel, self._call)
        self._channel = self._call = self._job = None
        self._closing = threading.Event()  # a thread that does not exist in the child may hold its lock
        self.is_forked = True

    @property
    def _is_closed(self) -> bool:
        return self._closing.is_set()

    def _check_caller(self) -> None:
        """Raise InvalidRequest in the child of a fork."""
        forks.check(self)

    def _run_step(self, step: Callable[[], None]) -> None:
        """Run a step in a worker. If an interrupted call has left a step behind, first wait for its end; an error that
        it met comes again."""
        if workers.is_worker():
            step()
            return
        if self._job is not None and not self._job.is_over:
            workers.start(self._job)
            self._job.join()
        self._has_left = False
        self._job = job = workers.Job(step)
        try:
            workers.start(job)
            job.wait()
        except BaseException:
            self._has_left = True
            raise

    def close(self) -> None:
        """End the watch. `position` stays readable. Idempotent."""
        workers.run_within(self._close, CLOSE_S)

    def _close(self) -> None:
        self._closing.set()
        self._disconnect()

    def _read_more(self) -> None:
        """Read until there is a change, or one message after the caller has gone: a watch without references is
        collected once no worker reads for it."""
        while not self._reading.has_more and not self._closing.is_set() and not self._has_left:
            self._read_message()

    def _read_message(self) -> None:
        """Read the next message, from as many servers as necessary."""
        deadline = None if self._call is not None else self._env.clock.now() + self._config.timeout_s
        pauses = delays(self._env.random, first_s=0.02, cap_s=0.5)
        failure: StoreError = Unavailable("no server watches")
        refusals = LoginRefusals()
        while not self._closing.is_set():
            try:
                message = next(self._call or self._connect())
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
            except StoreError as error:
                failure = error
            except (StopIteration, ValueError):  # ValueError: the channel was closed meanwhile
                failure = Unavailable("the server has ended the watch")
            else:
                return self._reading.take(message)
            self._disconnect()
            now = self._env.clock.now()
            if now >= self._until:
                self._closing.set()
            if self._closing.is_set():
                return
            failure = refusals.judge(self._address, failure, self._addresses(), has_served=deadline is None)
            if is_final(failure):
                raise failure
            deadline = now + self._config.timeout_s if deadline is None else deadline
            if now >= deadline:
                late = refusals.error_or_none(self._addresses(), is_late=True)
                raise late or Unavailable(f"no server watches: {failure}") from failure
            self._closing.wait(min(next(pauses), self._until - now))

    def _connect(self) -> Any:
        # Nobody can close the channel before there is a call: making a stub of a closed channel crashes the process.
        self._address = address = next(self._turns)
        try:
            channel = open_channel(address, self._config.tls, login=self._config.login)
        except (OSError, ConfigError) as error:  # files that are being replaced
            raise Unavailable(f"cannot connect to {address}: {error}") from error
        try:
            stub = kv_pb2_grpc.KVStub(channel)
            if self._check is not None:
                self._check(stub.Topology(kv_pb2.TopologyRequest(), timeout=self._connect_s()), address)
            stream_s = max(STREAM_S_MIN, STREAM_HEARTBEATS * self._reading.watched.heartbeat_s)
            # Watches that began together, after a restart, must not all restart together.
            stream_s *= self._env.random.uniform(0.75, 1.0)
            call = stub.Watch(self._reading.request(), timeout=min(stream_s, self._left_s()))
        except BaseException:
            channel.close()
            raise
        self._channel, self._call = channel, call
        self.connections += 1
        if self._closing.is_set():
            channel.close()  # the watch may have been closed before the channel existed
        return call

    def _left_s(self) -> float:
        return max(0.0, self._until - self._env.clock.now())

    def _connect_s(self) -> float:
        return min(self._config.connect_timeout_s, self._left_s())

    def _disconnect(self) -> None:
        channel, self._channel, self._call = self._channel, None, None
        if channel is not None:
            channel.close()

    def _servers(self) -> Iterator[str]:
        """Yield the servers to ask, without end."""
        while True:
            yield from self._addresses()


def end_in(watch: WatchStream, seconds: float) -> None:
    """Make a watch close itself after a time, also while a thread waits for its next change. Call before the watch is
    ready."""
    watch._until = watch._env.clock.now() + seconds
