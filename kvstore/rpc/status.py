"""Maps errors to gRPC statuses and back, in one table. Pure except for the last two functions.

A status carries a `google.rpc.Status` with one ErrorInfo: domain `kvstore`, reason (the class name in capitals),
metadata (its fields). Frames carry the same reason, message and metadata, so an error is the same on every path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, Protocol

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from kvstore import errors
from kvstore.rpc.targets import NO_ADDRESS

DOMAIN = "kvstore"
DETAILS_KEY = "grpc-status-details-bin"
MESSAGE_CHARACTERS_MAX = 1024
"""Maximum length of a message, because common peers limit trailing metadata to 8 KiB."""

Code = grpc.StatusCode

STATUS: dict[type[errors.StoreError], grpc.StatusCode] = {
    errors.StoreError: Code.UNKNOWN,
    errors.Refused: Code.FAILED_PRECONDITION,
    errors.Retryable: Code.UNAVAILABLE,
    errors.NotLeader: Code.FAILED_PRECONDITION,
    errors.Moved: Code.FAILED_PRECONDITION,
    errors.Overloaded: Code.RESOURCE_EXHAUSTED,
    errors.RateExceeded: Code.RESOURCE_EXHAUSTED,
    errors.Conflict: Code.ABORTED,
    errors.NotEnoughBookies: Code.UNAVAILABLE,
    errors.Unavailable: Code.UNAVAILABLE,
    errors.OtherCluster: Code.UNAVAILABLE,
    errors.PeerRefused: Code.UNAVAILABLE,
    errors.NotCaughtUp: Code.UNAVAILABLE,
    errors.NoSuchPin: Code.NOT_FOUND,
    errors.InvalidRequest: Code.INVALID_ARGUMENT,
    errors.NotThere: Code.INVALID_ARGUMENT,
    errors.ConditionFailed: Code.ABORTED,
    errors.QuotaExceeded: Code.RESOURCE_EXHAUSTED,
    errors.NotAuthenticated: Code.UNAUTHENTICATED,
    errors.AccessUnfounded: Code.UNAUTHENTICATED,
    errors.PermissionDenied: Code.PERMISSION_DENIED,
    errors.NotYetRaised: Code.FAILED_PRECONDITION,
    errors.RequestExpired: Code.FAILED_PRECONDITION,
    errors.PositionTrimmed: Code.OUT_OF_RANGE,
    # Neither DEADLINE_EXCEEDED nor UNAVAILABLE, because proxies retry those automatically.
    errors.OutcomeUnknown: Code.UNKNOWN,
    errors.MetadataError: Code.INTERNAL,
    errors.NoSuchNode: Code.NOT_FOUND,
    errors.NodeExists: Code.ALREADY_EXISTS,
    errors.NotEmpty: Code.FAILED_PRECONDITION,
    errors.VersionConflict: Code.ABORTED,
    errors.MetadataUnavailable: Code.UNAVAILABLE,
    errors.OlderMetadata: Code.FAILED_PRECONDITION,
    errors.MetadataUnknown: Code.UNKNOWN,
    errors.MetadataDenied: Code.FAILED_PRECONDITION,
    errors.MetadataLost: Code.FAILED_PRECONDITION,
    errors.LedgerError: Code.INTERNAL,
    errors.NoSuchLedger: Code.NOT_FOUND,
    errors.LedgerDeleted: Code.DATA_LOSS,
    errors.NoSuchEntry: Code.NOT_FOUND,
    errors.LedgerFenced: Code.FAILED_PRECONDITION,
    errors.LedgerClosed: Code.FAILED_PRECONDITION,
    errors.NotRecoverable: Code.UNAVAILABLE,
    errors.BookieError: Code.UNAVAILABLE,
    errors.Corrupted: Code.DATA_LOSS,
    errors.WrittenByNewer: Code.FAILED_PRECONDITION,
    errors.UndecodableNode: Code.DATA_LOSS,
    errors.ConfigError: Code.FAILED_PRECONDITION,
    errors.ClusterTooNew: Code.FAILED_PRECONDITION,
}

HTTP_OF_CODE: dict[grpc.StatusCode, int] = {
    Code.INVALID_ARGUMENT: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.FAILED_PRECONDITION: 409,
    Code.ALREADY_EXISTS: 409,
    Code.OUT_OF_RANGE: 410,
    Code.ABORTED: 412,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.INTERNAL: 500,
    Code.DATA_LOSS: 500,
    Code.UNAVAILABLE: 503,
    Code.UNKNOWN: 504,
}
"""HTTP status for each gRPC status."""

FIELDS: dict[type[errors.StoreError], tuple[tuple[str, Callable[[str], Any]], ...]] = {
    errors.NotLeader: (("partition", str), ("leader", str), ("address", str)),
    errors.Moved: (("partition", str), ("ring_version", int)),
    errors.ConditionFailed: (("version", int), ("quoted_key", str)),
    errors.PositionTrimmed: (("partition", str), ("asked", int), ("oldest", int)),
    errors.QuotaExceeded: (("namespace", str), ("quota", str), ("used", int), ("limit", int), ("wanted", int)),
    errors.RateExceeded: (("namespace", str), ("ops_per_s", int), ("share", int), ("retry_after_ms", int)),
}
"""Errors that are constructed from fields. Every other error is constructed from its message."""
OPTIONAL = frozenset(("quoted_key",))
"""Fields of text that are not sent if they are empty, or longer than a message may be."""


class Description(NamedTuple):
    """An error as sent over the wire."""

    reason: str
    message: str
    metadata: Mapping[str, str]


def reason_of(kind: type[errors.StoreError]) -> str:
    """Return the reason that represents an error class on the wire, for example `NOT_LEADER` for `NotLeader`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).upper()


_BY_REASON = {reason_of(kind): kind for kind in STATUS}


def listed(kind: type[errors.StoreError]) -> type[errors.StoreError]:
    """Return the class that represents an error on the wire: the class itself, or the nearest base class in the
    table."""
    return next(base for base in kind.__mro__ if base in STATUS)


def http_status(error: errors.StoreError) -> int:
    """Return the HTTP status of an error. It follows from the gRPC status, with three exceptions. A Retryable error is
    always 429 or 503, because HTTP clients retry only these statuses. Conflict is 409, because the caller must run the
    whole transaction again, reads included. QuotaExceeded is 507, because a retry does not help."""
    kind = listed(type(error))
    if kind is errors.QuotaExceeded:
        return 507
    if kind is errors.Conflict:
        return 409
    status = HTTP_OF_CODE[STATUS[kind]]
    return 503 if status != 429 and issubclass(kind, errors.Retryable) else status


def describe(error: errors.StoreError) -> Description:
    """Return the wire form of an error: its reason, message and metadata."""
    kind = listed(type(error))
    fields = {name: str(getattr(error, name)) for name, _ in FIELDS.get(kind, ())}
    fields = {
        name: value
        for name, value in fields.items()
        if name not in OPTIONAL or 0 < len(value) <= MESSAGE_CHARACTERS_MAX
    }
    return Description(reason_of(kind), str(error)[:MESSAGE_CHARACTERS_MAX], fields)


def restore(reason: str, message: str, metadata: Mapping[str, str]) -> errors.StoreError:
    """Return the error that a description represents. If this release does not know the reason, the result is
    OutcomeUnknown, because an unknown reason does not tell whether the operation was done."""
    kind = _BY_REASON.get(reason)
    if kind is None:
        return errors.OutcomeUnknown(f"{reason}: {message}")
    if kind not in FIELDS:
        return kind(message)
    try:
        present = [(name, parse) for name, parse in FIELDS[kind] if name in metadata or name not in OPTIONAL]
        return kind(*(parse(metadata[name]) for name, parse in present))
    except (KeyError, ValueError):
        return errors.OutcomeUnknown(f"malformed {reason}: {message}")


def details_of(error: errors.StoreError) -> tuple[grpc.StatusCode, str, bytes]:
    """Return the parts of a gRPC status for an error: the code, the message and a serialized google.rpc.Status."""
    code = STATUS[listed(type(error))]
    reason, message, metadata = describe(error)
    status = status_pb2.Status(code=code.value[0], message=message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata))
    return code, message, status.SerializeToString()


class RpcFailure(Protocol):
    """The interface that grpc.RpcError has in both of gRPC's APIs."""

    def code(self) -> Any: ...
    def details(self) -> Any: ...
    def trailing_metadata(self) -> Any: ...


_NOT_SENT = ("failed to connect to all addresses", "Concurrent RPC limit exceeded", NO_ADDRESS)
"""Beginnings of the error texts of calls that never reached a handler: gRPC's texts and kvstore's."""


_NO_CONNECTION = re.compile(
    r"failed to connect to all addresses; last error: \w+: "
    r"(?:ipv[46]:)?(\S+): (?:Failed to connect to remote host: )?(.+)",
    re.DOTALL,
)


_GRPC_PORT = "; name the gRPC port, 7401 by default"
_AUTHORITY = "; name the file of the authority that signed the server's certificate (ca=FILE, or KVSTORE_TLS_CA)"
_HINTS = {
    "Failed parsing HTTP/2": _GRPC_PORT,
    "missing selected ALPN property": _GRPC_PORT,
    "WRONG_VERSION_NUMBER": "; the port does not use TLS",
    "Socket closed": "; if the port requires TLS, use kvs:// with ca=FILE, cert=FILE and key=FILE, or set "
    "KVSTORE_TLS_CA, KVSTORE_TLS_CERT and KVSTORE_TLS_KEY",
    "unable to get local issuer certificate": _AUTHORITY,
    "self signed certificate": _AUTHORITY,
    "Failed to create security handshaker": "; check that the files of ca, cert and key are in PEM format",
}
"""The next step for a caller, by a part of gRPC's reason."""


def connection_fault(text: str) -> str:
    """Rewrite gRPC's text about a failed connection as `no connection to HOST:PORT: reason`, with a hint if there is
    one. Any other text is returned unchanged."""
    found = _NO_CONNECTION.fullmatch(text)
    if found is None:
        return text
    hint = "".join(hint for part, hint in _HINTS.items() if part in found[2])
    return f"no connection to {found[1]}: {found[2].removesuffix('.')}{hint}"


def from_rpc_error(failure: RpcFailure) -> errors.StoreError:
    """Return the StoreError of a failed call. If the server raised a StoreError, the result is that error. If gRPC
    itself failed, the result follows from gRPC's status code, and is usually OutcomeUnknown."""
    for key, value in failure.trailing_metadata() or ():
        if key == DETAILS_KEY:
            return _from_details(value) or _from_code(failure)
    return _from_code(failure)


def is_answered(failure: RpcFailure) -> bool:
    """Return True if a kvstore server raised the error, False if gRPC itself failed."""
    return any(key == DETAILS_KEY for key, _ in failure.trailing_metadata() or ())


def _from_details(serialized: bytes) -> errors.StoreError | None:
    status = status_pb2.Status.FromString(serialized)
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
            return restore(info.reason, status.message, info.metadata)
    return None


def _from_code(failure: RpcFailure) -> errors.StoreError:
    code, text = failure.code(), failure.details() or ""
    if code is Code.UNAVAILABLE and text.startswith(_NOT_SENT):
        return errors.Unavailable(connection_fault(text))
    if code is Code.RESOURCE_EXHAUSTED and text.startswith(_NOT_SENT):
        return errors.Overloaded(text)
    if code is Code.UNAUTHENTICATED:
        return errors.NotAuthenticated(text)
    if code is Code.PERMISSION_DENIED:
        return errors.PermissionDenied(text)
    if code is Code.UNIMPLEMENTED:
        return errors.InvalidRequest(f"{code.name}: {text}")
    return errors.OutcomeUnknown(f"{code.name if code else 'no status'}: {text}")


class Abortable(Protocol):
    """The part of a grpc.aio servicer context that ends a call with an error."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn: ...


async def abort(context: Abortable, error: errors.StoreError) -> NoReturn:
    """End the call with the gRPC status of `error`. Does not return."""
    code, message, details = details_of(error)
    await context.abort(code, message, ((DETAILS_KEY, details),))
