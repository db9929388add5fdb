"""A server for our gRPC clients that stores keys in a dictionary. It shows the cost of gRPC and of a client by
themselves.

python -m loadtest.bench.memory_server HOST:PORT
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc.channels import server_options

NAME = "memory"
TOKEN_MAX = (1 << 32) - 1


class Memory(kv_pb2_grpc.KVServicer):  # type: ignore[misc]  # of its methods those that our clients need
    """One partition that this server leads. Answers GET and PUT."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._records: dict[bytes, tuple[int, bytes]] = {}
        self._version = 0

    async def Topology(self, request: kv_pb2.TopologyRequest, context: Any) -> kv_pb2.TopologyResponse:
        await asyncio.sleep(request.wait_ms / 1000 if request.known else 0)
        return kv_pb2.TopologyResponse(
            known=1,
            ring_version=1,
            tokens=[TOKEN_MAX],
            owners=[0],
            partitions=[kv_pb2.Partition(id=NAME, state="active", leader=NAME, epoch=1, replicas=[NAME])],
            servers=[kv_pb2.Server(id=NAME, grpc=self._address)],
            server=NAME,
        )

    async def Execute(self, request: kv_pb2.Frame, context: Any) -> kv_pb2.Answers:
        return self._answers(request)

    async def Session(self, request_iterator: AsyncIterator[kv_pb2.Frame], context: Any) -> None:  # type: ignore[override]
        await context.send_initial_metadata(())
        async for frame in request_iterator:
            await context.write(self._answers(frame))

    def _answers(self, frame: kv_pb2.Frame) -> kv_pb2.Answers:
        answers = kv_pb2.Answers(ring_version=1)
        for lane in frame.lanes:
            for index, (code, key) in enumerate(zip(lane.codes, lane.keys, strict=True)):
                if code == kv_pb2.PUT:
                    self._version += 1
                    self._records[key] = (self._version, lane.values[index] if lane.values else b"")
                    answers.numbers.append(lane.first + index)
                    answers.versions.append(self._version)
                else:
                    self._read(answers, lane.first + index, key)
        return answers

    def _read(self, answers: kv_pb2.Answers, number: int, key: bytes) -> None:
        version, value = self._records.get(key, (0, b""))
        if not version:
            answers.absent.append(number)
            return
        answers.found.append(number)
        answers.values.append(value)
        answers.found_versions.append(version)
        answers.created.append(version)
        answers.written_ms.append(1)


async def serve(address: str) -> None:
    server = grpc.aio.server(options=server_options())
    kv_pb2_grpc.add_KVServicer_to_server(Memory(address), server)
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
