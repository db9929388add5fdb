"""The program of docs/how-to/write-a-redis-fallback.md uses the next node when, and only when, that is harmless."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis._parsers.base import BaseParser

from tests.pages import all_blocks

REFUSALS = ["TRYAGAIN p1 has no leader", "CLUSTERDOWN no node answers", "NOREPLICAS one bookie of two answers"]
OTHERS = ["UNKNOWN no answer came", "QUOTA namespace a is full", "ERR value is not an integer or out of range"]


class StubNode:
    """A client of one node: raises `error`, or replies OK."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def execute_command(self, *words: str) -> str:
        if self.error is not None:
            raise self.error
        return "OK"


def program(*nodes: StubNode) -> dict[str, Any]:
    """Return the names of the page's program, with `nodes` in place of its clients."""
    (code,) = [each.code for each in all_blocks() if each.title == "fallback.py"]
    names: dict[str, Any] = {}
    exec(code.partition("\nprint(")[0], names)
    names["CLIENTS"] = nodes
    return names


def as_redis_py_raises(reply: str) -> Exception:
    """Return the exception of an error reply. redis-py removes the first word of some replies."""
    error: Exception = BaseParser.parse_error(reply)
    return error


@pytest.mark.parametrize("reply", REFUSALS)
def test_refused_command_is_repeated_at_the_next_node(reply: str) -> None:
    names = program(StubNode(as_redis_py_raises(reply)), StubNode())
    assert names["command"]("INCR", "k") == "OK"


@pytest.mark.parametrize("reply", OTHERS)
def test_other_errors_are_raised(reply: str) -> None:
    names = program(StubNode(as_redis_py_raises(reply)), StubNode())
    with pytest.raises(redis.ResponseError):
        names["command"]("INCR", "k")


def test_lost_connection_repeats_only_what_is_harmless() -> None:
    lost = redis.ConnectionError("Connection closed by server.")
    names = program(StubNode(lost), StubNode())
    assert names["command"]("GET", "k") == "OK"
    with pytest.raises(redis.ConnectionError):
        names["command"]("INCR", "k")
    with pytest.raises(redis.ConnectionError):
        names["command"]("SET", "k", "v", "NX")


def test_refused_connection_repeats_anything() -> None:
    names = program(StubNode(redis.ConnectionError("Error 111 connecting to a:1. Connection refused.")), StubNode())
    assert names["command"]("INCR", "k") == "OK"
