"""The JSON bodies of the gateway, in and out: their fields, and how bytes stand in them. Decides only.

JSON has no bytes. So whatever is bytes has two fields, of which one is there: `value`, text, and `value_base64`.
Answers have the first where the bytes are UTF-8, unless base64 is asked for. The OpenAPI document is made of these
classes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from kvstore.errors import InvalidRequest
from kvstore.proto import kv_pb2
from kvstore.server.grpc.decode import NUMBER_MAX

Number = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Text = str | UnsetType
Base64 = bytes | UnsetType
T = TypeVar("T", bound=Struct)

# ── what comes ────────────────────────────────────────────────────────────────────────────────────────────────────────


class ValueBody(Struct, forbid_unknown_fields=True):
    """A value, as text or in base64."""

    value: Text = UNSET
    value_base64: Base64 = UNSET


class OperationBody(Struct, forbid_unknown_fields=True):
    """One operation of a batch; which fields it may have depends on what it is."""

    operation: Literal["get", "meta", "put", "delete", "increment", "append", "expire", "check"]
    key: Text = UNSET
    key_base64: Base64 = UNSET
    value: Text = UNSET
    value_base64: Base64 = UNSET
    ttl_ms: Annotated[int, Meta(ge=1, le=NUMBER_MAX)] | UnsetType = UNSET
    expires_ms: Number | UnsetType = UNSET
    keep_ttl: bool | UnsetType = UNSET
    return_old: bool | UnsetType = UNSET
    delta: int | UnsetType = UNSET
    if_version: Annotated[int, Meta(ge=1, le=NUMBER_MAX)] | UnsetType = UNSET
    if_absent: bool | UnsetType = UNSET
    if_present: bool | UnsetType = UNSET


class BatchBody(Struct, forbid_unknown_fields=True):
    """Operations on keys of one partition: all or nothing, unless they are independent."""

    operations: list[OperationBody]
    independent: bool = False


CODES: dict[str, kv_pb2.Code.ValueType] = {
    "get": kv_pb2.GET,
    "meta": kv_pb2.META,
    "put": kv_pb2.PUT,
    "delete": kv_pb2.DELETE,
    "increment": kv_pb2.INCREMENT,
    "append": kv_pb2.APPEND,
    "expire": kv_pb2.EXPIRE,
    "check": kv_pb2.CHECK,
}
_KEY = frozenset(("operation", "key", "key_base64"))
_VALUE = frozenset(("value", "value_base64"))
_CONDITIONS = frozenset(("if_version", "if_absent", "if_present"))
FIELDS: dict[str, frozenset[str]] = {
    "get": _KEY,
    "meta": _KEY,
    "put": _KEY | _VALUE | _CONDITIONS | {"ttl_ms", "expires_ms", "keep_ttl", "return_old"},
    "delete": _KEY | {"if_version", "if_present", "return_old"},
    "increment": _KEY | {"delta"},
    "append": _KEY | _VALUE,
    "expire": _KEY | {"ttl_ms", "expires_ms"},
    "check": _KEY | _CONDITIONS,
}
"""Of an operation in a batch."""


def read(body: bytes, kind: type[T]) -> T:
    """Read a body. Raises InvalidRequest, which says where it is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"want a JSON body as /v1/openapi.json says: {error}") from None


def bytes_of(text: Text, base64: Base64, name: str) -> bytes:
    """The bytes of a pair of fields. Raises InvalidRequest unless one of them is there."""
    if (text is UNSET) == (base64 is UNSET):
        found = "neither" if text is UNSET else "both"
        raise InvalidRequest(f"want {name} or {name}_base64, got {found}")
    return base64 if isinstance(base64, bytes) else str(text).encode()


# ── what goes out ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Item(Struct, omit_defaults=True):
    """A key and its record. Without a value: none was asked for, and `length` says how long it is, if that is known."""

    version: int
    created: int
    written_ms: int
    expires_ms: int
    """0: never."""
    key: Text = UNSET
    key_base64: Base64 = UNSET
    value: Text = UNSET
    value_base64: Base64 = UNSET
    length: int | UnsetType = UNSET


class Failure(Struct, omit_defaults=True):
    """Tells why a request failed, and what became of it."""

    code: int
    """The HTTP status."""
    reason: str
    """The error's name; those of docs/reference/http.md."""
    message: str
    outcome: Literal["refused", "unknown"]
    """Refused: definitely not done. Unknown: it may be done, or may still be for a moment."""
    retry_after: int | UnsetType = UNSET
    """Seconds after which the same request may succeed."""
    partition: Text = UNSET
    leader: Text = UNSET
    address: Text = UNSET
    version: int | UnsetType = UNSET
    """The key's, where a condition was not met; 0: it is absent."""
    ring_version: int | UnsetType = UNSET
    asked: int | UnsetType = UNSET
    oldest: int | UnsetType = UNSET
    """Of a watch that cannot go on: where it wanted to, and where the log begins."""
    namespace: Text = UNSET
    quota: Text = UNSET
    used: int | UnsetType = UNSET
    limit: int | UnsetType = UNSET
    wanted: int | UnsetType = UNSET
    """Of a quota: of which namespace, of what (keys or bytes), how many are used and allowed, and how many more it
    takes."""
    ops_per_s: int | UnsetType = UNSET
    share: int | UnsetType = UNSET
    retry_after_ms: int | UnsetType = UNSET
    """Of a rate: what the namespace has, what of it is this server's now, and from when on there is more."""


class Written(Struct, omit_defaults=True):
    """The outcome of a put."""

    version: int
    applied: bool | UnsetType = UNSET
    """With `return_old`: whether the condition was met."""
    old: Item | UnsetType = UNSET


class Deleted(Struct, omit_defaults=True):
    """The outcome of a delete."""

    sequence: int
    """0: the key was absent."""
    old: Item | UnsetType = UNSET


class Incremented(Struct):
    """The outcome of an increment."""

    value: int
    version: int


class Appended(Struct):
    """The outcome of an append."""

    length: int
    version: int


class Expiring(Struct):
    """The outcome of a changed expiry."""

    changed: bool
    """False: the key is absent."""


class Checked(Struct):
    """The outcome of a condition that was met."""

    version: int
    """0: the key is absent."""


class Found(Struct):
    """The outcome of a read."""

    item: Item | None
    """Null: the key is absent."""


class Failed(Struct):
    """An operation of an independent batch that was not applied."""

    failure: Failure


Outcome = Found | Written | Deleted | Incremented | Appended | Expiring | Checked | Failed


class BatchAnswer(Struct):
    """One outcome for each operation, in order."""

    results: list[Any]


class Page(Struct, omit_defaults=True):
    """Some keys in order."""

    items: list[Item]
    next: Text = UNSET
    """The `cursor` by which the scan goes on; without it there is no more."""


class DeletedRange(Struct, omit_defaults=True):
    """The outcome of a part of a range's deletion."""

    deleted: int
    """How many keys were there."""
    next: Text = UNSET
    """The `cursor` by which it goes on; without it the range is through."""


class Counted(Struct):
    """How many keys there are."""

    count: int


class Change(Struct, omit_defaults=True):
    """The data of an event `change`: one put or delete, as it was logged."""

    partition: str
    version: int
    """Of a delete: its sequence."""
    time_ms: int
    item: Item | None
    """Null: the key was deleted."""
    key: Text = UNSET
    key_base64: Base64 = UNSET
    expired: bool = False
    """Of a delete: by the store, because the key's time was over."""


class PartitionState(Struct):
    """A partition, as this server knows it."""

    id: str
    leader: str
    """Empty: none is known."""
    sequence: int
    time_ms: int
    """What a first Kvstore-Request says as `seen`."""


class ServerState(Struct):
    """A server that is up."""

    id: str
    http: str


class ClusterState(Struct):
    """The cluster, as this server knows it."""

    server: str
    ring_version: int
    partitions: list[PartitionState]
    servers: list[ServerState]


OUT: tuple[type[Struct], ...] = (
    *(Item, Failure, Written, Deleted, Incremented, Appended, Expiring, Checked, Found, Failed),
    *(BatchAnswer, Page, DeletedRange, Counted, Change, ClusterState),
)
IN: tuple[type[Struct], ...] = (ValueBody, BatchBody)


def fields_of(name: str, data: bytes, *, as_base64: bool) -> dict[str, Any]:
    """The one field of a pair that bytes stand in."""
    if not as_base64:
        try:
            return {name: data.decode()}
        except UnicodeDecodeError:
            pass
    return {f"{name}_base64": data}
