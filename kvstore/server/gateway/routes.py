"""The routes of the gateway: one table, by which requests are read and from which the OpenAPI document is generated.
Decides only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from msgspec import Struct

from kvstore.partition.state.commands import Level
from kvstore.rpc.channels import TIMEOUT_DEFAULT_MS, TIMEOUT_MAX_MS
from kvstore.server.gateway import bodies
from kvstore.server.grpc.decode import NUMBER_MAX

PREFIX = "/v1/"
KEY = "{key}"
PAGE_KEYS, PAGE_KEYS_MAX = 100, 1_000
DELETED, DELETED_MAX = 1_000, 10_000
HEARTBEAT_MS, HEARTBEAT_MIN_MS, HEARTBEAT_MAX_MS = 5_000, 50, 60_000
LEVELS = tuple(each.name.lower() for each in Level)


class ParameterKind(Enum):
    """The kind of a parameter."""

    INTEGER = auto()
    FLAG = auto()
    """true or false."""
    CHOICE = auto()
    BYTES = auto()
    """Any bytes, percent-encoded."""
    TEXT = auto()


class Body(Enum):
    """The kind of a request's body."""

    NONE = auto()
    VALUE = auto()
    """The value itself, or a ValueBody as application/json."""
    BATCH = auto()


class ResponseKind(Enum):
    """The form of a response."""

    JSON = auto()
    RAW_OR_JSON = auto()
    HEAD = auto()
    EVENTS = auto()
    DOCUMENT = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A query parameter or a header."""

    name: str
    kind: ParameterKind
    text: str
    is_header: bool = False
    least: int = 0
    most: int = NUMBER_MAX
    choices: tuple[str, ...] = ()
    default: int | str | bool | None = None

    key: str = field(init=False)
    """The name of the parameter in a parsed request."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.name.lower().replace("-", "_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method of one path."""

    method: str
    template: str
    name: str
    """The name in metrics and in the document."""
    summary: str
    parameters: tuple[Parameter, ...] = ()
    body: Body = Body.NONE
    answer: ResponseKind = ResponseKind.JSON
    gives: type[Struct] | None = None
    is_write: bool = False
    also: tuple[int, ...] = ()
    """Statuses of this route, in addition to 200 and those of all routes."""
    in_query: Mapping[str, Parameter] = field(init=False)
    """The query parameters, by name."""
    in_headers: Mapping[str, Parameter] = field(init=False)
    """The headers that are parameters, by name in lower case."""

    def __post_init__(self) -> None:
        headers = {each.name.lower(): each for each in self.parameters if each.is_header}
        object.__setattr__(self, "in_query", {each.name: each for each in self.parameters if not each.is_header})
        object.__setattr__(self, "in_headers", headers)


def _number(name: str, text: str, least: int = 0, most: int = NUMBER_MAX, default: int | None = None) -> Parameter:
    return Parameter(name=name, kind=ParameterKind.INTEGER, text=text, least=least, most=most, default=default)


def _flag(name: str, text: str) -> Parameter:
    return Parameter(name=name, kind=ParameterKind.FLAG, text=text, default=False)


def _bytes(name: str, text: str) -> Parameter:
    return Parameter(name=name, kind=ParameterKind.BYTES, text=text)


def _header(name: str, text: str, kind: ParameterKind = ParameterKind.TEXT) -> Parameter:
    return Parameter(name=name, kind=kind, text=text, is_header=True, least=1)


TIMEOUT = _number(
    "timeout_ms", "Maximum time until the response, in milliseconds.", 1, TIMEOUT_MAX_MS, TIMEOUT_DEFAULT_MS
)
LEVEL = Parameter(
    name="level",
    kind=ParameterKind.CHOICE,
    text="Consistency level of the read.",
    choices=LEVELS,
    default="linearizable",
)
ENCODING = Parameter(
    name="encoding",
    kind=ParameterKind.CHOICE,
    text="Encoding of bytes in JSON: as text if they are UTF-8, or always in base64.",
    choices=("auto", "base64"),
    default="auto",
)
TTL = _number("ttl_ms", "Time to live of the key in milliseconds, from now.", 1)
EXPIRES = _number("expires_ms", "Time of expiry in milliseconds since 1970; 0: never.")
TTL_HEADER = _header("Kvstore-TTL-Ms", "Same as `ttl_ms`.", ParameterKind.INTEGER)
KEEP_TTL = _flag("keep_ttl", "Keep the present expiry of the key.")
RETURN_OLD = _flag("return_old", "Return the previous record. An unmet condition of a put is then not an error.")
IF_MATCH = _header(
    "If-Match", 'Apply only if the key has this version, for example `"17"`, or one of several; `*`: if the key exists.'
)
IF_NONE_MATCH = _header(
    "If-None-Match",
    "For a put, `*`: apply only if the key is absent. For a read: return the key unless it has one of these versions.",
)
TOKEN = _header("Kvstore-Token", "The last Kvstore-Token that the client received.")
REQUEST = _header(
    "Kvstore-Request",
    "Request id, which identifies a retry: `client=32 hexadecimal digits; sequence=from 1; seen=ms; first=lowest that "
    "may still be retried, by default its own`.",
)
KEYS_ONLY = _flag("keys_only", "Omit the values.")
PREFIX_OF = _bytes("prefix", "Prefix of the keys; not allowed with start or end.")
CURSOR = Parameter(name="cursor", kind=ParameterKind.TEXT, text="`next` of the previous response, for the same range.")
START, END = (
    _bytes("start", "The first key of the range."),
    _bytes("end", "The first key after the range; empty: no end."),
)
_READ = (LEVEL, TIMEOUT, ENCODING, TOKEN)
_WRITE = (TIMEOUT, TOKEN, REQUEST)
_TTL = (TTL, EXPIRES, TTL_HEADER)

ROUTES: tuple[Route, ...] = (
    Route(
        method="GET",
        template="/v1/keys/{key}",
        name="get",
        summary="Return the value of a key: its bytes, or JSON with `Accept: application/json`.",
        parameters=(*_READ, IF_MATCH, IF_NONE_MATCH),
        answer=ResponseKind.RAW_OR_JSON,
        gives=bodies.Item,
        also=(304, 404, 412),
    ),
    Route(
        method="HEAD",
        template="/v1/keys/{key}",
        name="meta",
        summary="Return the headers of a get without reading the value.",
        parameters=(LEVEL, TIMEOUT, TOKEN, IF_MATCH, IF_NONE_MATCH),
        answer=ResponseKind.HEAD,
        also=(304, 404, 412),
    ),
    Route(
        method="PUT",
        template="/v1/keys/{key}",
        name="put",
        summary="Store a value.",
        parameters=(*_WRITE, ENCODING, *_TTL, KEEP_TTL, RETURN_OLD, IF_MATCH, IF_NONE_MATCH),
        body=Body.VALUE,
        gives=bodies.Written,
        is_write=True,
        also=(412,),
    ),
    Route(
        method="DELETE",
        template="/v1/keys/{key}",
        name="delete",
        summary="Delete a key. An absent key is not an error.",
        parameters=(*_WRITE, ENCODING, RETURN_OLD, IF_MATCH),
        gives=bodies.Deleted,
        is_write=True,
        also=(412,),
    ),
    Route(
        method="GET",
        template="/v1/keys",
        name="scan",
        summary="Return keys in order over all partitions, one page at a time. Not a snapshot.",
        parameters=(
            *(*_READ, PREFIX_OF, START, END, KEYS_ONLY),
            CURSOR,
            _number(
                "limit",
                "Maximum number of keys in a page; large keys and values make it smaller.",
                1,
                PAGE_KEYS_MAX,
                PAGE_KEYS,
            ),
        ),
        gives=bodies.Page,
    ),
    Route(
        method="DELETE",
        template="/v1/keys",
        name="delete_range",
        summary="Delete the keys of a range one by one. Repeat with `next` as `cursor` until there is none.",
        parameters=(
            *(TIMEOUT, PREFIX_OF, START, END, CURSOR),
            _number("limit", "Maximum number of keys that one request deletes.", 1, DELETED_MAX, DELETED),
        ),
        gives=bodies.DeletedRange,
        is_write=True,
    ),
    Route(
        method="GET",
        template="/v1/count",
        name="count",
        summary="Return the number of keys in a range, or in the store. Not a snapshot.",
        parameters=(LEVEL, TIMEOUT, TOKEN, PREFIX_OF, START, END),
        gives=bodies.Counted,
    ),
    Route(
        method="POST",
        template="/v1/increment/{key}",
        name="increment",
        summary="Add to the number that a key holds. An absent key holds 0.",
        parameters=(*_WRITE, _number("delta", "The number to add.", -(1 << 63), (1 << 63) - 1, 1)),
        gives=bodies.Incremented,
        is_write=True,
    ),
    Route(
        method="POST",
        template="/v1/append/{key}",
        name="append",
        summary="Append to a value.",
        parameters=_WRITE,
        body=Body.VALUE,
        gives=bodies.Appended,
        is_write=True,
    ),
    Route(
        method="POST",
        template="/v1/expire/{key}",
        name="expire",
        summary="Change the expiry of a key; `expires_ms=0`: never.",
        parameters=(*_WRITE, *_TTL),
        gives=bodies.Expiring,
        is_write=True,
    ),
    Route(
        method="POST",
        template="/v1/batch",
        name="batch",
        summary="Apply several operations on keys of one partition, all or none.",
        parameters=(*_WRITE, ENCODING),
        body=Body.BATCH,
        gives=bodies.BatchAnswer,
        is_write=True,
        also=(412,),
    ),
    Route(
        method="POST",
        template="/v1/transaction",
        name="transaction",
        summary="Apply several operations on keys of any partitions, all or none. Strictly serialisable.",
        parameters=(*_WRITE, ENCODING),
        body=Body.BATCH,
        gives=bodies.TransactionAnswer,
        is_write=True,
        also=(412,),
    ),
    Route(
        method="GET",
        template="/v1/watch",
        name="watch",
        summary="Stream the changes of a key, a prefix, a range or the whole store as server-sent events.",
        parameters=(
            *(ENCODING, TOKEN, _bytes("key", "One key."), PREFIX_OF, START, END, KEYS_ONLY),
            _number(
                "heartbeat_ms",
                "Maximum time between two events, in milliseconds.",
                HEARTBEAT_MIN_MS,
                HEARTBEAT_MAX_MS,
                HEARTBEAT_MS,
            ),
            Parameter(
                name="after", kind=ParameterKind.TEXT, text="The id of the event after which the watch continues."
            ),
            _header("Last-Event-ID", "Same as `after`, as EventSource sends it. It takes precedence over `after`."),
        ),
        answer=ResponseKind.EVENTS,
        gives=bodies.Change,
        also=(410,),
    ),
    Route(
        method="GET",
        template="/v1/cluster",
        name="cluster",
        summary="Return the partitions with their leaders and times, and the servers.",
        gives=bodies.ClusterState,
    ),
    Route(
        method="GET",
        template="/v1/openapi.json",
        name="openapi",
        summary="Return this document.",
        answer=ResponseKind.DOCUMENT,
    ),
)

TEMPLATES: dict[str, dict[str, Route]] = {}
"""Method → route, by path."""
for _route in ROUTES:
    TEMPLATES.setdefault(_route.template, {})[_route.method] = _route
_WITH_KEY = {each.removesuffix(KEY): each for each in TEMPLATES if each.endswith(KEY)}


def template_of(path: str) -> tuple[str, str] | None:
    """Return (template, encoded key) of a path as received, or None if there is no such route. Everything after the
    prefix is the key, including slashes."""
    if path in TEMPLATES and KEY not in path:
        return path, ""
    first = path.find("/", len(PREFIX)) + 1
    template = _WITH_KEY.get(path[:first])
    return None if template is None else (template, path[first:])
