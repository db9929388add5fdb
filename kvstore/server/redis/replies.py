"""Encodes results as replies to a Redis client, in both versions of the protocol. Decides only.

If clients inspect the words of an error, the words are the words of Redis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvstore.errors import (
    AccessUnfounded,
    ConditionFailed,
    NotAuthenticated,
    NotEnoughBookies,
    OutcomeUnknown,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    RateExceeded,
    Retryable,
    StoreError,
    Unavailable,
)

OK = b"+OK\r\n"
QUEUED = b"+QUEUED\r\n"
NOAUTH = b"-NOAUTH Authentication required.\r\n"
ZERO, ONE = b":0\r\n", b":1\r\n"
NULL = {2: b"$-1\r\n", 3: b"_\r\n"}
NULL_ARRAY = {2: b"*-1\r\n", 3: b"_\r\n"}
PUSH = {2: b"*%d\r\n", 3: b">%d\r\n"}
"""The head of a message that answers no command, for its number of elements."""

Format = Callable[[Any], bytes]


class Fmt:
    """Indexes of the formats in `FORMATS`. A request's token carries one in its low bits."""

    OK = 0
    OK_OR_NULL = 1
    VALUE = 2
    OLD_VALUE = 3
    DELETED = 4
    APPLIED = 5
    EXISTS = 6
    CHANGED = 7
    NUMBER = 8
    LENGTH = 9
    TYPE = 10


def status(text: str) -> bytes:
    return b"+%b\r\n" % text.encode()


def number(value: int) -> bytes:
    return b":%d\r\n" % value


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def array(items: Iterable[bytes]) -> bytes:
    """Return an array of encoded replies."""
    parts = list(items)
    return b"*%d\r\n%b" % (len(parts), b"".join(parts))


def bulks(items: Iterable[bytes]) -> bytes:
    return array(map(bulk, items))


def mapping(items: Mapping[bytes, bytes], protocol: int) -> bytes:
    """Return a map in RESP3, a flat array in RESP2. Keys become bulk strings; values are encoded replies."""
    head = b"%%%d\r\n" % len(items) if protocol == 3 else b"*%d\r\n" % (2 * len(items))
    return head + b"".join(bulk(key) + value for key, value in items.items())


def error(text: str) -> bytes:
    """Return an error reply. `text` starts with the code that clients inspect, for example ERR."""
    flat = text.replace("\r", " ").replace("\n", " ")
    return b"-%b\r\n" % flat.encode("utf-8", "replace")[:512]


def failure(reason: StoreError) -> bytes:
    """Return the reply for an operation that failed."""
    match reason:
        case NotEnoughBookies():
            return b"-NOREPLICAS Not enough good replicas to write.\r\n"
        case OutcomeUnknown():
            return error(f"UNKNOWN the write may or may not have been done: {reason}")
        case QuotaExceeded():
            return error(f"QUOTA {reason}")
        case RateExceeded():  # Redis clients retry on TRYAGAIN
            return error(f"TRYAGAIN {reason}")
        case Overloaded():
            return error(f"TRYAGAIN overloaded: {reason}")
        case Unavailable():
            return error(f"CLUSTERDOWN {reason}")
        case Retryable():
            return error(f"TRYAGAIN {reason}")
        case AccessUnfounded():
            return error(f"NOAUTH {reason}")
        case NotAuthenticated():
            return NOAUTH
        case PermissionDenied():
            return error(f"NOPERM {reason}")
        case _:
            return error(f"ERR {reason}")


def _ok(result: Any) -> bytes:
    return failure(result) if isinstance(result, StoreError) else OK


def _or_failure(format_value: Format) -> Format:
    def formatted(result: Any) -> bytes:
        return failure(result) if isinstance(result, StoreError) else format_value(result)

    return formatted


def _applied(result: Any) -> bytes:
    if isinstance(result, ConditionFailed):
        return ZERO
    return failure(result) if isinstance(result, StoreError) else ONE


def _number(result: Any) -> bytes:
    return failure(result) if isinstance(result, StoreError) else number(result[0])


def _formats(null: bytes) -> tuple[Format, ...]:
    def ok_or_null(result: Any) -> bytes:
        return null if isinstance(result, ConditionFailed) else _ok(result)

    def value(result: Any) -> bytes:
        if result is None:
            return null
        if isinstance(result, StoreError):
            return failure(result)
        data = result[0]
        return b"$%d\r\n%b\r\n" % (len(data), data)

    def old_value(result: Any) -> bytes:
        if isinstance(result, StoreError):
            return failure(result)
        return value(result[-1])

    return (
        _ok,
        ok_or_null,
        value,
        old_value,
        _or_failure(lambda result: ONE if result else ZERO),
        _applied,
        _or_failure(lambda result: ZERO if result is None else ONE),
        _or_failure(lambda result: ONE if result else ZERO),
        _number,
        _or_failure(lambda result: number(result[0] if result else 0)),
        _or_failure(lambda result: b"+none\r\n" if result is None else b"+string\r\n"),
    )


FORMATS = {protocol: _formats(null) for protocol, null in NULL.items()}
