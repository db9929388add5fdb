"""The JSON bodies of requests and responses: their fields, and how bytes appear in them. Decides only.

JSON has no bytes. So each byte string has two fields, of which one is present: `value` (text) and `value_base64`.
Responses use the text field if the bytes are UTF-8, unless base64 is requested. The OpenAPI document is generated from
these classes.
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

# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class ValueBody(Struct, forbid_unknown_fields=True):
    """A value, as text or in base64."""

    value: Text = UNSET
    value_base64: Base64 = UNSET


class OperationBody(Struct, forbid_unknown_fields=True):
    """One operation of a batch. Its kind determines which fields it may have."""

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
    """Operations on keys of one partition, or of any partitions in a transaction. They are applied all or none, unless
    they are independent."""

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
"""Allowed fields of an operation in a batch."""


def read(body: bytes, kind: type[T]) -> T:
    """Read a body. Raises InvalidRequest, which says where the body is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"expected a JSON body as in /v1/openapi.json: {error}") from None


def bytes_of(text: Text, base64: Base64, name: str) -> bytes:
    """Return the bytes of a pair of fields. Raises InvalidRequest unless exactly one of them is present."""
    if (text is UNSET) == (base64 is UNSET):
        found = "neither" if text is UNSET else "both"
        raise InvalidRequest(f"expected {name} or {name}_base64, got {found}")
    return base64 if isinstance(base64, bytes) else str(text).encode()


# ── responses ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Item(Struct, omit_defaults=True):
    """A key and its record. Without a value, the request did not ask for it, and `length` is its size in bytes if
    that is known."""

    version: int
    created: int
    written_ms: int
    expires_ms: int
    """Milliseconds since 1970; 0: never."""
    key: Text = UNSET
    key_base64: Base64 = UNSET
    value: Text = UNSET
    value_base64: Base64 = UNSET
    length: int | UnsetType = UNSET


class Failure(Struct, omit_defaults=True):
    """The reason of a failure, and the outcome of the request."""

    code: int
    """The HTTP status."""
    reason: str
    """The name of the error, as listed in docs/how-to/use-the-python-clients.md."""
    message: str
    outcome: Literal["refused", "unknown"]
    """Refused: definitely not done. Unknown: it may have been done, or may still be for a moment."""
    retry_after: int | UnsetType = UNSET
    """Seconds after which the same request may succeed."""
    partition: Text = UNSET
    leader: Text = UNSET
    address: Text = UNSET
    version: int | UnsetType = UNSET
    """The key's version if a condition was not met; 0: the key is absent."""
    key: Text = UNSET
    key_base64: Base64 = UNSET
    """The key whose condition was not met, in a transaction."""
    ring_version: int | UnsetType = UNSET
    asked: int | UnsetType = UNSET
    oldest: int | UnsetType = UNSET
    """If a watch cannot continue: the position that it asked for, and the beginning of the log."""
    namespace: Text = UNSET
    quota: Text = UNSET
    used: int | UnsetType = UNSET
    limit: int | UnsetType = UNSET
    wanted: int | UnsetType = UNSET
    """If a quota is exceeded: the namespace, the quota (keys or bytes), how much is used and allowed, and how much
    more the request needs."""
    ops_per_s: int | UnsetType = UNSET
    share: int | UnsetType = UNSET
    retry_after_ms: int | UnsetType = UNSET
    """If a rate is exceeded: the namespace's rate, this server's current share of it, and the time until the share
    is refilled."""


class Written(Struct, omit_defaults=True):
    """The outcome of a put."""

    version: int
    applied: bool | UnsetType = UNSET
    """With `return_old`: true if the condition was met."""
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
    """The outcome of a change of expiry."""

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
    """The outcome of an operation in an independent batch that was not applied."""

    failure: Failure


Outcome = Found | Written | Deleted | Incremented | Appended | Expiring | Checked | Failed


class BatchAnswer(Struct):
    """One outcome for each operation, in order."""

    results: list[Any]


class TransactionAnswer(Struct):
    """One outcome for each operation, in order, and the position of the transaction in each partition."""

    results: list[Any]
    positions: dict[str, int]
    """Sequences by partition. The Kvstore-Token of the response contains them."""


class Page(Struct, omit_defaults=True):
    """A page of keys in order."""

    items: list[Item]
    next: Text = UNSET
    """The `cursor` for the next page; absent after the last page."""


class DeletedRange(Struct, omit_defaults=True):
    """The outcome of one request that deletes part of a range."""

    deleted: int
    """Number of keys that were deleted."""
    next: Text = UNSET
    """The `cursor` for the next request; absent when the range is finished."""


class Counted(Struct):
    """The response to a count."""

    count: int


class Change(Struct, omit_defaults=True):
    """The data of a `change` event: one put or delete, as it was logged."""

    partition: str
    version: int
    """The version; for a delete, its sequence."""
    time_ms: int
    item: Item | None
    """Null: the key was deleted."""
    key: Text = UNSET
    key_base64: Base64 = UNSET
    expired: bool = False
    """True if the store deleted the key because it expired."""
    transaction: str = ""
    """The transaction over several partitions that made the change, equal in all partitions."""
    transaction_keys: int = 0
    """The number of different keys that this transaction writes in all partitions. Some writes may change nothing."""


class PartitionState(Struct):
    """A partition, as this server knows it."""

    id: str
    leader: str
    """Empty: no leader is known."""
    sequence: int
    time_ms: int
    """The partition's time, to use as `seen` in the first Kvstore-Request."""


class ServerState(Struct):
    """A server that is up, with the address of its HTTP port."""

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
    *(BatchAnswer, TransactionAnswer, Page, DeletedRange, Counted, Change, ClusterState),
)
IN: tuple[type[Struct], ...] = (ValueBody, BatchBody)


def fields_of(name: str, data: bytes, *, as_base64: bool) -> dict[str, Any]:
    """Return the one field of a pair that represents the bytes."""
    if not as_base64:
        try:
            return {name: data.decode()}
        except UnicodeDecodeError:
            pass
    return {f"{name}_base64": data}
