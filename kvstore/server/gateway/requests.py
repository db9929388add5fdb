"""Parses and checks HTTP requests, and converts them to operations of the partition. Decides only.

A parameter that the route does not list is refused. Otherwise a request with `ttl` instead of `ttl_ms` would create a
key that never expires. Keys are bytes: a path is used as received, percent-decoded once and never normalised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from kvstore.client.core.scanning import Bounds
from kvstore.errors import InvalidRequest, StoreError
from kvstore.limits import CLIENT_BYTES, KEY_BYTES_MAX
from kvstore.partition.state.commands import Batch, Code, Delete, Flag, Op, Put, RequestId, Transact
from kvstore.proto import kv_pb2
from kvstore.proto.page_token import PageToken
from kvstore.rpc.http.messages import Headers
from kvstore.server.gateway import bodies, routes
from kvstore.server.gateway.ranges import RangeDeletion
from kvstore.server.gateway.routes import Parameter, ParameterKind, Route
from kvstore.server.grpc.decode import (
    NUMBER_MAX,
    batch_op,
    check_batch_count,
    check_operation_sizes,
    op_or_error,
    transact_op,
)

SHOWN = 60
"""Maximum number of characters of the request shown in errors."""
MEANT = (
    "If-Match",
    "If-None-Match",
    "If-Unmodified-Since",
    "Content-Range",
    "X-HTTP-Method-Override",
    "X-Method-Override",
    "Kvstore-TTL-Ms",
    "Kvstore-Request",
)
"""Headers that change the effect of a write. A route that does not honour one refuses it: with `Content-Range`, for
example, the body is only a part of the value (RFC 9110, 14.4). The gateway itself reads Content-Encoding,
Transfer-Encoding and Expect."""
_MEANT = {each.lower(): each for each in MEANT}
TAGS_MAX = 100
"""Maximum number of entity tags in one If-Match or If-None-Match, because they are parsed in one turn of the event
loop."""
RING = ""
"""The name under which a session token contains the version of the ring."""
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_NAME = re.compile(r"[a-z0-9-]{0,63}")
_TAG = re.compile(r'(W/)?"([!#-~\x80-\U0010ffff]*)"')
_VERSION = re.compile(r"[1-9][0-9]{0,18}")
LISTS = ("If-Match", "If-None-Match")
"""Headers that may come in several lines, which form one list (RFC 9110, 5.3). For any other header, one of two
lines would be ignored."""
NEVER = NUMBER_MAX
"""A version that no key has. A condition on it always fails, and the error reports the key's actual version."""
"""Index of the version condition in an operation."""
_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
_FLAGS = {"true": True, "false": False}
_CLIENT_DIGITS = 2 * CLIENT_BYTES


class ParsedRequest(NamedTuple):
    """A request, parsed according to the table of its route."""

    route: Route
    key: bytes
    given: Mapping[str, Any]
    """The given parameters by their `key`. Parameters that the client did not send are missing."""

    def get(self, parameter: Parameter) -> Any:
        return self.given.get(parameter.key, parameter.default)


def unquoted(text: str) -> bytes:
    """Return the bytes of percent-encoded text. Raises InvalidRequest."""
    data = text.encode("utf-8", "surrogateescape")
    if found := _BAD_ESCAPE.search(data):
        raise InvalidRequest(f"expected two hexadecimal digits after each %, got {_shown(data[found.start() :][:3])}")
    return _ESCAPE.sub(lambda escape: bytes((int(escape[1], 16),)), data)


def read(route: Route, encoded_key: str, query: str, headers: Headers) -> ParsedRequest:
    """Read the request line and headers. Raises InvalidRequest."""
    key = unquoted(encoded_key)
    if routes.KEY in route.template:
        check_operation_sizes(Code.GET, key, b"")
    given: dict[str, Any] = {}
    for pair in query.split("&") if query else ():
        name, _, value = pair.replace("+", " ").partition("=")
        parameter = route.in_query.get(_text(unquoted(name), "a parameter's name"))
        if parameter is None:
            raise InvalidRequest(
                f"expected a parameter of {route.name} ({', '.join(sorted(route.in_query)) or 'it has none'}), "
                f"got {_shown(unquoted(name))}"
            )
        if parameter.key in given:
            raise InvalidRequest(f"expected {parameter.name} once, got it again")
        given[parameter.key] = _value(parameter, unquoted(value))
    for name, lines in headers.lines.items():
        parameter = route.in_headers.get(name)
        if parameter is not None:
            if len(lines) > 1 and parameter.name not in LISTS:
                raise InvalidRequest(f"expected {parameter.name} once, got {len(lines)}")
            given[parameter.key] = _value(parameter, ", ".join(lines).encode("utf-8", "surrogateescape"))
        elif route.is_write and name in _MEANT:
            raise InvalidRequest(
                f"expected no {_MEANT[name]} header for {route.name}, got one; send the request without it"
            )
    return ParsedRequest(route, key, given)


def _value(parameter: Parameter, data: bytes) -> int | str | bool | bytes:
    match parameter.kind:
        case ParameterKind.BYTES:
            if len(data) > KEY_BYTES_MAX + 1:  # a scan that continues after a key starts at that key and a zero byte
                raise InvalidRequest(f"expected {parameter.name} of at most {KEY_BYTES_MAX} bytes, got {len(data)}")
            return data
        case ParameterKind.INTEGER:
            return _integer(_text(data, parameter.name), parameter.name, parameter.least, parameter.most)
        case ParameterKind.FLAG | ParameterKind.CHOICE:
            choices = parameter.choices or tuple(_FLAGS)
            text = _text(data, parameter.name)
            if text not in choices:
                raise InvalidRequest(f"expected {parameter.name} to be {' or '.join(choices)}, got {_shown(data)}")
            return text if parameter.choices else _FLAGS[text]
        case ParameterKind.TEXT:
            return _text(data, parameter.name)


def _integer(text: str, name: str, least: int, most: int) -> int:
    if not _INTEGER.fullmatch(text) or not least <= int(text) <= most:
        raise InvalidRequest(f"expected {name} to be a number from {least} to {most}, got {text[:SHOWN]!r}")
    return int(text)


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"expected {name} in UTF-8, got {_shown(data)}") from None


def _shown(data: bytes) -> str:
    return ascii(data[:SHOWN].decode("utf-8", "backslashreplace"))


# ── headers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def token_of(text: str, name: str) -> dict[str, int]:
    """Parse a session token or a position in the feeds, such as `p1=17,p2=9`. Raises InvalidRequest, which calls the
    text `name`."""
    found: dict[str, int] = {}
    for pair in text.split(",") if text.strip() else ():
        partition, equals, number = pair.strip().partition("=")
        if not equals or not _NAME.fullmatch(partition) or partition in found:
            raise InvalidRequest(f"expected {name} as the server issued it, got {text[:SHOWN]!r}")
        found[partition] = _integer(number, f"the numbers of {name}", 0, NUMBER_MAX)
    return found


def token_text(token: Mapping[str, int]) -> str:
    """Return the text form of a session token."""
    return ",".join(f"{partition}={number}" for partition, number in sorted(token.items()))


def request_of(asked: ParsedRequest) -> RequestId | None:
    """Return the request id, or None if the client sent none. A retry with the same request id is applied only once
    (docs/protocol.md P16). Raises InvalidRequest."""
    text = asked.given.get(routes.REQUEST.key)
    if text is None:
        return None
    parts: dict[str, str] = {}
    for pair in text.split(";"):
        name, _, value = pair.strip().partition("=")
        if name in parts or name not in ("client", "sequence", "first", "seen"):
            raise InvalidRequest(f"expected client, sequence, seen and first in Kvstore-Request, got {pair[:SHOWN]!r}")
        parts[name] = value
    client = parts.get("client", "").replace("-", "")
    if len(client) != _CLIENT_DIGITS or not re.fullmatch(r"[0-9A-Fa-f]*", client):
        raise InvalidRequest(
            f"expected a client of {_CLIENT_DIGITS} hexadecimal digits in Kvstore-Request, got {client[:SHOWN]!r}"
        )
    numbers = [
        _integer(parts.get(name, default), f"{name} of Kvstore-Request", least, NUMBER_MAX)
        for name, default, least in (("sequence", "", 1), ("first", parts.get("sequence", ""), 0), ("seen", "", 1))
    ]
    return RequestId(bytes.fromhex(client), *numbers)


def conditions_of(asked: ParsedRequest) -> tuple[int, int]:
    """Return the condition of a mutation as (flags, version). Raises InvalidRequest."""
    match_, none_match = (asked.given.get(each.key) for each in (routes.IF_MATCH, routes.IF_NONE_MATCH))
    if match_ is not None and none_match is not None:
        raise InvalidRequest("expected If-Match or If-None-Match, got both")
    if none_match is not None:
        if none_match.strip() != "*":
            raise InvalidRequest(f"expected If-None-Match of a write to be *, got {none_match[:SHOWN]!r}")
        return int(Flag.IF_ABSENT), 0
    if match_ is None:
        return 0, 0
    if match_.strip() == "*":
        return int(Flag.IF_PRESENT), 0
    return int(Flag.IF_VERSION), versions_of(asked)[0]


def versions_of(asked: ParsedRequest) -> list[int]:
    """Return the versions that If-Match accepts, the oldest first. The result is [NEVER] if none of the tags is a
    version, and empty if there is no such condition. Raises InvalidRequest."""
    match_ = asked.given.get(routes.IF_MATCH.key)
    if match_ is None or match_.strip() == "*":
        return []
    found = sorted(set(strong_versions_of(match_))) or [NEVER]
    if len(found) > 1 and asked.route.name == "put" and _old(asked):
        # With return_old, an unmet condition is a result, and a request id remembers results. So no second version
        # could be tried under this id.
        raise InvalidRequest(f"expected one version in If-Match with return_old, got {match_[:SHOWN]!r}")
    return found


def with_version(op: Put | Delete, version: int) -> Put | Delete:
    """Return the put or delete with the added condition that the key has this version."""
    conditional: Put | Delete = replace(op, version=version)
    return conditional


def is_next(versions: Sequence[int], op: Put | Delete, found: int) -> bool:
    """Return True if an operation that accepts one of `versions` must be tried again with the version `found`, which
    the key turned out to have. That is the case only for a later version than the one just tried. Versions of a key
    only increase, so each version is tried at most once."""
    return found in versions and found > op.version


def strong_versions_of(if_match: str) -> list[int]:
    """Return the versions that If-Match names. Its comparison is strong, so a weak tag matches no version. A tag
    that this server never issued has valid syntax and matches nothing (RFC 9110, 13.1.1). Raises InvalidRequest."""
    return [version for is_weak, version in _tags_of(if_match, "If-Match") if version and not is_weak]


def weak_versions_of(if_none_match: str) -> list[int]:
    """Return the versions that If-None-Match names. Its comparison is weak, so W/"17" equals "17" (RFC 9110,
    13.1.2). Raises InvalidRequest."""
    return [version for _, version in _tags_of(if_none_match, "If-None-Match") if version]


def _tags_of(text: str, name: str) -> list[tuple[bool, int]]:
    """Parse a list of entity tags and return (is_weak, version) for each. The version is 0 if the tag does not name
    a version."""
    found, at = list[tuple[bool, int]](), 0
    while at < len(text):
        if text[at] in ", \t":  # a list may have empty elements
            at += 1
            continue
        tag = _TAG.match(text, at)
        if tag is None or text[tag.end() : tag.end() + 1] not in ("", ",", " ", "\t"):
            break
        is_version = _VERSION.fullmatch(tag[2]) and int(tag[2]) <= NUMBER_MAX
        found.append((tag[1] is not None, int(tag[2]) if is_version else 0))
        if len(found) > TAGS_MAX:
            raise InvalidRequest(f"expected at most {TAGS_MAX} entity tags in {name}, got more")
        at = tag.end()
    if at < len(text) or not found:
        raise InvalidRequest(f'expected {name} to be * or entity tags as in `ETag` ("17"), got {text[:SHOWN]!r}')
    return found


# ── operations ────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_op(asked: ParsedRequest, code: Code, level: int, sequence: int) -> Op:
    """Return the GET or META operation of a request. Raises InvalidRequest."""
    return _op(code, asked.key, b"", kv_pb2.Options(), None, level, sequence)


def write_op(asked: ParsedRequest, value: bytes) -> Op:
    """Return the mutation of one key that a request asks for. Raises InvalidRequest."""
    request, options = request_of(asked), kv_pb2.Options()
    match asked.route.name:
        case "put":
            options.flags, options.version = conditions_of(asked)
            options.expires_ms, ttl_flags = _expiry(asked)
            options.flags |= ttl_flags | _old(asked)
            code = Code.PUT
        case "delete":
            options.flags, options.version = conditions_of(asked)
            options.flags |= _old(asked)
            code = Code.DELETE
        case "increment":
            options.delta = asked.given.get("delta", 1)
            code = Code.INCREMENT
        case "append":
            code = Code.APPEND
        case "expire":
            options.expires_ms, options.flags = _expiry(asked)
            if not options.flags and "expires_ms" not in asked.given:
                raise InvalidRequest("expected ttl_ms or expires_ms, got neither")
            code = Code.EXPIRE
        case name:
            raise AssertionError(f"{name} writes no key")
    return _op(code, asked.key, value, options, request, 0, 0)


def _old(asked: ParsedRequest) -> int:
    return int(Flag.RETURN_OLD) if asked.get(routes.RETURN_OLD) else 0


def _expiry(asked: ParsedRequest) -> tuple[int, int]:
    given = asked.given
    ttls = {given[each.key] for each in (routes.TTL, routes.TTL_HEADER) if each.key in given}
    if len(ttls) > 1:
        raise InvalidRequest(f"expected one time to live, got {sorted(ttls)} ms in ttl_ms and Kvstore-TTL-Ms")
    return _expiry_of(ttls.pop() if ttls else None, given.get("expires_ms"), keep=bool(asked.get(routes.KEEP_TTL)))


def _expiry_of(ttl_ms: int | None, expires_ms: int | None, *, keep: bool) -> tuple[int, int]:
    """Return (expires_ms, flags) for a relative or absolute expiry. `keep` keeps the key's current expiry."""
    if (ttl_ms is not None) + (expires_ms is not None) + keep > 1:
        raise InvalidRequest("expected one of ttl_ms, expires_ms and keep_ttl, got more")
    if ttl_ms is not None:
        return ttl_ms, int(Flag.RELATIVE_TTL)
    return expires_ms or 0, int(Flag.KEEP_TTL) if keep else 0


def _op(
    code: int, key: bytes, value: bytes, options: kv_pb2.Options, request: RequestId | None, level: int, token: int
) -> Op:
    found = op_or_error(code, key, value, options, request, level, token)
    if isinstance(found, StoreError):
        raise found
    return found


def batch_of(asked: ParsedRequest, body: bytes) -> Batch | Transact:
    """Return the atomic batch, or the transaction, that a request asks for. Raises InvalidRequest."""
    read_ = bodies.read(body, bodies.BatchBody)
    check_batch_count(len(read_.operations))
    flags = int(Flag.INDEPENDENT) if read_.independent else 0
    operations, request = [_operation(each) for each in read_.operations], request_of(asked)
    if asked.route.name == "transaction":
        return transact_op(operations, flags, request)
    return batch_op(operations, flags, request)


def _operation(body: bodies.OperationBody) -> kv_pb2.Operation:
    name = body.operation
    given = {each for each in body.__struct_fields__ if getattr(body, each) is not UNSET}
    if wrong := given - bodies.FIELDS[name]:
        fields, unknown = ", ".join(sorted(bodies.FIELDS[name])), ", ".join(sorted(wrong))
        raise InvalidRequest(f"expected only the fields of {name} in a batch ({fields}), got also {unknown}")
    part = kv_pb2.Operation(code=bodies.CODES[name], key=bodies.bytes_of(body.key, body.key_base64, "key"))
    if "value" in bodies.FIELDS[name]:
        part.value = bodies.bytes_of(body.value, body.value_base64, "value")
    options, is_conditional = part.options, (bool(body.if_version), body.if_absent is True, body.if_present is True)
    if isinstance(body.if_version, int):
        options.version = body.if_version
    conditions = (Flag.IF_VERSION, Flag.IF_ABSENT, Flag.IF_PRESENT)
    options.flags = sum(int(flag) for flag, is_asked in zip(conditions, is_conditional, strict=True) if is_asked)
    if name == "check" and not options.flags:
        raise InvalidRequest("expected one of if_version, if_absent and if_present for a check, got none")
    ttl_ms, expires_ms = (None if each is UNSET else each for each in (body.ttl_ms, body.expires_ms))
    if name == "expire" and ttl_ms is None and expires_ms is None:
        raise InvalidRequest("expected ttl_ms or expires_ms for an expire, got neither")
    options.expires_ms, flags = _expiry_of(ttl_ms, expires_ms, keep=body.keep_ttl is True)
    options.flags |= flags | (int(Flag.RETURN_OLD) if body.return_old is True else 0)
    if name == "increment":
        options.delta = _delta(body.delta)
    return part


def _delta(delta: Any) -> int:
    least, most = -(1 << 63), (1 << 63) - 1
    if delta is UNSET:
        return 1
    if not least <= delta <= most:
        raise InvalidRequest(f"expected delta to be a number from {least} to {most}, got {delta}")
    return int(delta)


# ── scans and watches ─────────────────────────────────────────────────────────────────────────────────────────────────


def scan_of(asked: ParsedRequest, token: Mapping[str, int]) -> kv_pb2.ScanRequest:
    """Return the request for one page of a scan. Raises InvalidRequest."""
    start, end = bounds_of(asked)
    if cursor := asked.given.get("cursor", ""):
        start, end, _ = _forwards(Bounds(start, end).rest(cursor))
    return kv_pb2.ScanRequest(
        start=start,
        end=end,
        limit=asked.given.get("limit", routes.PAGE_KEYS),
        level=routes.LEVELS.index(asked.get(routes.LEVEL)),  # type: ignore[arg-type]  # the enum's number
        token=token,
        keys_only=bool(asked.get(routes.KEYS_ONLY)),
    )


def bounds_of(asked: ParsedRequest) -> Bounds:
    """Return the range that a request names. Raises InvalidRequest."""
    start, end, prefix = (asked.given.get(each.key, b"") for each in (routes.START, routes.END, routes.PREFIX_OF))
    found = Bounds.of(start, end, prefix)
    for each in found:
        check_operation_sizes(Code.SCAN, each, b"")
    return found


def deletion_of(asked: ParsedRequest) -> RangeDeletion:
    """Return the range deletion that a request asks for. Raises InvalidRequest if the request is malformed or names
    no range. Without this check, a request without a range would delete every key."""
    bounds, cursor = bounds_of(asked), asked.given.get("cursor", "")
    if bounds == Bounds(b"", b""):
        raise InvalidRequest(
            "expected a prefix, a start or an end for the deletion, got none, which would delete every key"
        )
    if cursor:
        _forwards(bounds.rest(cursor))
    return RangeDeletion(bounds, cursor, asked.given.get("limit", routes.DELETED))


def _forwards(rest: PageToken) -> PageToken:
    """Check the page token of a scan. Raises InvalidRequest if it belongs to a backward scan, which only another
    endpoint offers."""
    if rest.reverse:
        raise InvalidRequest("expected a cursor of a forward scan, got one of a backward scan")
    return rest


def watch_of(asked: ParsedRequest) -> kv_pb2.WatchRequest:
    """Return the request of a watch. Raises InvalidRequest."""
    start, end = bounds_of(asked)
    key = asked.given.get("key")
    if key is not None:
        if start or end:
            raise InvalidRequest("expected a key, a prefix or bounds, got more than one of them")
        check_operation_sizes(Code.GET, key, b"")
        start, end = key, key + b"\0"
    last_id = asked.given.get("last_event_id")
    after = token_of(asked.given.get("after", ""), "after") if last_id is None else token_of(last_id, "Last-Event-ID")
    token = token_of(asked.given.get(routes.TOKEN.key, ""), routes.TOKEN.name)
    return kv_pb2.WatchRequest(
        start=start,
        end=end,
        after=after,
        seen={partition: number for partition, number in token.items() if partition != RING},
        heartbeat_ms=asked.given.get("heartbeat_ms", routes.HEARTBEAT_MS),
        keys_only=bool(asked.get(routes.KEYS_ONLY)),
    )
