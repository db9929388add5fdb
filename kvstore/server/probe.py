"""A write and a read of every partition through a server's Redis door: what `up` calls serving. Blocking."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import hiredis

from kvstore.errors import Unavailable
from kvstore.ring.ring import Ring
from kvstore.types import PartitionId

PREFIX = b"\x00kvstore-up-"
"""No key that anybody would choose; it is deleted at once, and expires if that fails."""
EXPIRES_S = 60
_TIMEOUT_S = 5
_KEYS_MAX = 100_000


def probe_keys(ring: Ring) -> dict[PartitionId, bytes]:
    """One key of each partition that owns anything."""
    found: dict[PartitionId, bytes] = {}
    for number in range(_KEYS_MAX):
        key = PREFIX + b"%d" % number
        found.setdefault(ring.partition_of(key), key)
        if len(found) == len(ring.owners):
            break
    return found


def probe(address: str, keys: Mapping[PartitionId, bytes]) -> None:
    """Write, read and delete each key. Raises Unavailable, naming the partition that did not answer as it should."""
    try:
        with _Connection(address) as connection:
            for partition, key in keys.items():
                for command, wanted in (
                    ((b"SET", key, b"up", b"EX", b"%d" % EXPIRES_S), b"OK"),
                    ((b"GET", key), b"up"),
                    ((b"DEL", key), 1),
                ):
                    found = connection.ask(*command)
                    if found != wanted:
                        name = command[0].decode()
                        raise Unavailable(f"partition {partition}: {name} at {address} answered {found!r}")
    except OSError as error:
        raise Unavailable(f"{address}: {error}") from error


class _Connection:
    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=_TIMEOUT_S)
        self._reader = hiredis.Reader()

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, *words: bytes) -> object:
        packed = hiredis.pack_command(words)  # type: ignore[arg-type]  # the stub wants exactly one word
        self._socket.sendall(packed)
        while (reply := self._reader.gets()) is False:
            data = self._socket.recv(65536)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self._reader.feed(data)
        return reply
