"""The stream under a blocking watch: the part of a watch that asyncio does differently (aio/stream.py).

A worker thread asks servers and takes in what they send, so an exception that strikes the caller's thread leaves the
stream whole. The next call waits for the worker that the interrupted call has left behind.
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
"""How long one stream lasts. A thread cannot stop waiting for a message, so a server that has fallen silent is left at
the end of the stream: five minutes by default. However short the heartbeat, a server first finds its place in the logs
of all partitions in that time."""


class WatchStream(ClosedAtExit):
    """Reads the messages of one watch, at one server after another, for one thread; another thread may `close` it."""

    def __init__(
        self,
        env: LibraryEnv,
        config: ClientConfig,
        reading: WatchCursor,
        addresses: Callable[[], list[str]],
        check: Check | None,
    ) -> None:
        """If there is a `check`, the stream asks a server for its topology before it asks the server to watch: another
        server may listen at an address by then, and a watch that begins cannot tell."""
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
        self._closing = threading.Event()  # a thread that is not here may hold its lock
        self.is_forked = True

    @property
    def _is_closed(self) -> bool:
        return self._closing.is_set()

    def _check_caller(self) -> None:
        """Raises InvalidRequest in the child of a fork."""
        forks.check(self)

    def _run_step(self, step: Callable[[], None]) -> None:
        """Have a worker take a step. If an interrupted call has left a step behind, wait for the end of that one first;
        an error that it met comes again."""
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
        """End the watch. `position` stays."""
        workers.run_within(self._close, CLOSE_S)

    def _close(self) -> None:
        self._closing.set()
        self._disconnect()

    def _read_more(self) -> None:
        """Read until there is a change, or a message after the caller has left: a watch that was dropped is collected
        once no worker reads for it."""
        while not self._reading.has_more and not self._closing.is_set() and not self._has_left:
            self._read_message()

    def _read_message(self) -> None:
        """The next message, over as many servers as it takes."""
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
            except (StopIteration, ValueError):  # the stream has ended; ValueError: the channel was closed meanwhile
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
        # Nobody can close the channel before there is a call: making a stub of a closed one is a crash of the process.
        self._address = address = next(self._turns)
        try:
            channel = open_channel(address, self._config.tls, login=self._config.login)
        except (OSError, ConfigError) as error:  # files that are replaced just now
            raise Unavailable(f"no connection to {address} can be made: {error}") from error
        try:
            stub = kv_pb2_grpc.KVStub(channel)
            if self._check is not None:
                self._check(stub.Topology(kv_pb2.TopologyRequest(), timeout=self._connect_s()), address)
            stream_s = max(STREAM_S_MIN, STREAM_HEARTBEATS * self._reading.watched.heartbeat_s)
            # Watches that began together, after a restart, do not all begin again together.
            stream_s *= self._env.random.uniform(0.75, 1.0)
            call = stub.Watch(self._reading.request(), timeout=min(stream_s, self._left_s()))
        except BaseException:
            channel.close()
            raise
        self._channel, self._call = channel, call
        self.connections += 1
        if self._closing.is_set():
            channel.close()  # who closed the watch may have come before this one was there
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
        """Whom to ask, for ever."""
        while True:
            yield from self._addresses()


def end_in(watch: WatchStream, seconds: float) -> None:
    """Have it close itself then, also while a thread waits for its next change. To be said before it is ready."""
    watch._until = watch._env.clock.now() + seconds
