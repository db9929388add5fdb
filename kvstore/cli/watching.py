"""The change feed on a terminal."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from kvstore.client.config import ClientConfig
from kvstore.client.scanning import scan_bounds
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc.channels import open_channel
from kvstore.rpc.status import from_rpc_error

Line = Callable[[str, int, bytes, bytes | None], str]
"""Partition, sequence, key and new value, None if it was deleted, as what is printed."""


def for_people(partition: str, sequence: int, key: bytes, value: bytes | None) -> str:
    return f"{partition}/{sequence} {key!r} {'deleted' if value is None else f'= {value!r}'}"


def print_changes(config: ClientConfig, prefix: bytes, line: Line | None = None) -> None:
    """Print changes until interrupted. Raises StoreError."""
    line = line or for_people
    start, end = scan_bounds(b"", b"", prefix)
    with open_channel(config.endpoints[0], config.tls) as channel:
        try:
            for message in kv_pb2_grpc.KVStub(channel).Watch(kv_pb2.WatchRequest(start=start, end=end)):
                for change in message.changes:
                    value = change.record.value if change.HasField("record") else None
                    print(line(message.partition, change.sequence, change.key, value), flush=True)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
