"""The gateway's routes: one table, by which requests are read and the OpenAPI document is made. Decides only."""

from __future__ import annotations

from dataclasses import dataclass
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
    """The value itself; or, as application/json, a ValueBody."""
    BATCH = auto()


class ResponseKind(Enum):
    """How an answer is told beside JSON."""

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

    @property
    def key(self) -> str:
        """Its name in what is read of a request."""
        return self.name.lower().replace("-", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method of one path."""

    method: str
    template: str
    name: str
    """As metrics and the document have it."""
    summary: str
    parameters: tuple[Parameter, ...] = ()
    body: Body = Body.NONE
    answer: ResponseKind = ResponseKind.JSON
    gives: type[Struct] | None = None
    is_write: bool = False
    also: tuple[int, ...] = ()
    """Statuses that it may have, beside 200 and those of all."""


def _number(name: str, text: str, least: int = 0, most: int = NUMBER_MAX, default: int | None = None) -> Parameter:
    return Parameter(name=name, kind=ParameterKind.INTEGER, text=text, least=least, most=most, default=default)


def _flag(name: str, text: str) -> Parameter:
    return Parameter(name=name, kind=ParameterKind.FLAG, text=text, default=False)


def _bytes(name: str, text: str) -> Parameter:
    return Parameter(name=name, kind=ParameterKind.BYTES, text=text)


def _header(name: str, text: str, kind: ParameterKind = ParameterKind.TEXT) -> Parameter:
    return Parameter(name=name, kind=kind, text=text, is_header=True, least=1)


TIMEOUT = _number("timeout_ms", "How long the answer may take.", 1, TIMEOUT_MAX_MS, TIMEOUT_DEFAULT_MS)
LEVEL = Parameter(
    name="level", kind=ParameterKind.CHOICE, text="How fresh the read must be.", choices=LEVELS, default="linearizable"
)
ENCODING = Parameter(
    name="encoding",
    kind=ParameterKind.CHOICE,
    text="How bytes stand in JSON: as text where they are UTF-8, or always in base64.",
    choices=("auto", "base64"),
    default="auto",
)
TTL = _number("ttl_ms", "How long the key lives, in milliseconds from now on.", 1)
EXPIRES = _number("expires_ms", "When the key expires, in milliseconds since 1970; 0: never.")
TTL_HEADER = _header("Kvstore-TTL-Ms", "The same as `ttl_ms`.", ParameterKind.INTEGER)
KEEP_TTL = _flag("keep_ttl", "The key expires when it would have.")
RETURN_OLD = _flag("return_old", "The answer has the former record; an unmet condition of a put is no error then.")
IF_MATCH = _header(
    "If-Match", 'Only if the key has this version, for example `"17"`, or one of several; `*`: if it is there.'
)
IF_NONE_MATCH = _header(
    "If-None-Match", "Of a put `*`: only if the key is absent. Of a read: unless it has one of these."
)
TOKEN = _header("Kvstore-Token", "The last Kvstore-Token that an answer had: what this client has seen.")
REQUEST = _header(
    "Kvstore-Request",
    "By which a retry is recognised: `client=32 hexadecimal digits; sequence=from 1 on; seen=ms; first=lowest that may "
    "still be retried, by default its own`.",
)
KEYS_ONLY = _flag("keys_only", "The values are left out.")
PREFIX_OF = _bytes("prefix", "Keys that begin so; not together with bounds.")
CURSOR = Parameter(name="cursor", kind=ParameterKind.TEXT, text="`next` of the answer before, for the same range.")
START, END = _bytes("start", "The first key."), _bytes("end", "The first key that is not meant any more; empty: none.")
_READ = (LEVEL, TIMEOUT, ENCODING, TOKEN)
_WRITE = (TIMEOUT, TOKEN, REQUEST)
_TTL = (TTL, EXPIRES, TTL_HEADER)

ROUTES: tuple[Route, ...] = (
    Route(
        method="GET",
        template="/v1/keys/{key}",
        name="get",
        summary="The value of a key: its bytes, or JSON with `Accept: application/json`.",
        parameters=(*_READ, IF_MATCH, IF_NONE_MATCH),
        answer=ResponseKind.RAW_OR_JSON,
        gives=bodies.Item,
        also=(304, 404, 412),
    ),
    Route(
        method="HEAD",
        template="/v1/keys/{key}",
        name="meta",
        summary="The headers of a get, without reading the value.",
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
        summary="Delete a key. An absent one is no error.",
        parameters=(*_WRITE, ENCODING, RETURN_OLD, IF_MATCH),
        gives=bodies.Deleted,
        is_write=True,
        also=(412,),
    ),
    Route(
        method="GET",
        template="/v1/keys",
        name="scan",
        summary="Keys in order over all partitions, a page at a time. Not one point in time.",
        parameters=(
            *(*_READ, PREFIX_OF, START, END, KEYS_ONLY),
            CURSOR,
            _number("limit", "The most keys of a page; fewer come if they are large.", 1, PAGE_KEYS_MAX, PAGE_KEYS),
        ),
        gives=bodies.Page,
    ),
    Route(
        method="DELETE",
        template="/v1/keys",
        name="delete_range",
        summary="Delete a range's keys, each by itself: again with `next` as `cursor`, until there is none.",
        parameters=(
            *(TIMEOUT, PREFIX_OF, START, END, CURSOR),
            _number("limit", "The most keys that one request deletes.", 1, DELETED_MAX, DELETED),
        ),
        gives=bodies.DeletedRange,
        is_write=True,
    ),
    Route(
        method="GET",
        template="/v1/count",
        name="count",
        summary="How many keys a range has; of everything without one. Not one point in time.",
        parameters=(LEVEL, TIMEOUT, TOKEN, PREFIX_OF, START, END),
        gives=bodies.Counted,
    ),
    Route(
        method="POST",
        template="/v1/increment/{key}",
        name="increment",
        summary="Add to the number that a key holds; an absent one holds 0.",
        parameters=(*_WRITE, _number("delta", "What is added.", -(1 << 63), (1 << 63) - 1, 1)),
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
        summary="Change when a key expires; `expires_ms=0`: never.",
        parameters=(*_WRITE, *_TTL),
        gives=bodies.Expiring,
        is_write=True,
    ),
    Route(
        method="POST",
        template="/v1/batch",
        name="batch",
        summary="Several operations on keys of one partition, all or nothing.",
        parameters=(*_WRITE, ENCODING),
        body=Body.BATCH,
        gives=bodies.BatchAnswer,
        is_write=True,
        also=(412,),
    ),
    Route(
        method="GET",
        template="/v1/watch",
        name="watch",
        summary="The changes of a key, a prefix, a range or everything, as server-sent events, as they happen.",
        parameters=(
            *(ENCODING, TOKEN, _bytes("key", "One key."), PREFIX_OF, START, END, KEYS_ONLY),
            _number("heartbeat_ms", "The longest silence.", HEARTBEAT_MIN_MS, HEARTBEAT_MAX_MS, HEARTBEAT_MS),
            Parameter(
                name="after", kind=ParameterKind.TEXT, text="The id of the event behind which the watch goes on."
            ),
            _header("Last-Event-ID", "The same, as EventSource sends it; it goes before `after`."),
        ),
        answer=ResponseKind.EVENTS,
        gives=bodies.Change,
        also=(410,),
    ),
    Route(
        method="GET",
        template="/v1/cluster",
        name="cluster",
        summary="The partitions, who leads them, their time; the servers.",
        gives=bodies.ClusterState,
    ),
    Route(
        method="GET",
        template="/v1/openapi.json",
        name="openapi",
        summary="This document.",
        answer=ResponseKind.DOCUMENT,
    ),
)

TEMPLATES: dict[str, dict[str, Route]] = {}
"""Method → route, by path."""
for _route in ROUTES:
    TEMPLATES.setdefault(_route.template, {})[_route.method] = _route
_WITH_KEY = {each.removesuffix(KEY): each for each in TEMPLATES if each.endswith(KEY)}


def template_of(path: str) -> tuple[str, str] | None:
    """(template, encoded key) of a path as it came; None: there is no such route. A key is all that comes behind its
    prefix, slashes too."""
    if path in TEMPLATES and KEY not in path:
        return path, ""
    first = path.find("/", len(PREFIX)) + 1
    template = _WITH_KEY.get(path[:first])
    return None if template is None else (template, path[first:])
