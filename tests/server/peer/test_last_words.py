"""The message that proves the end of a server's process: its bytes, and what a server makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.env.death.port import CERTIFICATE_BYTES, identity_of
from kvstore.server.peer.last_words import last_words, with_last_words
from kvstore.server.redis.admission import _GREETING
from kvstore.server.redis.plans import CommandError
from kvstore.types import ServerId
from kvstore.wal.deaths import ProvenDeaths

CERTIFICATE = bytes(range(CERTIFICATE_BYTES))
WORDS = [b"KVSTORE.PEER", b"ENDED", b"1", b"n1", b"c1", CERTIFICATE]


class _Stream:
    """Records what is written."""

    def __init__(self) -> None:
        self.written, self.is_closed = b"", False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True


def accepted(words: list[bytes], deaths: ProvenDeaths) -> tuple[Any, _Stream, list[str]]:
    stream, left = _Stream(), list[str]()

    def accept_peer(*_: Any) -> Any:
        return "link"

    accept = with_last_words(accept_peer, "c1", deaths)
    return accept(words, stream, lambda: left.append("left")), stream, left  # type: ignore[arg-type]


def test_message_has_its_bytes() -> None:
    head = b"*6\r\n$12\r\nKVSTORE.PEER\r\n$5\r\nENDED\r\n$1\r\n1\r\n$2\r\nn1\r\n$2\r\nc1\r\n$32\r\n"
    assert last_words(ServerId("n1"), "c1", CERTIFICATE) == head + CERTIFICATE + b"\r\n"


def test_message_begins_like_a_greeting_that_full_servers_accept() -> None:
    assert last_words(ServerId("n1"), "c1", CERTIFICATE).startswith(_GREETING)


# docs/protocol.md G28
def test_message_is_noted_answered_and_ends_its_connection() -> None:
    deaths = ProvenDeaths()
    handler, stream, left = accepted(WORDS, deaths)
    assert deaths.is_proven(identity_of(CERTIFICATE))
    assert (stream.written, stream.is_closed) == (b"+OK\r\n", True)
    assert left == []
    handler.connection_lost(None)
    assert left == ["left"]


@pytest.mark.parametrize(
    "words",
    [
        WORDS[:5],
        [*WORDS, b"more"],
        [*WORDS[:2], b"2", *WORDS[3:]],
        [*WORDS[:4], b"c2", CERTIFICATE],
        [*WORDS[:5], CERTIFICATE[:-1]],
    ],
)
def test_malformed_or_foreign_message_is_refused(words: list[bytes]) -> None:
    deaths = ProvenDeaths()
    with pytest.raises(CommandError):
        accepted(words, deaths)
    assert not deaths.is_proven(identity_of(words[-1]))


def test_greetings_of_servers_pass() -> None:
    handler, _, _ = accepted([b"KVSTORE.PEER", b"1", b"n2", b"n1", b"c1", bytes(32)], ProvenDeaths())
    assert handler == "link"
