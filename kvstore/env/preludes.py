"""Runs the plain-text conversation on a connection before its TLS handshake. It takes exactly those bytes from the
socket. The handshake reads everything behind them, whoever has sent it, and fails unless it is a handshake."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from struct import Struct

from kvstore.env.ports import Prelude

HANDSHAKE = b"\x16"
"""The first byte of a TLS handshake. A frame that begins with it would have more than 350 MB."""
FRAME_MAX = 64 << 10
"""Maximum bytes of a frame before TLS. It must fit in memory for every connection that is opening."""
RECORD_BYTES_MAX = 16 << 10
"""Payload bytes of one TLS record in plain text."""
ASKS_MAX = 256
"""Maximum bytes of a frame that requests TLS."""
_LENGTH = Struct(">I")
_RECORD = Struct(">BHH")
"""Head of a TLS record: its kind, version, and payload bytes."""
_NO_TLS = ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING")


class NotUnderstood(ConnectionError):
    """The other side ended the connection, or sent no valid frame, before it said anything."""


async def finish_prelude(sock: socket.socket, prelude: Callable[[], Prelude]) -> None:
    """Run the prelude on an accepted connection until the TLS handshake is next. The client may also begin with the
    handshake. Raises OSError. The socket is closed after an error and when this call is cancelled."""
    try:
        if not await _begins_with_handshake(sock):
            await _talk(sock, prelude())
    except BaseException:
        sock.close()
        raise


async def wants_tls(sock: socket.socket, prelude: Callable[[], Prelude] | None) -> bool:
    """Wait for the first bytes of an accepted connection, leave them in the socket, and return True if the client
    uses TLS. Raises OSError if the connection ends first. The socket is closed after an error and when this call is
    cancelled."""
    try:
        if await _peeked(sock, 1) == HANDSHAKE:
            return True
        if prelude is None:
            return False
        (size,) = _LENGTH.unpack(await _peeked(sock, _LENGTH.size))
        if size > ASKS_MAX:
            return False
        return prelude().asks_for_tls((await _peeked(sock, _LENGTH.size + size))[_LENGTH.size :])
    except BaseException:
        sock.close()
        raise


async def wait_for_hello(sock: socket.socket) -> None:
    """Wait until the first TLS record, which is the client's hello, has arrived, and leave it in the socket. Return at
    once for anything else: the handshake refuses it. Raises OSError if the connection ends before; the socket is
    closed then, and when this is cancelled."""
    try:
        head = await _peeked(sock, _RECORD.size)
        kind, _, size = _RECORD.unpack(head)
        if kind == HANDSHAKE[0] and size <= RECORD_BYTES_MAX:
            await _peeked(sock, _RECORD.size + size)
    except BaseException:
        sock.close()
        raise


def speaks_no_tls(error: OSError) -> bool:
    """Return True if a TLS call failed because the other side has no TLS, as far as that can be known. A certificate
    that either side does not accept shows that it has."""
    if isinstance(error, ssl.SSLError):
        return isinstance(error, ssl.SSLEOFError) or error.reason in _NO_TLS
    return isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)


async def call(host: str, port: int, prelude: Prelude) -> socket.socket:
    """Return a connection that is ready for the handshake. Raises NotUnderstood, OSError."""
    sock = await _connect(host, port)
    try:
        await _talk(sock, prelude)
    except BaseException:
        sock.close()
        raise
    return sock


async def _talk(sock: socket.socket, prelude: Prelude) -> None:
    loop = asyncio.get_running_loop()
    if prelude.greeting:
        await loop.sock_sendall(sock, prelude.greeting)
    while not prelude.is_over:
        (size,) = _LENGTH.unpack(await _exactly(sock, _LENGTH.size))
        if size > FRAME_MAX:
            raise NotUnderstood(f"expected a frame of at most {FRAME_MAX} bytes before TLS, got one of {size}")
        if answer := prelude.receive(await _exactly(sock, size)):
            await loop.sock_sendall(sock, answer)


async def _exactly(sock: socket.socket, size: int) -> bytes:
    loop, found = asyncio.get_running_loop(), bytearray()
    while len(found) < size:
        try:
            data = await loop.sock_recv(sock, size - len(found))
        except ConnectionError as error:
            raise NotUnderstood(f"the connection ended before TLS: {error}") from error
        if not data:
            raise NotUnderstood("the connection ended before TLS")
        found += data
    return bytes(found)


async def _begins_with_handshake(sock: socket.socket) -> bool:
    """Wait for the first byte, and leave it in the socket."""
    while True:
        try:
            return sock.recv(1, socket.MSG_PEEK) == HANDSHAKE
        except (BlockingIOError, InterruptedError):
            await _readable(sock)


async def _peeked(sock: socket.socket, size: int) -> bytes:
    """Wait for `size` bytes, and leave them in the socket. Raises ConnectionError if the connection ends before."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)  # else the socket would be readable with fewer bytes
    had = -1
    while True:
        try:
            found = sock.recv(size, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            await _readable(sock)
            continue
        if len(found) == size:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            return found
        if len(found) == had or not found:
            raise ConnectionResetError("the connection ended before the first bytes of TLS")
        had = len(found)
        await _readable(sock)


async def _readable(sock: socket.socket) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)


async def _connect(place: str, port: int) -> socket.socket:
    """Return a connection to an address. Raises OSError."""
    loop = asyncio.get_running_loop()
    failed = OSError(f"{place} is no address")
    numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    for family, kind, protocol, _, address in socket.getaddrinfo(place, port, type=socket.SOCK_STREAM, flags=numeric):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, address)
            return sock
        except OSError as error:
            failed = error
            sock.close()
        except BaseException:
            sock.close()
            raise
    raise failed
