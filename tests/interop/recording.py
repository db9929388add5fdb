"""A proxy that forwards frames and records the first of each kind in each direction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvstore.proto import bookkeeper as wire
from kvstore.proto import bookkeeper_pb2 as pb
from kvstore.proto.bookkeeper import BookieOperation
from kvstore.proto.frames import FrameReader


class Recording:
    """Frames by kind, over all connections."""

    def __init__(self) -> None:
        self.frames: dict[str, bytes] = {}

    def request(self, payload: bytes) -> None:
        request = pb.Request.FromString(payload)
        header = request.header
        kind = ["request", BookieOperation(header.operation).name]
        if header.priority:
            kind.append(f"priority={header.priority}")
        if header.operation == BookieOperation.READ_ENTRY:
            read = request.read
            kind += [pb.ReadRequest.Flag.Name(read.flag)] * read.HasField("flag")
            kind += ["last"] * (read.entry == wire.LAST_ENTRY) + ["poll"] * read.HasField("previous_lac")
        if header.operation == BookieOperation.ADD_ENTRY:
            kind += ["recovery"] * request.add.HasField("flag")
        self.frames.setdefault(" ".join(kind), payload)

    def response(self, payload: bytes) -> None:
        response = pb.Response.FromString(payload)
        status = pb.StatusCode.Name(response.status)
        self.frames.setdefault(f"response {BookieOperation(response.header.operation).name} {status}", payload)

    def write(self, path: Path, source: str) -> None:
        """Write one line per kind: its name, a colon, its payload in hexadecimal."""
        lines = [f"{kind}: {payload.hex()}\n" for kind, payload in sorted(self.frames.items())]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# Payloads of frames as {source} sent them.\n" + "".join(lines))


class Proxy:
    """Listens for one bookie and forwards everything to it."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self.target = ""
        """`host:port` of the bookie, to be set before anybody connects."""

    async def listen(self) -> str:
        """Bind a free port. Return `host:port`."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        self._writers += [writer, far_writer]
        back = asyncio.get_running_loop().create_task(_pass_on(far_reader, writer, self._recording.response))
        await _pass_on(reader, far_writer, self._recording.request)
        await back


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: Callable[[bytes], None]) -> None:
    frames = FrameReader(wire.PAYLOAD_MAX)
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            for payload in frames.feed(data):
                record(payload)
            writer.write(data)
            await writer.drain()
    writer.close()
