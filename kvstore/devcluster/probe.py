"""Checks through a server's endpoints that every partition serves. `up` waits for this. Blocking.

The probe writes nothing that clients see. A strict read makes the partition's leader append an entry without a change,
and is answered once that entry is acknowledged (docs/protocol.md, P19). So the probe proves that the partition's log
accepts writes.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

import grpc
import hiredis

from kvstore.env.tls import Tls
from kvstore.errors import NotAuthenticated, PermissionDenied, StoreError, Unavailable
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.ring.ring import Ring
from kvstore.rpc.channels import open_channel
from kvstore.rpc.login import Login, login_of_environment
from kvstore.rpc.status import from_rpc_error
from kvstore.types import PartitionId

_TIMEOUT_S = 5
_KEYS_MAX = 100_000
_REFUSALS = ("NOAUTH ", "NOPERM ")


def keys_to_ask(ring: Ring) -> dict[PartitionId, bytes]:
    """Return one key for each partition that owns any tokens. The keys need not exist."""
    found: dict[PartitionId, bytes] = {}
    for number in range(_KEYS_MAX):
        key = b"%d" % number
        found.setdefault(ring.partition_of(key), key)
        if len(found) == len(ring.owners):
            break
    return found


def probe(
    grpc_address: str,
    resp_address: str,
    keys: Mapping[PartitionId, bytes],
    *,
    tls: Tls | None = None,
    login: Login | None = None,
) -> None:
    """Read each key strictly through the gRPC endpoint, then normally through the Redis endpoint.

    Logs in as `login`, or as the user of the environment. An endpoint that refuses the user counts as answering. Raises
    Unavailable with the partition that did not answer, ConfigError.
    """
    login = login or login_of_environment()
    with open_channel(grpc_address, tls, login=login) as channel:
        stub = kv_pb2_grpc.KVStub(channel)
        for partition, key in keys.items():
            try:
                stub.Get(kv_pb2.GetRequest(key=key, level=kv_pb2.STRICT), timeout=_TIMEOUT_S, wait_for_ready=True)
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                if isinstance(failure, NotAuthenticated | PermissionDenied):
                    return  # it answers, and requires a login
                raise _silent(partition, grpc_address, failure) from error
    try:
        with _Connection(resp_address, tls) as connection:
            if login is not None:  # without access control AUTH is an error, which does not matter
                connection.ask(b"AUTH", login.user.encode(), login.password)
            for partition, key in keys.items():
                found = connection.ask(b"EXISTS", key)
                if isinstance(found, hiredis.ReplyError) and str(found).startswith(_REFUSALS):
                    return
                if isinstance(found, hiredis.ReplyError) and str(found).startswith("MOVED "):
                    continue  # it answers, and names the node that serves the key (`[redis] redirects`)
                if not isinstance(found, int):
                    raise _silent(partition, resp_address, found)
    except OSError as error:
        raise Unavailable(f"{resp_address}: {error}") from error


def _silent(partition: PartitionId, address: str, found: StoreError | object) -> Unavailable:
    return Unavailable(f"partition {partition}: expected a reply to a read at {address}, got {found!r}")


class _Connection:
    def __init__(self, address: str, tls: Tls | None) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=_TIMEOUT_S)
        if tls is not None:
            self._socket = tls.client_context().wrap_socket(self._socket, server_hostname=host)
        self._reader = hiredis.Reader()

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, *words: bytes) -> object:
        packed = hiredis.pack_command(words)  # type: ignore[arg-type]  # the stub allows only one word
        self._socket.sendall(packed)
        while (reply := self._reader.gets()) is False:
            data = self._socket.recv(65536)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self._reader.feed(data)
        return reply
