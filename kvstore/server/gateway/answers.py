"""Converts results and errors to HTTP statuses, headers and JSON. Decides only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import UNSET, Struct

from kvstore.errors import (
    InvalidRequest,
    NotAuthenticated,
    RateExceeded,
    Refused,
    RequestExpired,
    Retryable,
    StoreError,
)
from kvstore.partition.state.commands import (
    Append,
    Batch,
    Check,
    Delete,
    Expire,
    Flag,
    Get,
    Increment,
    Meta,
    Op,
    Put,
    Record,
    Transact,
)
from kvstore.proto import kv_pb2
from kvstore.rpc.http.messages import HttpResponse
from kvstore.rpc.status import describe, http_status
from kvstore.server.access.http_authenticator import CHALLENGE
from kvstore.server.gateway import bodies
from kvstore.server.gateway.bodies import Item, fields_of

RETRY_S = 1
"""Seconds after which a client should retry a temporary refusal."""
RAW, JSON = "application/octet-stream", "application/json"
COMMON = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    # A value is whatever a client stored: no browser may run it as a page of this server.
    "Content-Security-Policy": "default-src 'none'; sandbox",
}
_NUMBERS = frozenset(
    ("version", "ring_version", "asked", "oldest", "used", "limit", "wanted", "ops_per_s", "share", "retry_after_ms")
)


class WithStatus(InvalidRequest):
    """An invalid request for which HTTP has a more specific status than 400."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


def json_reply(body: Struct, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpResponse:
    """Return a response with a JSON body."""
    return HttpResponse(status, msgspec.json.encode(body), headers or {}, JSON)


def error_reply(error: StoreError, partition: str = "") -> HttpResponse:
    """Return the response for an error. All endpoints share the mapping from errors to statuses
    (kvstore/rpc/status.py)."""
    body = failure_of(error, partition)
    headers = {"Retry-After": str(body.retry_after)} if body.retry_after is not UNSET else {}
    if isinstance(error, WithStatus):
        headers |= {name.replace("_", "-"): value for name, value in error.headers.items()}
    if isinstance(error, NotAuthenticated):
        headers |= CHALLENGE
    return json_reply(body, body.code, headers)


def failure_of(error: StoreError, partition: str = "") -> bodies.Failure:
    """Return the JSON form of an error. `partition` is the partition of the key that the request names, or empty."""
    reason, message, metadata = describe(error)
    fields: dict[str, Any] = {"partition": partition} if partition else {}
    fields |= {name: int(value) if name in _NUMBERS else value for name, value in metadata.items() if value}
    if quoted := fields.pop("quoted_key", None):
        fields |= fields_of("key", unquote_to_bytes(quoted), as_base64=False)
    if isinstance(error, Retryable):
        fields["retry_after"] = ceil(error.retry_after_ms / 1000) if isinstance(error, RateExceeded) else RETRY_S
    code = error.status if isinstance(error, WithStatus) else http_status(error)
    # If a request expired, an earlier attempt may have been applied.
    is_refused = isinstance(error, Refused) and not isinstance(error, RequestExpired)
    outcome = "refused" if is_refused else "unknown"
    return bodies.Failure(code=code, reason=reason, message=message, outcome=outcome, **fields)  # type: ignore[arg-type]


def absent_reply(partition: str) -> HttpResponse:
    """Return the response to a read of a key that does not exist."""
    body = bodies.Failure(
        code=404, reason="ABSENT", message="the key is absent", outcome="refused", partition=partition
    )
    return json_reply(body, 404)


def wants_json(accept: str | None) -> bool:
    """Return True if the Accept header prefers JSON to the raw bytes of the value. Without the header, the response
    is raw bytes."""
    for part in (accept or "").lower().split(","):
        kind = part.partition(";")[0].strip()
        if kind in (JSON, RAW):
            return kind == JSON
    return False


# ── records ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def record_headers(record: Record | tuple[Any, ...]) -> dict[str, str]:
    """Return the headers that describe a record. `record` may also be the result of a META operation."""
    _, version, created, written_ms, expires_ms = record
    told_ = {"ETag": tag_of(version), "Kvstore-Created": str(created), "Kvstore-Written-Ms": str(written_ms)}
    return told_ | {"Kvstore-Expires-Ms": str(expires_ms)} if expires_ms else told_


def tag_of(version: int) -> str:
    """Return a version in the form of an HTTP entity tag."""
    return f'"{version}"'


def item_of(record: Record | tuple[Any, ...], key: bytes | None, *, as_base64: bool, keys_only: bool = False) -> Item:
    """Return the JSON form of a record. The record must contain its value unless `keys_only` is True."""
    value, version, created, written_ms, expires_ms = record
    fields = {} if key is None else fields_of("key", key, as_base64=as_base64)
    if not keys_only:
        fields |= fields_of("value", value, as_base64=as_base64)
    return Item(version=version, created=created, written_ms=written_ms, expires_ms=expires_ms, **fields)


def _old(record: Record | None, *, as_base64: bool) -> dict[str, Any]:
    return {} if record is None else {"old": item_of(record, None, as_base64=as_base64)}


def outcome_of(op: Op, result: Any, *, as_base64: bool) -> bodies.Outcome:
    """Return the JSON form of the outcome of one operation of a batch."""
    if isinstance(result, StoreError):
        return bodies.Failed(failure_of(result))
    match op:
        case Get():
            return bodies.Found(None if result is None else item_of(result, op.key, as_base64=as_base64))
        case Meta():
            return bodies.Found(None if result is None else _meta(op.key, result, as_base64=as_base64))
        case Put() if op.flags & Flag.RETURN_OLD:
            applied, version, old = result
            return bodies.Written(version, applied=applied, **_old(old, as_base64=as_base64))
        case Delete() if op.flags & Flag.RETURN_OLD:
            sequence, old = result
            return bodies.Deleted(sequence, **_old(old, as_base64=as_base64))
        case Put():
            return bodies.Written(result)
        case Delete():
            return bodies.Deleted(result)
        case Check():
            return bodies.Checked(result)
        case Increment():
            return bodies.Incremented(*result)
        case Append():
            return bodies.Appended(*result)
        case Expire():
            return bodies.Expiring(bool(result))
    raise AssertionError(f"no body for the result of {op.code}")


def _meta(key: bytes, result: tuple[Any, ...], *, as_base64: bool) -> Item:
    item = item_of(result, key, as_base64=as_base64, keys_only=True)
    item.length = result[0]
    return item


def batch_reply(op: Batch | Transact, result: Any, *, as_base64: bool) -> HttpResponse:
    """Return the response to a batch or a transaction."""
    results, positions = result if isinstance(op, Transact) else (result, ())
    outcomes = [outcome_of(each, found, as_base64=as_base64) for each, found in zip(op.ops, results, strict=True)]
    if isinstance(op, Transact):
        return json_reply(bodies.TransactionAnswer(outcomes, dict(positions)))
    return json_reply(bodies.BatchAnswer(outcomes))


def page_reply(
    found: Iterable[tuple[bytes, kv_pb2.Record]], next: str | None, *, as_base64: bool, keys_only: bool
) -> HttpResponse:
    """Return the response with one page of a scan. `next` is the token of the next page, or None after the last
    page."""
    items = [item_of(fields_of_message(record), key, as_base64=as_base64, keys_only=keys_only) for key, record in found]
    return json_reply(bodies.Page(items, UNSET if next is None else next))


def fields_of_message(record: kv_pb2.Record) -> tuple[bytes, int, int, int, int]:
    """Return (value, version, …), the fields of a record that was encoded as a protobuf message."""
    return record.value, record.version, record.created, record.written_ms, record.expires_ms


def change_of(partition: str, change: kv_pb2.Change, *, as_base64: bool, keys_only: bool) -> bodies.Change:
    """Return the JSON body of a `change` event."""
    item = None
    if change.HasField("record"):
        item = item_of(fields_of_message(change.record), None, as_base64=as_base64, keys_only=keys_only)
    return bodies.Change(
        partition=partition,
        version=change.sequence,
        time_ms=change.time_ms,
        item=item,
        expired=change.expired,
        transaction=change.transaction,
        transaction_keys=change.transaction_keys,
        **fields_of("key", change.key, as_base64=as_base64),
    )
