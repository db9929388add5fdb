"""A client for gevent's users that costs little processor time: it hands calls to a sidecar, a process of its own with
the asyncio client (sidecar.py). All calls of one turn of gevent's loop share a message.

gRPC under gevent takes 0.4 ms of processor time per call, so one process generates at most about 2,000 calls per
second.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Self

import gevent
from gevent.event import AsyncResult

from kvstore.client import Item, Level
from kvstore.errors import OutcomeUnknown, Unavailable
from kvstore.loadtest.generator.sidecar_wire import (
    OPENED,
    STARTED,
    CallRequest,
    CallResult,
    CallResults,
    Messages,
    message,
)
from kvstore.rpc.status import restore

READ_BYTES = 1 << 20
OPEN_S, END_S = 60.0, 10.0


class SidecarClient:
    """The client side of a sidecar. Offers the calls of kvstore.client.Client that the endpoints need, with the same
    errors. `times` is when the sidecar sent and received the last call that returned in this greenlet."""

    def __init__(self) -> None:
        """Start the sidecar process. It starts before the run, however long its interpreter takes."""
        ours, theirs = socket.socketpair()
        self._socket = ours
        command = [sys.executable, "-Pm", "kvstore.loadtest.generator.sidecar", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._number = 0
        self._waiting: dict[int, AsyncResult[CallResult]] = {STARTED: AsyncResult(), OPENED: AsyncResult()}
        self._out: list[CallRequest] | str = []
        self._is_over = False
        self.times = (0.0, 0.0)
        self.processor_s = 0.0
        self.queued_s: float | None = None
        self._wake = gevent.event.Event()
        self._greenlets = [gevent.spawn(self._read), gevent.spawn(self._write)]

    def wait_started(self) -> None:
        """Wait until the sidecar has started, so that its start is not measured. Raises Unavailable."""
        self._result(self._waiting[STARTED], OPEN_S)

    def open(self, cluster: str) -> Self:
        """Connect to the cluster that `Options.cluster` describes. Raises StoreError."""
        self._out = cluster
        self._wake.set()
        try:
            self._result(self._waiting[OPENED], OPEN_S)
        except BaseException:
            self.close()
            raise
        return self

    def get(self, key: bytes, *, level: Level) -> Item | None:
        items = self._ask("get", key, level=level.value).items
        return Item(items[0][1], items[0][2], 0, 0, 0) if items else None

    def put(self, key: bytes, value: bytes, *, if_version: int | None = None) -> int:
        return self._ask("put", key, value=value, if_version=if_version).items[0][2]

    def scan(self, start: bytes, end: bytes, *, limit: int, level: Level) -> Iterator[tuple[bytes, Item]]:
        result = self._ask("scan", start, end=end, limit=limit, level=level.value)
        return iter([(key, Item(value, version, 0, 0, 0)) for key, value, version in result.items])

    def close(self) -> None:
        """Stop the sidecar. Calls in flight raise an error."""
        self._lose()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _ask(self, call: str, key: bytes, **more: object) -> CallResult:
        if self._is_over:
            raise Unavailable("the sidecar has ended")
        self._number += 1
        number = self._number
        waiting: AsyncResult[CallResult] = AsyncResult()
        self._waiting[number] = waiting
        assert isinstance(self._out, list), "call open() first"
        self._out.append(CallRequest(number, call, key, **more))  # type: ignore[arg-type]
        self._wake.set()
        try:
            result = self._result(waiting, None)
        finally:
            self._waiting.pop(number, None)
        self.times = result.sent, result.received
        return result

    def _result(self, waiting: AsyncResult[CallResult], timeout_s: float | None) -> CallResult:
        try:
            result: CallResult = waiting.get(timeout=timeout_s)
        except gevent.Timeout:
            raise Unavailable(f"the sidecar did not start within {OPEN_S:g} s") from None
        if result.error is not None:
            raise restore(*result.error)
        return result

    def _read(self) -> None:
        messages: Messages[CallResults] = Messages(CallResults)
        with suppress(OSError):
            while data := self._socket.recv(READ_BYTES):
                for results in messages.feed(data):
                    self.processor_s, self.queued_s = results.processor_s, results.queued_s
                    for result in results.results:
                        if (waiting := self._waiting.get(result.number)) is not None:
                            waiting.set(result)
        self._lose()

    def _write(self) -> None:
        with suppress(OSError):
            while not self._is_over:
                self._wake.wait()
                self._wake.clear()
                out, self._out = self._out, []
                if out:
                    self._socket.sendall(message(out))
        self._lose()

    def _lose(self) -> None:
        """Fail all calls in flight with an unknown outcome: no more results arrive."""
        self._is_over = True
        self._wake.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for waiting in list(self._waiting.values()):
            if not waiting.ready():
                waiting.set_exception(OutcomeUnknown("the sidecar has ended"))
