"""Parses and checks the options that users set with `.option(...)`. Every error names the option and the expected
value. Decides only."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from kvstore.client.core.config import ClientConfig, parse_url
from kvstore.env.tls import Tls
from kvstore.errors import ConfigError
from kvstore.places import fault_of
from kvstore.spark.value_schema import ValueSchema

T = TypeVar("T")

WHERE = ("servers", "zookeeper", "dataDir", "tlsCa", "tlsCert", "tlsKey", "timeout")
SCHEMA_NEEDS = {
    "json": ("valueSchema",),
    "msgpack": ("valueSchema",),
    "avro": ("valueSchemaFile",),
    "protobuf": ("valueSchemaFile", "valueMessage"),
}
"""The values of `valueType` that are formats of objects, with the options that each needs."""
OF_SCHEMA = ("valueSchema", "valueSchemaFile", "valueMessage")
TYPES = ("keyType", "valueType", *OF_SCHEMA, "valuePrefix")
RANGE = ("columns", "prefix", "start", "end", "keyEncoding", *TYPES)
READ = (*WHERE, *RANGE, "keys", "partition", "pin", "pinTtl", "splitBytes", "pageBytes")
STREAM_ONLY = ("startingPosition", "maxRowsPerTrigger", "maxBytesPerTrigger", "holdName", "holdTtl")
STREAM = (*WHERE, *RANGE, *STREAM_ONLY)
WRITE = (*WHERE, "keyColumn", "valueColumn", "expiresColumn", "onConflict", "onNull", "batchRows", "batchBytes")
KEYS_MAX = 10_000
"""Maximum number of keys in the option `keys`. Each key costs a separate lookup."""
SPARKS_OWN = {"checkpointlocation", "path", "querymaxresultcount"}
"""Options that Spark passes to every source and sink."""

CATALOGS_OWN, OF_TABLE = "provider", "option."
"""An option that Spark adds when it creates a table in its catalog, and the prefix under which Spark repeats the user's
OPTIONS."""
TABLES = (
    "Spark passes a table's options only while it creates the table without a list of columns; use CREATE TABLE name "
    'USING kvstore OPTIONS (...) or CREATE TEMPORARY VIEW to read, and format("kvstore") with options and save() to '
    "write"
)

UNITS = {"": 1, "b": 1, "kib": 1 << 10, "kb": 1 << 10, "mib": 1 << 20, "mb": 1 << 20, "gib": 1 << 30, "gb": 1 << 30}
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Cluster:
    """How to reach the store. Exactly one of `servers`, `zookeeper` and `data_dir` is set."""

    servers: tuple[str, ...]
    zookeeper: str
    data_dir: str
    tls: Tls | None
    timeout_s: float
    """Timeout of each operation in seconds, including retries. A job survives outages up to this length."""


class OnConflict(StrEnum):
    """How a write handles a row whose key already exists in the store."""

    overwrite = "overwrite"
    keep = "keep"


class OnNull(StrEnum):
    """How a write handles a row without a value."""

    error = "error"
    delete = "delete"


class KeyType(StrEnum):
    """Column types in which keys can be read."""

    binary = "binary"
    string = "string"


class ValueType(StrEnum):
    """Column types in which values can be read: raw bytes, UTF-8 text that is parsed as this type, or objects of a
    format (SCHEMA_NEEDS)."""

    binary = "binary"
    string = "string"
    long = "long"
    double = "double"
    json = "json"
    msgpack = "msgpack"
    avro = "avro"
    protobuf = "protobuf"


@dataclass(frozen=True, slots=True)
class Types:
    """The column types of keys and values, which are bytes in the store."""

    key: KeyType = KeyType.binary
    value: ValueType = ValueType.binary
    schema: ValueSchema | None = None
    """The fields of the values, if `value` is a format of objects."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The options of a batch or streaming write."""

    key_column: str
    value_column: str
    expires_column: str
    """The column with the expiry time. If empty, `expires_at` is used if the data frame has such a column."""
    on_conflict: OnConflict
    on_null: OnNull
    batch_rows: int
    batch_bytes: int


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The keys in [start, end). An empty `end` means no upper bound."""

    start: bytes = b""
    end: bytes = b""

    def __and__(self, other: KeyRange) -> KeyRange:
        ends = [end for end in (self.end, other.end) if end]
        return KeyRange(max(self.start, other.start), min(ends, default=b""))

    @property
    def is_empty(self) -> bool:
        return bool(self.end) and self.start >= self.end


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of a batch read."""

    columns: tuple[str, ...]
    keys: KeyRange
    exactly: frozenset[bytes] | None
    """Read only these keys of the range; None means all keys."""
    partition: str
    """Read only rows of this partition; empty means all partitions."""
    pin: str
    """The existing pin to read at, as returned by `splits.encode`. If empty, the reader makes a new pin."""
    pin_ttl_s: float
    split_bytes: int
    page_bytes: int
    types: Types


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options of a stream."""

    start: str | dict[str, Any]
    """Where a new query starts: `earliest`, `latest` or an offset."""
    rows_max: int
    """Maximum number of changes per micro-batch; 0 means no limit."""
    bytes_max: int
    columns: tuple[str, ...]
    keys: KeyRange
    hold: str
    """The name under which the query retains logs. If empty, a name is generated."""
    hold_s: float
    types: Types


def cluster_of(options: Mapping[str, str], environ: Mapping[str, str]) -> Cluster:
    """Parse the options that say how to reach the store. TLS files may also come from the environment variables in
    `environ`. Raises ConfigError unless exactly one of `servers`, `zookeeper` and `dataDir` is set."""
    named = [name for name in WHERE[:3] if options.get(name)]
    if len(named) > 1:
        raise ConfigError(f"expected one of the options servers, zookeeper and dataDir, got {' and '.join(named)}")
    if not named:
        raise ConfigError(
            "no cluster given; set the option servers (HOST:PORT,...), zookeeper (HOST:PORT,...[/CHROOT]) or dataDir "
            "(of `kvstore up`)"
        )
    if fault := fault_of(options.get("dataDir", "")):
        raise ConfigError(f"dataDir: {fault}")
    servers = options.get("servers", "").removeprefix("kv://")
    return Cluster(
        _endpoints(servers) if servers else (),
        options.get("zookeeper", ""),
        options.get("dataDir", ""),
        _tls(options, environ),
        _seconds(options, "timeout", 30.0),
    )


def client_config(cluster: Cluster, endpoints: tuple[str, ...], identity: str = "") -> ClientConfig:
    """Return the client configuration for tasks. `identity` is the id of the cluster to which the servers must
    belong; empty means any cluster."""
    return ClientConfig(endpoints=endpoints, timeout_s=cluster.timeout_s, tls=cluster.tls, cluster=identity)


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Parse the options of a write. Raises ConfigError."""
    _refuse_unknown(options, WRITE, "writing")
    on_conflict = _choice(options, "onConflict", OnConflict.overwrite)
    on_null = _choice(options, "onNull", OnNull.error)
    if (on_conflict, on_null) == (OnConflict.keep, OnNull.delete):
        raise ConfigError(
            "expected onConflict=keep or onNull=delete, got both; one keeps existing keys, the other deletes them"
        )
    return WriteOptions(
        options.get("keyColumn", "key"),
        options.get("valueColumn", "value"),
        options.get("expiresColumn", ""),
        on_conflict,
        on_null,
        _size(options, "batchRows", 2_000, 1, 50_000),
        _size(options, "batchBytes", 512 << 10, 1, 1 << 20),
    )


def read_options(options: Mapping[str, str], known: tuple[str, ...]) -> ReadOptions:
    """Parse the options of a batch read. `known` are the columns that a user may name. Raises ConfigError."""
    _refuse_unknown(options, READ, "reading")
    return ReadOptions(
        _columns(options, known, known),
        key_range(options),
        exact_keys(options),
        options.get("partition", ""),
        options.get("pin", ""),
        _seconds(options, "pinTtl", 600.0, least=10.0, most=86_400.0),
        _size(options, "splitBytes", 64 << 20, 1 << 16, 1 << 40),
        _size(options, "pageBytes", 1 << 20, 1 << 12, 2 << 20),
        types_of(options),
    )


def stream_options(options: Mapping[str, str], known: tuple[str, ...], default: tuple[str, ...]) -> StreamOptions:
    """Parse the options of a stream. `known` are the columns that a user may name; `default` are the columns that
    are read if the user names none. Raises ConfigError."""
    _refuse_unknown(options, STREAM, "reading a stream")
    start: str | dict[str, Any] = options.get("startingPosition", "latest")
    if start not in ("earliest", "latest"):
        try:
            start = json.loads(str(start))
        except ValueError:
            start = ""
        if not isinstance(start, dict):
            raise ConfigError(
                f"startingPosition: expected earliest, latest or an offset as JSON, got {options['startingPosition']!r}"
            )
    if options.get("maxRowsPerTrigger") and options.get("maxBytesPerTrigger"):
        raise ConfigError("expected maxRowsPerTrigger or maxBytesPerTrigger, got both")
    hold = options.get("holdName", "")
    if hold and not NAME.fullmatch(hold):
        raise ConfigError(f"holdName: expected 1 to 64 letters, digits, '-', '_' or '.', got {hold!r}")
    return StreamOptions(
        start,
        _size(options, "maxRowsPerTrigger", 0, 1, 1 << 40),
        _size(options, "maxBytesPerTrigger", 0, 1, 1 << 50),
        _columns(options, known, default),
        key_range(options),
        hold,
        _seconds(options, "holdTtl", 3600.0, least=10.0, most=7 * 86_400.0),
        types_of(options),
    )


def columns_of(options: Mapping[str, str], known: tuple[str, ...], default: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns to read. Works before it is known whether the options are for a batch read or a stream.
    Raises ConfigError."""
    _refuse_unknown(options, tuple(dict.fromkeys((*READ, *STREAM))), "reading")
    return _columns(options, known, default)


def types_of(options: Mapping[str, str]) -> Types:
    """Return the column types of keys and values, and read the file of the schema. Raises ConfigError."""
    key, value = _choice(options, "keyType", KeyType.binary), _choice(options, "valueType", ValueType.binary)
    needed = SCHEMA_NEEDS.get(value, ())
    given = tuple(name for name in OF_SCHEMA if options.get(name))
    if given != needed:
        raise ConfigError(
            f"valueType {value}: expected {' and '.join(needed) or 'no schema'}, got {' and '.join(given) or 'none'}"
        )
    if not needed:
        if options.get("valuePrefix"):
            raise ConfigError(
                f"valuePrefix: expected it together with valueType {', '.join(SCHEMA_NEEDS)}, got {value}"
            )
        return Types(key, value)
    if file := options.get("valueSchemaFile"):
        definition = _content("valueSchemaFile", file)
    else:
        definition = options["valueSchema"].encode()
    prefix = _hex("valuePrefix", options.get("valuePrefix", ""))
    schema = ValueSchema(value, definition, options.get("valueMessage", ""), prefix)
    assert schema.arrow is not None  # an unusable schema is an error now, not in the first task
    return Types(key, value, schema)


def table_options_or_none(options: Mapping[str, str], known: tuple[str, ...]) -> dict[str, str] | None:
    """Return the OPTIONS of a table that Spark is creating in its catalog, or None if the options are for a read or a
    write. `known` are the columns that a user may name. Raises ConfigError."""
    if CATALOGS_OWN not in {name.lower() for name in options}:
        return None
    names = {each.lower(): each for each in READ}
    own = {name[len(OF_TABLE) :]: value for name, value in options.items() if name.lower().startswith(OF_TABLE)}
    found = {names.get(name.lower(), name): value for name, value in own.items()}
    if "pin" in found:
        raise ConfigError("pin: expected no pin in a table's options, because a pin ends; each query pins the store")
    read_options(found, known)
    for name in ("dataDir", "valueSchemaFile"):
        if path := found.get(name):
            found[name] = str(Path(path).absolute())
    return found


def is_for_a_stream(options: Mapping[str, str]) -> bool:
    """Return True if the options contain one that only streams have."""
    return any(options.get(name) for name in STREAM_ONLY)


def key_range(options: Mapping[str, str]) -> KeyRange:
    """Return the keys that match all of the options `prefix`, `start` and `end`. Raises ConfigError."""
    found = {name: _key(options, name, options.get(name, "")) for name in ("prefix", "start", "end")}
    if found["end"] and found["start"] > found["end"]:
        raise ConfigError(f"start, end: expected start below end, got {options['start']!r} and {options['end']!r}")
    return KeyRange(found["start"], found["end"]) & prefix_range(found["prefix"])


def exact_keys(options: Mapping[str, str]) -> frozenset[bytes] | None:
    """Return the keys that the option `keys` lists, or None if the option is not set. Raises ConfigError."""
    text = options.get("keys")
    if text is None:
        return None
    try:
        listed = json.loads(text)
    except ValueError:
        listed = None
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise ConfigError(f'keys: expected a list as JSON, for example ["user/1", "user/2"], got {text[:100]!r}')
    if len(listed) > KEYS_MAX:
        raise ConfigError(
            f"keys: expected at most {KEYS_MAX}, got {len(listed)}; join with a data frame of the keys instead"
        )
    return frozenset(_key(options, "keys", each) for each in listed)


def prefix_range(prefix: bytes) -> KeyRange:
    """Return the range of all keys with a prefix."""
    stem = prefix.rstrip(b"\xff")
    return KeyRange(prefix, stem[:-1] + bytes([stem[-1] + 1]) if stem else b"")


# ── one option ──


def _refuse_unknown(options: Mapping[str, str], known: tuple[str, ...], doing: str) -> None:
    if any(name.lower() == "pushfilters" for name in options):
        raise ConfigError(
            "pushFilters does not exist, because Spark would apply the filters of one action to the next, which then "
            "misses rows; limit reads with prefix, start, end, keys and partition; Spark checks the conditions"
        )
    names = {name.lower() for name in known} | SPARKS_OWN
    unknown = sorted(name for name in options if name.lower() not in names)
    if unknown:
        spelled = {name.lower(): name for name in (*READ, *STREAM, *WRITE)}  # Spark hands them over in lower case
        name = spelled.get(unknown[0].lower(), unknown[0])
        raise ConfigError(f"unknown option {name!r} for {doing}; expected one of {', '.join(known)}")
    if options.get("path"):
        raise ConfigError(f"expected load() or save() without a path, got {options['path']!r}; a store has no paths")


def _key(options: Mapping[str, str], name: str, text: str) -> bytes:
    encoding = options.get("keyEncoding", "utf8").lower()
    if encoding not in ("utf8", "utf-8", "hex"):
        raise ConfigError(f"keyEncoding: expected utf8 or hex, got {options['keyEncoding']!r}")
    return _hex(name, text) if encoding == "hex" else text.encode()


def _hex(name: str, text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ConfigError(f"{name}: expected hexadecimal digits, got {text!r}") from None


def _content(name: str, path: str) -> bytes:
    if fault := fault_of(path):
        raise ConfigError(f"{name}: {fault}")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {error}") from None


def _columns(options: Mapping[str, str], known: tuple[str, ...], default: tuple[str, ...]) -> tuple[str, ...]:
    wanted = [name.strip() for name in options.get("columns", "").split(",") if name.strip()]
    if "columns" in options and not wanted:
        raise ConfigError(f"columns: expected one or more of {', '.join(known)}, got {options['columns']!r}")
    for name in wanted:
        if name not in known:
            raise ConfigError(f"columns: no column {name!r}; expected {', '.join(known)}")
    if len(set(wanted)) < len(wanted):
        raise ConfigError(f"columns: expected each column once, got {options['columns']!r}")
    return tuple(wanted) or default


def _endpoints(servers: str) -> tuple[str, ...]:
    try:
        return parse_url(f"kv://{servers}").endpoints
    except ValueError as error:
        raise ConfigError(f"servers: expected HOST:PORT,..., got {servers!r}: {error}") from None


def _tls(options: Mapping[str, str], environ: Mapping[str, str]) -> Tls | None:
    """Return the TLS files from the options, or from KVSTORE_TLS_CA, KVSTORE_TLS_CERT and KVSTORE_TLS_KEY if the
    options name none."""
    ca, cert, key = (
        options.get(f"tls{name}") or environ.get(f"KVSTORE_TLS_{name.upper()}") for name in ("Ca", "Cert", "Key")
    )
    if not (ca or cert or key):
        return None
    for name, file in (("tlsCa", ca), ("tlsCert", cert), ("tlsKey", key)):
        if fault := fault_of(file or ""):
            raise ConfigError(f"{name}: {fault}")
    try:
        return Tls(ca=Path(ca) if ca else None, cert=Path(cert) if cert else None, key=Path(key) if key else None)
    except ValueError as error:
        raise ConfigError(f"tlsCa, tlsCert, tlsKey: {error}") from None


def _choice(options: Mapping[str, str], name: str, default: T) -> T:
    kind: Callable[[str], T] = type(default)
    try:
        return kind(options.get(name, str(default)).lower())
    except ValueError:
        wanted = " or ".join(str(each) for each in type(default))  # type: ignore[attr-defined]
        raise ConfigError(f"{name}: expected {wanted}, got {options[name]!r}") from None


def _size(options: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = options.get(name)
    if text is None:
        return default
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    unit = UNITS.get(match[2]) if match else None
    if match is None or unit is None or not least <= int(match[1]) * unit <= most:
        raise ConfigError(
            f"{name}: expected a number from {least} to {most}, alone or with KiB, MiB or GiB, got {text!r}"
        )
    return int(match[1]) * unit


def _seconds(options: Mapping[str, str], name: str, default: float, least: float = 0.001, most: float = 3600) -> float:
    text = options.get(name)
    if text is None:
        return default
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
    unit = SECONDS.get(match[2]) if match else None
    if match is None or unit is None or not least <= float(match[1]) * unit <= most:
        raise ConfigError(f"{name}: expected a time like 30s or 10m, from {least:g} s to {most:g} s, got {text!r}")
    return float(match[1]) * unit
