"""Unanswered writes are errors of their phase."""

from __future__ import annotations

import socketserver
import threading

from loadtest.bench.foreground import writing
from tests.beside import served
from tests.waiting import PATIENCE_S

ANSWERED = 5


class FallsSilent(socketserver.StreamRequestHandler):
    """Answers some writes, and none after them."""

    def handle(self) -> None:
        read = 0
        while self.rfile.readline():
            read += 1
            if read % 7 == 0 and read <= 7 * ANSWERED:  # a SET of three arguments has seven lines
                self.wfile.write(b"+OK\r\n")
            if read == 14 * ANSWERED:
                self.server.is_reached.set()  # type: ignore[attr-defined]


def test_server_that_falls_silent_makes_errors() -> None:
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), FallsSilent)
    server.daemon_threads = True
    server.is_reached = threading.Event()  # type: ignore[attr-defined]
    with served(server), writing([f"127.0.0.1:{server.server_address[1]}"], 100) as foreground:
        foreground.phase("all")
        assert server.is_reached.wait(PATIENCE_S)  # type: ignore[attr-defined]
        found = foreground.end()["all"]
    assert found.writes <= ANSWERED
    assert found.errors >= ANSWERED
