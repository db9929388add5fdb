"""The change feed on a terminal."""

from __future__ import annotations

import grpc

from kvstore.client.config import ClientConfig
from kvstore.client.scanning import scan_bounds
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc.channels import open_channel
from kvstore.rpc.status import from_rpc_error


def print_changes(config: ClientConfig, prefix: bytes) -> None:
    """Print changes until interrupted. Raises StoreError."""
    start, end = scan_bounds(b"", b"", prefix)
    with open_channel(config.endpoints[0], config.tls) as channel:
        try:
            for change in kv_pb2_grpc.KVStub(channel).Watch(kv_pb2.WatchRequest(start=start, end=end)):
                what = f"= {change.record.value!r}" if change.HasField("record") else "deleted"
                print(f"{change.partition}/{change.sequence} {change.key!r} {what}", flush=True)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
