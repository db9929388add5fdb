"""A session's frames on a plain byte stream, without gRPC. The test of this module has golden bytes.

    client → KVSTORE.PEER SESSION 1 server [user password]
                                               a RESP array of bulk strings: the first command on a server's Redis port
    server := id | id "@" cluster              the server that is meant; a server of 0.1 knows itself by its id alone
    server → +KVSTORE SESSION 1                or an error: this is another server, or one that knows no such streams
    client → message*                          each a Frame of kv.proto
    server → message*                          each an Answers

    message := length i32 big endian | kind u8 | body          the length is that of kind and body
    kind    := 1, the body is as kvstore/proto/compact.py says   |   2, it is protobuf

The client waits for the first line before it sends a message. A frame without lanes is answered by Answers without
results, which lets a client check that a silent server is alive.
"""

from __future__ import annotations

from struct import Struct
from typing import Any

from google.protobuf.message import Message

from kvstore.proto import compact

VERSION = b"1"
WORD = b"SESSION"
"""Sent in place of a link's version between servers. A server that does not know the word refuses it as a wrong
version."""
WELCOME = b"+KVSTORE SESSION 1\r\n"
LINE_MAX = 1_024
"""Maximum length of the first line, errors included."""
COMPACT, PROTOBUF = 1, 2
_HEAD = Struct(">iB")


def hello(server: str, *login: bytes) -> bytes:
    """Encode the first command to the server of this id. `login` is empty, or user and password."""
    words = (b"KVSTORE.PEER", WORD, VERSION, server.encode(), *login)
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def full_name(server: str, cluster: str) -> str:
    """Return the name by which a server of a known cluster is called."""
    return f"{server}@{cluster}" if cluster else server


def refusal_or_none(words: list[bytes], server: str, cluster: str = "") -> str | None:
    """Return why `server` refuses a stream that begins with these words, without the command's own; None if it
    accepts."""
    match words:
        case [_, version, called] | [_, version, called, _, _] if version == VERSION:
            if called in (server.encode(), full_name(server, cluster).encode()):
                return None
            is_of_another = bool(cluster) and called.startswith(f"{server}@".encode())
            return f"session: this is server {server}" + f" of cluster {cluster}" * is_of_another
        case [_, version, _] | [_, version, _, _, _] if version != VERSION:
            return f"session version: want {VERSION.decode()}"
        case _:
            return f"session: want a version and a server, got {len(words)} words"


def knows_no_clusters(refusal: str, server: str) -> bool:
    """Return True if the server that was called by its full name is the right one, but too old to know that name."""
    return refusal.endswith(f"session: this is server {server}")


def message_of(content: compact.CompactFrame | compact.CompactAnswers[Any]) -> bytes:
    """Encode a compact frame or compact answers."""
    body = compact.encode(content)
    return _HEAD.pack(len(body) + 1, COMPACT) + body


def protobuf_message_of(content: Message) -> bytes:
    """Encode any other message."""
    body = content.SerializeToString()
    return _HEAD.pack(len(body) + 1, PROTOBUF) + body
