"""The bytes of one connection to a Redis endpoint, and the moment at which their time is read."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvstore.errors import Unavailable
from kvstore.loadtest.generator.endpoints import Stopwatch
from kvstore.loadtest.generator.resp_wire import BlockingRespConnection, Unreachable, load_records
from kvstore.loadtest.resp import Lost, ReplyError
from tests.beside import beside


@contextmanager
def answering(*pieces: bytes) -> Iterator[str]:
    """Run a server that sends each piece after it has received something, then closes; return its address."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            for piece in pieces:
                connection.recv(1 << 16)
                connection.sendall(piece)
            connection.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as listener, beside(lambda _: serve()):
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def connected(*pieces: bytes) -> Iterator[tuple[BlockingRespConnection, Stopwatch]]:
    watch = Stopwatch()
    with answering(*pieces) as address:
        connection = BlockingRespConnection(address, watch, connect_s=30, patience_s=30)
        yield connection, watch
        connection.close()


def test_answers_are_values_and_refusals_are_errors() -> None:
    with connected(b"$2\r\nv1\r\n", b"-TRYAGAIN later\r\n", b":7\r\n") as (connection, _):
        assert connection.ask(b"GET", b"k") == b"v1"
        with pytest.raises(ReplyError, match="TRYAGAIN"):
            connection.ask(b"SET", b"k", b"v")
        assert connection.ask(b"INCR", b"n") == 7


def test_many_commands_are_sent_together_and_each_has_its_answer() -> None:
    with connected(b"+OK\r\n-ERR no\r\n:1\r\n") as (connection, _):
        ok, error, one = connection.ask_all([(b"SET", b"k", b"v"), (b"BAD",), (b"INCR", b"n")])
        assert (ok, one) == (b"OK", 1)
        assert isinstance(error, ReplyError)


def test_connection_that_ends_leaves_the_outcome_open() -> None:
    with connected() as (connection, watch), pytest.raises(Lost):
        connection.ask(b"SET", b"k", b"v")
    assert watch.received


def test_time_is_from_the_first_send_to_the_latest_answer() -> None:
    with connected(b"+OK\r\n", b"+OK\r\n") as (connection, watch):
        assert (watch.sent, watch.received) == (0.0, 0.0)
        connection.ask(b"PING")
        first = watch.sent, watch.received
        assert 0 < first[0] <= first[1]
        connection.ask(b"PING")
        assert watch.sent == first[0]
        assert watch.received >= first[1]
        watch.reset()
        assert (watch.sent, watch.received) == (0.0, 0.0)


def test_without_a_listener_nothing_was_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(Unreachable, match=address):
        BlockingRespConnection(address, Stopwatch(), connect_s=30, patience_s=30)


@pytest.mark.parametrize("answers", [b"-READONLY no writes here\r\n", b""])
def test_records_that_cannot_be_loaded_are_reported(answers: bytes) -> None:
    def load(pieces: Sequence[bytes]) -> None:
        with answering(*pieces) as address:
            load_records(address, [{b"k": b"v"}])

    with pytest.raises(Unavailable):
        load([answers] if answers else [])
