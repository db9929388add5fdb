"""An in-memory Redis server with GET and SET that is slow or loses writes on request."""

from __future__ import annotations

import socketserver
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event
from time import monotonic
from typing import Any

import hiredis

from tests.beside import served


class SmallRedis(socketserver.ThreadingTCPServer):
    """Takes `answer_s` for each GET. Always keeps the first value of each key if it `is_forgetful`."""

    daemon_threads = True

    def __init__(self, *, answer_s: float = 0.0, is_forgetful: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.answer_s, self.is_forgetful = answer_s, is_forgetful
        self.records: dict[bytes, bytes] = {}
        self.reads = 0
        self.first_read_at = self.last_answer_at = 0.0
        """By the monotonic clock."""
        self.stopped = Event()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def answer(self, command: list[Any]) -> bytes:
        if command[0] == b"SET":
            if not self.is_forgetful or command[1] not in self.records:
                self.records[command[1]] = command[2]
            return b"+OK\r\n"
        assert command[0] == b"GET", command
        self.first_read_at = self.first_read_at or monotonic()
        self.stopped.wait(self.answer_s)
        self.last_answer_at = monotonic()
        self.reads += 1
        value = self.records[command[1]]
        return b"$%d\r\n%b\r\n" % (len(value), value)


class Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, SmallRedis)
        reader = hiredis.Reader()
        with suppress(ConnectionError):
            while data := self.request.recv(1 << 16):
                reader.feed(data)
                while (command := reader.gets()) is not False:
                    self.request.sendall(self.server.answer(command))


@contextmanager
def small_redis(*, answer_s: float = 0.0, is_forgetful: bool = False) -> Iterator[SmallRedis]:
    server = SmallRedis(answer_s=answer_s, is_forgetful=is_forgetful)
    with served(server):
        try:
            yield server
        finally:
            server.stopped.set()
