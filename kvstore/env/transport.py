"""The Transport port on TCP. A handler is the event loop's own protocol, so nothing stands between it and its bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.env.ports import Listener, Stream, StreamHandler

BACKLOG_MAX = 1024
"""Connections that the kernel holds before they are accepted."""


class TcpListener:
    """A bound address that accepts connections until closed."""

    def __init__(self, server: asyncio.Server, address: str) -> None:
        self._server = server
        self.address = address

    def close(self) -> None:
        """Accept no more connections. Those accepted go on."""
        self._server.close()


class TcpTransport:
    """TCP streams without delay (TCP_NODELAY, which asyncio and uvloop set by themselves)."""

    async def listen(self, address: str, factory: Callable[[], StreamHandler]) -> Listener:
        """Raises OSError if the address is taken or not ours. Port 0 picks a free one."""
        host, port = split_address(address)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(factory, host, port, backlog=BACKLOG_MAX)  # type: ignore[arg-type]
        bound = server.sockets[0].getsockname()[1]
        return TcpListener(server, join_address(host, bound))

    async def connect(self, address: str, handler: StreamHandler) -> Stream:
        """Raises OSError. The caller sets the deadline."""
        host, port = split_address(address)
        loop = asyncio.get_running_loop()
        stream, _ = await loop.create_connection(lambda: handler, host, port)  # type: ignore[type-var]
        return stream


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[ipv6]:port` in its two parts. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"want host:port, got {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """The two parts as one address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
