"""Values in Protobuf become the fields of a message in a file of descriptors, which protoc writes."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_tools import protoc

from kvstore.errors import ConfigError, InvalidRequest
from kvstore.spark import columns
from kvstore.spark.options import Types, types_of
from kvstore.spark.protobuf_values import protobuf_decoder

SHOP = """
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
message Order {
  enum State { OPEN = 0; PAID = 1; }
  message Line { int32 count = 1; }
  int64 id = 1;
  uint32 small = 2;
  uint64 big = 3;
  optional string name = 4;
  bytes raw = 5;
  double price = 6;
  float weight = 7;
  bool paid = 8;
  State state = 9;
  google.protobuf.Timestamp at = 10;
  repeated Line lines = 11;
  map<string, Line> by_name = 12;
  repeated sint32 counts = 13;
  oneof how { string card = 14; int32 cash = 15; }
}
message Tree { int32 id = 1; repeated Tree children = 2; }
message Nothing {}
message WithNothing { Nothing nothing = 1; }
"""
OLD = 'syntax = "proto2"; package old; message Thing { required int32 id = 1; optional int32 size = 2 [default = 9]; }'
EMPTY = {
    "id": 0,
    "small": 0,
    "big": Decimal(0),
    "name": None,
    "raw": b"",
    "price": 0.0,
    "weight": 0.0,
    "paid": False,
    "state": "OPEN",
    "at": None,
    "lines": [],
    "by_name": [],
    "counts": [],
    "card": None,
    "cash": None,
}


def described(folder: Path, text: str, *more: str) -> Path:
    """Return the file of descriptors that protoc makes from a schema."""
    (folder / "shop.proto").write_text(text)
    found = folder / "shop.desc"
    include = [f"-I{folder}", f"-I{files('grpc_tools') / '_proto'}"]
    assert protoc.main(["protoc", *include, *more, f"--descriptor_set_out={found}", "shop.proto"]) == 0
    return found


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return described(tmp_path, SHOP, "--include_imports")


def types_at(path: Path, message: str = "shop.Order") -> Types:
    return types_of({"valueType": "protobuf", "valueSchemaFile": str(path), "valueMessage": message})


def message_at(path: Path, name: str = "shop.Order") -> Any:
    pool = DescriptorPool()
    for each in FileDescriptorSet.FromString(path.read_bytes()).file:
        pool.AddSerializedFile(each.SerializeToString())
    return GetMessageClass(pool.FindMessageTypeByName(name))


def read(types: Types, *values: bytes | None) -> list[Any]:
    keys = [b"k%d" % number for number in range(len(values))]
    rows = pa.RecordBatch.from_pydict({"key": keys, "value": pa.array(values, pa.binary())})
    found: list[Any] = columns.typed(rows, types)["value"].to_pylist()
    return found


def test_message_becomes_typed_columns(shop: Path) -> None:
    kind = message_at(shop)
    order = kind(id=-7, small=2**32 - 1, big=2**64 - 1, name="", raw=b"\xff", state="PAID", cash=0, counts=[-1])
    order.at.FromDatetime(datetime(2026, 11, 30, tzinfo=UTC))
    order.lines.add(count=2)
    order.by_name["a"].count = 3
    types = pickle.loads(pickle.dumps(types_at(shop)))  # Spark sends it to tasks
    assert read(types, order.SerializeToString(), b"", None) == [
        EMPTY
        | {
            "id": -7,
            "small": 2**32 - 1,
            "big": Decimal(2**64 - 1),
            "name": "",
            "raw": b"\xff",
            "state": "PAID",
            "at": datetime(2026, 11, 30, tzinfo=UTC),
            "lines": [{"count": 2}],
            "by_name": [("a", {"count": 3})],
            "counts": [-1],
            "cash": 0,
        },
        EMPTY,
        None,
    ]


def test_fields_and_symbols_of_later_schemas_are_no_errors(shop: Path) -> None:
    """Unknown fields are ignored, and an unknown symbol is its number."""
    later = message_at(shop)(id=1).SerializeToString() + b"\x48\x05" + b"\xa2\x06\x01x"  # state = 5, and a field 100
    assert read(types_at(shop), later) == [EMPTY | {"id": 1, "state": "5"}]


@pytest.mark.parametrize(
    "value", [b"\x08", b"{}", b"\x22\x01\xff", b"\x52\x0b\x08\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x10"]
)
def test_value_that_does_not_match_is_refused(shop: Path, value: bytes) -> None:
    with pytest.raises(InvalidRequest, match="valueType protobuf: expected a value that matches the schema"):
        read(types_at(shop), value)


def test_value_without_a_required_field_is_refused(tmp_path: Path) -> None:
    types = types_at(described(tmp_path, OLD), "old.Thing")
    assert read(types, b"\x08\x01") == [{"id": 1, "size": None}]
    with pytest.raises(InvalidRequest, match="expected a value that matches the schema"):
        read(types, b"\x10\x01")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shop.Bill", "valueMessage: no message shop.Bill is in valueSchemaFile"),
        ("shop.Tree", "valueMessage: no column has the type shop.Tree, because it is recursive"),
        ("shop.WithNothing", "expected messages with fields, got shop.Nothing without any"),
    ],
)
def test_message_without_columns_is_refused(shop: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        protobuf_decoder(shop.read_bytes(), name)
    assert message in str(raised.value)


def test_file_without_its_imports_names_the_option_of_protoc(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--include_imports"):
        protobuf_decoder(described(tmp_path, SHOP).read_bytes(), "shop.Order")
    with pytest.raises(ConfigError, match="expected a FileDescriptorSet"):
        protobuf_decoder(b"syntax", "shop.Order")
