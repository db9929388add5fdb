"""Decodes values in Protobuf, by a file with a FileDescriptorSet (`protoc --descriptor_set_out`). Decides only.

Fields that the descriptor does not have are ignored, so that values may gain fields. A field without a value is null if
its message says whether it is set (`optional`, messages, `oneof`), and the default otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from kvstore.errors import ConfigError
from kvstore.spark.value_decoder import Decoder

HOW = "write it with `protoc --include_imports --descriptor_set_out=FILE`"
TIMESTAMP = "google.protobuf.Timestamp"


def protobuf_decoder(definition: bytes, message: str) -> Decoder:
    """Return the decoder of a message in a file of descriptors. Raises ConfigError."""
    pool = DescriptorPool()
    try:
        for each in FileDescriptorSet.FromString(definition).file:
            pool.AddSerializedFile(each.SerializeToString())
        descriptor = pool.FindMessageTypeByName(message)
    except (DecodeError, TypeError) as error:
        raise ConfigError(f"valueSchemaFile: expected a FileDescriptorSet; {HOW}: {error}") from None
    except KeyError:
        raise ConfigError(f"valueMessage: no message {message} is in valueSchemaFile; {HOW}") from None
    kind, fields_of = _message(descriptor, ())
    parse = GetMessageClass(descriptor).FromString

    def decode(value: bytes) -> dict[str, Any]:
        found = parse(value)
        if not found.IsInitialized():
            raise ValueError("a required field is missing")
        return fields_of(found)

    return Decoder(kind, decode)


def _message(descriptor: Descriptor, inside: tuple[str, ...]) -> tuple[Any, Callable[[Any], dict[str, Any]]]:
    """Return the type of a message as a pyarrow.StructType, and the function that returns its fields. `inside` are the
    names of the messages around it."""
    import pyarrow as pa

    name = descriptor.full_name
    if name in inside:
        raise ConfigError(f"valueMessage: no column has the type {name}, because it is recursive")
    found = [(each, *_field(each, (*inside, name))) for each in descriptor.fields]
    if not found:
        raise ConfigError(f"valueMessage: expected messages with fields, got {name} without any")

    def fields_of(message: Any) -> dict[str, Any]:
        return {
            field.name: None
            if field.has_presence and not message.HasField(field.name)
            else read(getattr(message, field.name))
            for field, _, read in found
        }

    return pa.struct([pa.field(field.name, kind) for field, kind, _ in found]), fields_of


def _field(field: FieldDescriptor, inside: tuple[str, ...]) -> tuple[Any, Callable[[Any], Any]]:
    import pyarrow as pa

    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        parts = field.message_type.fields_by_name
        key, _ = _single(parts["key"], inside)
        value, read = _single(parts["value"], inside)
        return pa.map_(key, value), lambda found: [(name, read(each)) for name, each in found.items()]
    kind, read = _single(field, inside)
    return (pa.list_(kind), lambda found: [read(each) for each in found]) if field.is_repeated else (kind, read)


def _single(field: FieldDescriptor, inside: tuple[str, ...]) -> tuple[Any, Callable[[Any], Any]]:
    """Return the type of one value of the field, and the function that converts it for pyarrow."""
    import pyarrow as pa

    if field.message_type is not None:
        if field.message_type.full_name == TIMESTAMP:
            return pa.timestamp("us", tz="UTC"), lambda found: found.seconds * 1_000_000 + found.nanos // 1000
        return _message(field.message_type, inside)
    if field.enum_type is not None:
        names = {each.number: each.name for each in reversed(list(field.enum_type.values))}
        return pa.string(), lambda number: names.get(number, str(number))
    kinds = {
        FieldDescriptor.CPPTYPE_INT32: pa.int32(),
        FieldDescriptor.CPPTYPE_INT64: pa.int64(),
        FieldDescriptor.CPPTYPE_UINT32: pa.int64(),
        FieldDescriptor.CPPTYPE_UINT64: pa.decimal128(20, 0),
        FieldDescriptor.CPPTYPE_FLOAT: pa.float32(),
        FieldDescriptor.CPPTYPE_DOUBLE: pa.float64(),
        FieldDescriptor.CPPTYPE_BOOL: pa.bool_(),
    }
    text = pa.binary() if field.type == FieldDescriptor.TYPE_BYTES else pa.string()
    return kinds.get(field.cpp_type, text), lambda found: found
