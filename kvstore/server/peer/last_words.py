"""The last message of a server: the certificate that its process has ended (docs/protocol.md, G28).

    death watch → KVSTORE.PEER ENDED 1 from cluster certificate      a RESP array of bulk strings
    other server → +OK

The message needs no login, because the certificate proves itself: only the death watch of a process that has ended
publishes one, and a certificate that belongs to no process proves nothing.
"""

from __future__ import annotations

from kvstore.env import Stream, StreamHandler
from kvstore.env.death.port import CERTIFICATE_BYTES
from kvstore.server.redis.listener import AcceptPeer, Leave
from kvstore.server.redis.plans import CommandError
from kvstore.types import ServerId
from kvstore.wal.deaths import ProvenDeaths

WORD, VERSION = b"ENDED", b"1"
_WORDS = 6
"""The number of words of a server's greeting, so that a node with its maximum number of clients accepts the message."""


def last_words(server: ServerId, cluster: str, certificate: bytes) -> bytes:
    """Return the message that proves the end of the process."""
    words = (b"KVSTORE.PEER", WORD, VERSION, server.encode(), cluster.encode(), certificate)
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def with_last_words(accept_peer: AcceptPeer, cluster: str, deaths: ProvenDeaths) -> AcceptPeer:
    """Return a function that takes last messages, and passes all other connections to `accept_peer`."""

    def accept(words: list[bytes], stream: Stream, leave: Leave) -> StreamHandler:
        if words[1] != WORD:
            return accept_peer(words, stream, leave)
        if len(words) != _WORDS or words[2] != VERSION or len(words[5]) != CERTIFICATE_BYTES:
            raise CommandError(
                f"ERR peer: expected {WORD.decode()} {VERSION.decode()}, from, cluster and a certificate of "
                f"{CERTIFICATE_BYTES} bytes"
            )
        if words[4] != cluster.encode():
            raise CommandError("ERR peer: this server is of another cluster")
        deaths.note(words[5])
        stream.write(b"+OK\r\n")
        stream.close()
        return _Answered(leave)

    return accept


class _Answered:
    """The StreamHandler of a connection whose message was answered, until the connection is lost."""

    def __init__(self, leave: Leave) -> None:
        self._leave = leave

    def connection_made(self, transport: Stream) -> None:
        raise AssertionError("the connection existed before the message")

    def data_received(self, data: bytes) -> None:
        """Does nothing, because the message is complete."""

    def eof_received(self) -> bool | None:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()

    def pause_writing(self) -> None:
        """Does nothing, because the answer is short."""

    def resume_writing(self) -> None:
        """Does nothing, because the answer is short."""
