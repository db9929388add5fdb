"""One blocking connection to a Redis endpoint, with minimal work between sending and receiving.

The clock is read right before the bytes of a command go to the socket, and as soon as bytes of the reply arrive, as
redis-benchmark does. hiredis packs and parses outside of that time. The socket is Python's own: under gevent it blocks
a greenlet, elsewhere a thread.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import hiredis

from kvstore.env.transport import split_address
from kvstore.errors import Unavailable
from kvstore.loadtest.generator.endpoints import Stopwatch
from kvstore.loadtest.resp import Lost, ReplyError, pack
from kvstore.rpc.login import Login, login_of_environment

READ_BYTES = 1 << 16
CONNECT_S = 1.0
LOAD_S = 30.0
"""Timeout in seconds for one reply while the initial records are written."""


class Unreachable(Exception):
    """Nothing was sent, because the connection was refused."""


class BlockingRespConnection:
    """One blocking connection. Raises Unreachable if host:port refuses the connection or the login."""

    def __init__(self, address: str, watch: Stopwatch, *, connect_s: float, patience_s: float) -> None:
        try:
            self._socket = socket.create_connection(split_address(address), timeout=connect_s)
        except OSError as error:
            raise Unreachable(f"{address}: {error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(patience_s)
        self._reader = hiredis.Reader(replyError=ReplyError)
        self._address, self._watch = address, watch
        login = login_of_environment()
        if login is not None:
            try:
                self._log_in(login)
            except Unreachable:
                self.close()
                raise

    def _log_in(self, login: Login) -> None:
        """Authenticate, outside of all measurements. Raises Unreachable."""
        try:
            self._socket.sendall(pack(b"AUTH", login.user.encode(), login.password))
            while (reply := self._reader.gets()) is False:
                data = self._socket.recv(4096)
                if not data:
                    raise ConnectionResetError("the server closed the connection")
                self._reader.feed(data)
        except OSError as error:
            raise Unreachable(f"{self._address}: {error}") from error
        if isinstance(reply, ReplyError):
            raise Unreachable(f"{self._address}: user {login.user}: {reply}")

    def ask(self, *words: bytes) -> Any:
        """Return the reply to one command. Raises ReplyError, or Lost, after which the connection is unusable."""
        (answer,) = self.ask_all([words])
        if isinstance(answer, ReplyError):
            raise answer
        return answer

    def ask_all(self, commands: Sequence[Sequence[bytes]]) -> list[Any]:
        """Return the replies to commands that are sent together, including ReplyErrors. Raises Lost."""
        packed = b"".join(pack(*words) for words in commands)
        watch, answers = self._watch, []
        try:
            watch.mark_sent()
            sent = self._socket.send(packed)  # nearly always complete, and faster than sendall
            if sent < len(packed):
                self._socket.sendall(packed[sent:])
            for _ in commands:
                while (answer := self._reader.gets()) is False:
                    data = self._socket.recv(READ_BYTES)
                    watch.mark_received()
                    if not data:
                        raise Lost(f"{self._address} closed the connection")
                    self._reader.feed(data)
                answers.append(answer)
        except Lost:
            raise
        except OSError as error:
            raise Lost(f"{self._address}: {error or type(error).__name__}") from error
        return answers

    def close(self) -> None:
        self._socket.close()


def load_records(address: str, parts: Iterable[Mapping[bytes, bytes]]) -> None:
    """Write records through the Redis endpoint of one node, part by part. Raises Unavailable."""
    try:
        connection = BlockingRespConnection(address, Stopwatch(), connect_s=CONNECT_S, patience_s=LOAD_S)
    except Unreachable as error:
        raise Unavailable(str(error)) from error
    try:
        for part in parts:
            for answer in connection.ask_all([(b"SET", key, value) for key, value in part.items()]):
                if isinstance(answer, ReplyError):
                    raise Unavailable(f"{address} refused a record: {answer}")
    except Lost as error:
        raise Unavailable(str(error)) from error
    finally:
        connection.close()
