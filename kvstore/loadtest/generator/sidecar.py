"""The sidecar of a process of Locust's users: an asyncio client in its own process that makes the users' calls.

    python -m kvstore.loadtest.generator.sidecar FD

FD is an inherited socket. Its first message describes the cluster. The process ends when the socket is closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from kvstore.client import AsyncClient, Level
from kvstore.errors import OutcomeUnknown, StoreError
from kvstore.loadtest.generator.options import Options
from kvstore.loadtest.generator.sidecar_wire import (
    OPENED,
    STARTED,
    CallRequest,
    CallResult,
    CallResults,
    Messages,
    message,
)
from kvstore.loadtest.report.recorder import queued_or_none
from kvstore.rpc.status import describe

READ_BYTES = 1 << 20


class Sidecar:
    """Receives requests and sends results. All results of one event-loop turn share a message."""

    def __init__(self, client: AsyncClient, writer: asyncio.StreamWriter) -> None:
        self._client, self._writer = client, writer
        self._results: list[CallResult] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        result = CallResult(OPENED, 0.0, 0.0)
        try:
            await self._client.open()
        except StoreError as error:
            result.error = tuple(describe(error))  # type: ignore[assignment]
        self.send(result)

    async def close(self) -> None:
        await self._client.close()

    def take(self, request: CallRequest) -> None:
        task = asyncio.get_running_loop().create_task(self._call(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, request: CallRequest) -> None:
        result = CallResult(request.number, time.time(), 0.0)
        try:
            result.items = await self._items(request)
        except StoreError as error:
            result.error = tuple(describe(error))  # type: ignore[assignment]
        except Exception as error:  # the root of a task: its user must not wait until the run ends
            logging.getLogger(__name__).exception("a call failed: %s", request.call)
            result.error = tuple(describe(OutcomeUnknown(f"the sidecar's {request.call} failed: {error!r}")))  # type: ignore[assignment]
        result.received = time.time()
        self.send(result)

    async def _items(self, request: CallRequest) -> list[tuple[bytes, bytes, int]]:
        match request.call:
            case "get":
                found = await self._client.get(request.key, level=Level(request.level))
                return [] if found is None else [(b"", found.value, found.version)]
            case "put":
                return [(b"", b"", await self._client.put(request.key, request.value, if_version=request.if_version))]
            case "scan":
                scan = self._client.scan(request.key, request.end, limit=request.limit, level=Level(request.level))
                return [(key, item.value, item.version) async for key, item in scan]
        raise AssertionError(request.call)

    def send(self, result: CallResult) -> None:
        if not self._results:
            asyncio.get_running_loop().call_soon(self._flush)
        self._results.append(result)

    def _flush(self) -> None:
        self._writer.write(message(CallResults(self._results, time.process_time(), queued_or_none())))
        self._results = []


async def serve(connection: socket.socket) -> None:
    """Serve until the users disconnect. The first results report that the sidecar runs, and if it found a cluster."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=READ_BYTES)
    messages: Messages[str | list[CallRequest]] = Messages(str | list[CallRequest])
    writer.write(message(CallResults([CallResult(STARTED, 0.0, 0.0)], 0.0, None)))
    sidecar: Sidecar | None = None
    while data := await reader.read(READ_BYTES):
        for body in messages.feed(data):
            if isinstance(body, str):
                sidecar = Sidecar(AsyncClient(Options.of_cluster(body).client_config()), writer)
                await sidecar.open()
                continue
            assert sidecar is not None, "the first message describes the cluster"
            for request in body:
                sidecar.take(request)
    if sidecar is not None:
        await sidecar.close()
    writer.close()


def main(words: list[str]) -> None:
    (fd,) = words
    run: Any = asyncio.run
    with suppress(ModuleNotFoundError):  # it comes with a node; here it is optional
        from uvloop import run
    run(serve(socket.socket(fileno=int(fd))))


if __name__ == "__main__":
    main(sys.argv[1:])
