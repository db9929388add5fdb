"""gRPC server reflection, version 1, which newer tools request first. The answers are the answers of v1alpha,
because both versions use the same messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2 as alpha

from kvstore.proto import reflection_pb2, reflection_pb2_grpc

SERVICE_NAME: str = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name


class Reflection(reflection_pb2_grpc.ServerReflectionServicer):
    """The service `grpc.reflection.v1.ServerReflection`, on top of the library's v1alpha service."""

    def __init__(self, older: reflection.aio.ReflectionServicer) -> None:
        self._older = older

    async def ServerReflectionInfo(
        self, requests: AsyncIterator[reflection_pb2.ServerReflectionRequest], context: Any
    ) -> AsyncIterator[reflection_pb2.ServerReflectionResponse]:
        async def as_alpha() -> AsyncIterator[Any]:
            async for request in requests:
                yield alpha.ServerReflectionRequest.FromString(request.SerializeToString())

        async for response in self._older.ServerReflectionInfo(as_alpha(), context):
            yield reflection_pb2.ServerReflectionResponse.FromString(response.SerializeToString())
