"""Puts into etcd over its gRPC interface, so many in flight: the same load as our client's, for a fair ratio.

The message is so small that it is written out here: PutRequest has the key as field 1 and the value as field 2.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import subprocess
import time

import grpc

from loadtest.bench.peers import ETCD_ENV

CHANNELS = 8
"""etcd's own clients use several connections; one is a bottleneck."""


def put_request(key: bytes, value: bytes) -> bytes:
    """An etcdserverpb.PutRequest."""
    return b"\x0a" + _varint(len(key)) + key + b"\x12" + _varint(len(value)) + value


async def puts_per_second(
    addresses: list[str], *, in_flight: int, value_bytes: int, seconds: float, warmup_s: float = 1.0
) -> float:
    """Acknowledged puts per second of random keys."""
    channels = [grpc.aio.insecure_channel(address, options=_OPTIONS) for address in addresses * CHANNELS][:CHANNELS]
    calls = [channel.unary_unary("/etcdserverpb.KV/Put") for channel in channels]
    numbers = itertools.count()
    begin = time.perf_counter()
    counted = 0

    async def caller(place: int) -> None:
        nonlocal counted
        put = calls[place % len(calls)]
        value = bytes(value_bytes)
        while (now := time.perf_counter() - begin) < warmup_s + seconds:
            number = next(numbers) * 7_919 % 1_000_000
            await put(put_request(b"key-%d" % number, value), timeout=30)
            counted += now >= warmup_s

    await asyncio.gather(*(caller(place) for place in range(in_flight)))
    for channel in channels:
        await channel.close()
    return counted / seconds


def check_perf(addresses: list[str]) -> float:
    """Writes per second as `etcdctl check perf --load=xl` says: 1,000 clients for a minute."""
    command = ["etcdctl", "--endpoints", ",".join(addresses), "check", "perf", "--load=xl"]
    done = subprocess.run(command, capture_output=True, text=True, env=ETCD_ENV, timeout=180, check=False)
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
