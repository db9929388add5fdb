"""Checks the options that users give with `.option(...)`: every fault with the option's name and what is wanted.
Decides only."""

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

T = TypeVar("T")

WHERE = ("servers", "zookeeper", "dataDir", "tlsCa", "tlsCert", "tlsKey", "timeout")
RANGE = ("columns", "prefix", "start", "end", "keyEncoding", "keyType", "valueType")
READ = (*WHERE, *RANGE, "keys", "partition", "pin", "pinTtl", "splitBytes", "pageBytes")
STREAM_ONLY = ("startingPosition", "maxRowsPerTrigger", "maxBytesPerTrigger", "holdName", "holdTtl")
STREAM = (*WHERE, *RANGE, *STREAM_ONLY)
WRITE = (*WHERE, "keyColumn", "valueColumn", "expiresColumn", "onConflict", "onNull", "batchRows", "batchBytes")
KEYS_MAX = 10_000
"""In the option `keys`: each is looked for by itself."""
SPARKS_OWN = {"checkpointlocation", "path", "querymaxresultcount"}
"""Options that Spark hands to every source and sink."""

CATALOGS_OWN = "provider"
"""An option that Spark adds where it makes a table of its catalog."""
TABLES = (
    "kvstore has no tables in Spark's catalog, because Spark hands a table's options neither to its reads nor to its "
    'writes: use CREATE TEMPORARY VIEW name USING kvstore OPTIONS (...), or format("kvstore") with load() and save()'
)

UNITS = {"": 1, "b": 1, "kib": 1 << 10, "kb": 1 << 10, "mib": 1 << 20, "mb": 1 << 20, "gib": 1 << 30, "gb": 1 << 30}
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where the store is; exactly one of the first three is set."""

    servers: tuple[str, ...]
    zookeeper: str
    data_dir: str
    tls: Tls | None
    timeout_s: float
    """For each operation, retries included: how long an outage a job outlives."""


class OnConflict(StrEnum):
    """The ways to write a row whose key is in the store."""

    overwrite = "overwrite"
    keep = "keep"


class OnNull(StrEnum):
    """The ways to write a row without a value."""

    error = "error"
    delete = "delete"


class KeyType(StrEnum):
    """The types that a column of keys is read as."""

    binary = "binary"
    string = "string"


class ValueType(StrEnum):
    """The types that a column of values is read as: the bytes, or what they say in UTF-8."""

    binary = "binary"
    string = "string"
    long = "long"
    double = "double"


@dataclass(frozen=True, slots=True)
class Types:
    """The types of the two columns that the store knows as bytes."""

    key: KeyType = KeyType.binary
    value: ValueType = ValueType.binary


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How rows become operations."""

    key_column: str
    value_column: str
    expires_column: str
    """Empty: `expires_at` if there is such a column."""
    on_conflict: OnConflict
    on_null: OnNull
    batch_rows: int
    batch_bytes: int


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Keys in [start, end); an empty end is none."""

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
    """The options of a read: its range and portions."""

    columns: tuple[str, ...]
    keys: KeyRange
    exactly: frozenset[bytes] | None
    """Of that range only these keys; None: all."""
    partition: str
    """Of that the rows of this partition; empty: of all."""
    pin: str
    """Read at a pin that somebody else holds, as splits.encode tells it; empty: at one of our own."""
    pin_ttl_s: float
    split_bytes: int
    page_bytes: int
    types: Types


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Where a stream begins and how much it takes at a time."""

    start: str | dict[str, Any]
    """`earliest`, `latest`, or an offset."""
    rows_max: int
    """0: all there are."""
    bytes_max: int
    columns: tuple[str, ...]
    keys: KeyRange
    hold: str
    """The name under which logs are held; empty: one made up for this run of the query."""
    hold_s: float
    types: Types


def cluster_of(options: Mapping[str, str], environ: Mapping[str, str]) -> Cluster:
    """Raises ConfigError."""
    named = [name for name in WHERE[:3] if options.get(name)]
    if len(named) > 1:
        raise ConfigError(f"want one of the options servers, zookeeper and dataDir, got {' and '.join(named)}")
    if not named:
        raise ConfigError(
            "no cluster is named: set the option servers (HOST:PORT,...), zookeeper (HOST:PORT,...[/CHROOT]) or "
            "dataDir (of `kvstore up`)"
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
    """How tasks connect. `identity`: of which cluster the servers must be."""
    return ClientConfig(endpoints=endpoints, timeout_s=cluster.timeout_s, tls=cluster.tls, cluster=identity)


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Raises ConfigError."""
    _refuse_unknown(options, WRITE, "writing")
    on_conflict = _choice(options, "onConflict", OnConflict.overwrite)
    on_null = _choice(options, "onNull", OnNull.error)
    if (on_conflict, on_null) == (OnConflict.keep, OnNull.delete):
        raise ConfigError("onConflict=keep leaves what is there, onNull=delete removes it: want one of them, got both")
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
    """`known`: the columns that there are. Raises ConfigError."""
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
    """`known`: the columns that there are; `default`: those that are read if none are named. Raises ConfigError."""
    _refuse_unknown(options, STREAM, "reading a stream")
    start: str | dict[str, Any] = options.get("startingPosition", "latest")
    if start not in ("earliest", "latest"):
        try:
            start = json.loads(str(start))
        except ValueError:
            start = ""
        if not isinstance(start, dict):
            raise ConfigError(
                f"startingPosition: want earliest, latest or an offset as JSON, got {options['startingPosition']!r}"
            )
    if options.get("maxRowsPerTrigger") and options.get("maxBytesPerTrigger"):
        raise ConfigError("want one of the options maxRowsPerTrigger and maxBytesPerTrigger, got both")
    hold = options.get("holdName", "")
    if hold and not NAME.fullmatch(hold):
        raise ConfigError(f"holdName: want 1 to 64 letters, digits, '-', '_' or '.', got {hold!r}")
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
    """Return the columns that are read, before it is known whether once or as a stream. Raises ConfigError."""
    _refuse_unknown(options, tuple(dict.fromkeys((*READ, *STREAM))), "reading")
    return _columns(options, known, default)


def types_of(options: Mapping[str, str]) -> Types:
    """Raises ConfigError."""
    return Types(_choice(options, "keyType", KeyType.binary), _choice(options, "valueType", ValueType.binary))


def is_for_a_stream(options: Mapping[str, str]) -> bool:
    """True only if it cannot be for anything else."""
    return any(options.get(name) for name in STREAM_ONLY)


def key_range(options: Mapping[str, str]) -> KeyRange:
    """Return the key range that prefix, start and end leave. Raises ConfigError."""
    found = {name: _key(options, name, options.get(name, "")) for name in ("prefix", "start", "end")}
    if found["end"] and found["start"] > found["end"]:
        raise ConfigError(f"start, end: want start below end, got {options['start']!r} and {options['end']!r}")
    return KeyRange(found["start"], found["end"]) & prefix_range(found["prefix"])


def exact_keys(options: Mapping[str, str]) -> frozenset[bytes] | None:
    """The keys that `keys` lists; None: it is not set. Raises ConfigError."""
    text = options.get("keys")
    if text is None:
        return None
    try:
        listed = json.loads(text)
    except ValueError:
        listed = None
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise ConfigError(f'keys: want a list as JSON, for example ["user/1", "user/2"], got {text[:100]!r}')
    if len(listed) > KEYS_MAX:
        raise ConfigError(f"keys: want at most {KEYS_MAX}, got {len(listed)}: join with a data frame of them instead")
    return frozenset(_key(options, "keys", each) for each in listed)


def prefix_range(prefix: bytes) -> KeyRange:
    """The keys that begin so."""
    stem = prefix.rstrip(b"\xff")
    return KeyRange(prefix, stem[:-1] + bytes([stem[-1] + 1]) if stem else b"")


# ── one option ──


def _refuse_unknown(options: Mapping[str, str], known: tuple[str, ...], doing: str) -> None:
    if any(name.lower() == "pushfilters" for name in options):
        raise ConfigError(
            "pushFilters: Spark applied the filters of one action to the next, which then missed rows, so there is no "
            "such option: narrow what is read by prefix, start, end, keys and partition; Spark checks the conditions"
        )
    if CATALOGS_OWN in {name.lower() for name in options}:
        raise ConfigError(f"CREATE TABLE ... USING kvstore: {TABLES}")
    names = {name.lower() for name in known} | SPARKS_OWN
    unknown = sorted(name for name in options if name.lower() not in names)
    if unknown:
        spelled = {name.lower(): name for name in (*READ, *STREAM, *WRITE)}  # Spark hands them over in lower case
        name = spelled.get(unknown[0].lower(), unknown[0])
        raise ConfigError(f"unknown option {name!r} for {doing}; there are {', '.join(known)}")
    if options.get("path"):
        raise ConfigError(f"there are no paths in a store, got {options['path']!r}: call load() or save() without one")


def _key(options: Mapping[str, str], name: str, text: str) -> bytes:
    encoding = options.get("keyEncoding", "utf8").lower()
    if encoding not in ("utf8", "utf-8", "hex"):
        raise ConfigError(f"keyEncoding: want utf8 or hex, got {options['keyEncoding']!r}")
    try:
        return bytes.fromhex(text) if encoding == "hex" else text.encode()
    except ValueError:
        raise ConfigError(f"{name}: want hexadecimal digits, since keyEncoding is hex; got {text!r}") from None


def _columns(options: Mapping[str, str], known: tuple[str, ...], default: tuple[str, ...]) -> tuple[str, ...]:
    wanted = [name.strip() for name in options.get("columns", "").split(",") if name.strip()]
    if "columns" in options and not wanted:
        raise ConfigError(f"columns: want some of {', '.join(known)}, got {options['columns']!r}")
    for name in wanted:
        if name not in known:
            raise ConfigError(f"columns: there is no column {name!r}; there are {', '.join(known)}")
    if len(set(wanted)) < len(wanted):
        raise ConfigError(f"columns: want each once, got {options['columns']!r}")
    return tuple(wanted) or default


def _endpoints(servers: str) -> tuple[str, ...]:
    try:
        return parse_url(f"kv://{servers}").endpoints
    except ValueError as error:
        raise ConfigError(f"servers: want HOST:PORT,..., got {servers!r}: {error}") from None


def _tls(options: Mapping[str, str], environ: Mapping[str, str]) -> Tls | None:
    """By the options, or as for the commands by KVSTORE_TLS_CA, KVSTORE_TLS_CERT and KVSTORE_TLS_KEY."""
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
        raise ConfigError(f"{name}: want {wanted}, got {options[name]!r}") from None


def _size(options: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = options.get(name)
    if text is None:
        return default
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    unit = UNITS.get(match[2]) if match else None
    if match is None or unit is None or not least <= int(match[1]) * unit <= most:
        raise ConfigError(f"{name}: want a number from {least} to {most}, alone or with KiB, MiB or GiB, got {text!r}")
    return int(match[1]) * unit


def _seconds(options: Mapping[str, str], name: str, default: float, least: float = 0.001, most: float = 3600) -> float:
    text = options.get(name)
    if text is None:
        return default
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
    unit = SECONDS.get(match[2]) if match else None
    if match is None or unit is None or not least <= float(match[1]) * unit <= most:
        raise ConfigError(f"{name}: want a time like 30s or 10m, from {least:g} s to {most:g} s, got {text!r}")
    return float(match[1]) * unit
