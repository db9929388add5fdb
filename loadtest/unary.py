"""Plain unary calls, as a client without our library makes them."""

from __future__ import annotations

import asyncio
import time

import grpc

from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc.channels import channel_options

KEYS = 1_000


async def calls_per_second(
    address: str, method: str, tag: str, *, in_flight: int, seconds: float, warmup_s: float = 0.5
) -> float:
    """Get or Put calls per second on keys that the asked node leads."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub = kv_pb2_grpc.KVStub(channel)
        keys = [b"{%b}:%d" % (tag.encode(), number) for number in range(KEYS)]
        value = bytes(100)
        for key in keys[:in_flight]:
            await stub.Put(kv_pb2.PutRequest(key=key, value=value), timeout=5)
        begin = time.perf_counter()
        counted = 0

        async def caller(place: int) -> None:
            nonlocal counted
            number = place
            while (now := time.perf_counter() - begin) < warmup_s + seconds:
                number = (number + in_flight) % KEYS
                if method == "Put":
                    await stub.Put(kv_pb2.PutRequest(key=keys[number], value=value), timeout=5)
                else:
                    await stub.Get(kv_pb2.GetRequest(key=keys[number]), timeout=5)
                counted += now >= warmup_s

        await asyncio.gather(*(caller(place) for place in range(in_flight)))
    return counted / seconds
