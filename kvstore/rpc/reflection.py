"""gRPC server reflection in both of its versions: v1alpha, which the library has, and v1, which newer tools request
first. Version 1 differs from v1alpha only in its package, so its service is described and answered by the library's."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2_grpc as alpha_grpc

NAMES = (reflection.SERVICE_NAME, "grpc.reflection.v1.ServerReflection")
"""Full names of the services."""


def _describe_version_1() -> None:
    """Add the description of version 1 to the pool from which both versions answer."""
    alpha = descriptor_pb2.FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    described = text_format.Parse(str(alpha).replace("v1alpha", "v1"), descriptor_pb2.FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(described.SerializeToString())


_describe_version_1()


def add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Register both versions. They report `services` and themselves."""
    servicer = reflection.aio.ReflectionServicer((*services, *NAMES))
    alpha_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAMES[1], {"ServerReflectionInfo": method}),))
