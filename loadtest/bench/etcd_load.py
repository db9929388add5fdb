"""Puts keys into etcd over its gRPC interface, with a fixed number of puts in flight, as our client does, for a fair
ratio.

This module encodes the message itself, because PutRequest has only two fields: 1 is the key, 2 is the value.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import grpc

from kvstore.loadtest.loads import Generator, LoadSpec, value_of
from loadtest.bench.peers import etcd_env

CHANNELS = 8
"""Number of connections. etcd's own clients use several, because a single one is a bottleneck."""


def put_request(key: bytes, value: bytes) -> bytes:
    """Return an encoded etcdserverpb.PutRequest."""
    return b"\x0a" + _varint(len(key)) + key + b"\x12" + _varint(len(value)) + value


async def puts_per_second(
    addresses: list[str], *, in_flight: int, value_bytes: int, seconds: float, warmup_s: float = 1.0
) -> float:
    """Return the number of acknowledged puts of random keys per second."""
    channels = [grpc.aio.insecure_channel(address, options=_OPTIONS) for address in addresses * CHANNELS][:CHANNELS]
    calls: Iterator[Any] = itertools.cycle([channel.unary_unary("/etcdserverpb.KV/Put") for channel in channels])
    load = LoadSpec(
        seconds=seconds,
        warmup_s=warmup_s,
        in_flight=in_flight,
        mix=(("put", 1),),
        keys=1_000_000,
        value_bytes=value_bytes,
        prefix=b"key-",
    )
    value = value_of(load)

    async def put(key: bytes) -> None:
        await next(calls)(put_request(key, value), timeout=30)

    outcome = await Generator(load, {"put": put}).run()
    for channel in channels:
        await channel.close()
    return outcome.rate


def check_perf(addresses: list[str]) -> float:
    """Return the writes per second that `etcdctl check perf --load=xl` reports: 1,000 clients for a minute."""
    command = ["etcdctl", "--endpoints", ",".join(addresses), "check", "perf", "--load=xl"]
    done = subprocess.run(command, capture_output=True, text=True, env=etcd_env(), timeout=180, check=False)
    found = re.search(r"hroughput[^0-9]*(\d+) writes/s", done.stdout + done.stderr)
    if found is None:
        raise RuntimeError(f"etcdctl check perf said no throughput: {(done.stdout + done.stderr)[-500:]!r}")
    return float(found[1])


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
