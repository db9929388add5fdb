"""A TOML table → any frozen configuration dataclass, with all of its faults named in one error. Reads files, decides
nothing else."""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from kvstore.errors import ConfigError
from kvstore.places import fault_of

T = TypeVar("T")


def read(path: Path, cls: type[T], overrides: Mapping[str, Any] | None = None) -> T:
    """The configuration in a TOML file, with `overrides` in place of its top-level values.

    Raises ConfigError naming the file and every fault in it.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    try:
        return from_table({**table, **(overrides or {})}, cls)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def from_table(table: Mapping[str, Any], cls: type[T]) -> T:
    """Build `cls` from a table; a nested dataclass is a table of its own.

    Raises ConfigError with every fault, each by its dotted name.
    """
    faults: list[str] = []
    value = _build(table, cls, "", faults)
    if faults:
        raise ConfigError("; ".join(faults))
    return typing.cast("T", value)


def to_toml(config: Any) -> str:
    """The table that `from_table` turns back into `config`; what equals its default is left out."""
    return "\n".join(_lines(config, "")) + "\n"


def _build(table: Mapping[str, Any], cls: type, prefix: str, faults: list[str]) -> Any:
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    faults_before = len(faults)
    faults += [f"{prefix}{name}: unknown; known are {', '.join(fields)}" for name in table if name not in fields]
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in table:
            values[name] = _value(table[name], hints[name], f"{prefix}{name}", faults)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            faults.append(f"{prefix}{name}: missing")
    if len(faults) > faults_before:
        return None
    try:
        return cls(**values)
    except (ValueError, ConfigError) as error:
        faults.append(f"{prefix.rstrip('.')}: {error}" if prefix else str(error))
        return None


def _value(value: Any, hint: Any, name: str, faults: list[str]) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:  # not from TOML, which has no word for it
            return None
        hint = next(each for each in typing.get_args(hint) if each is not type(None))
        origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, dict):
            return _build(value, hint, f"{name}.", faults)
        faults.append(f"{name}: want a table, got {value!r}")
        return None
    if origin is tuple:
        if isinstance(value, list):
            return tuple(_value(each, typing.get_args(hint)[0], f"{name}[{i}]", faults) for i, each in enumerate(value))
        faults.append(f"{name}: want a list, got {value!r}")
        return None
    return _scalar(value, hint, name, faults)


def _scalar(value: Any, hint: Any, name: str, faults: list[str]) -> Any:
    if hint is float and type(value) is int:
        return float(value)
    if hint is Path and isinstance(value, str):
        if fault := fault_of(value):
            faults.append(f"{name}: {fault}")
            return None
        return Path(value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            faults.append(f"{name}: want one of {', '.join(str(each.value) for each in hint)}, got {value!r}")
            return None
    plain = getattr(hint, "__supertype__", hint)
    if type(value) is not plain:
        faults.append(f"{name}: want {plain.__name__}, got {value!r}")
        return None
    return value


def _lines(config: Any, prefix: str) -> list[str]:
    own: list[str] = []
    nested: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == _default(field):
            continue
        if dataclasses.is_dataclass(value):
            nested += ["", f"[{prefix}{field.name}]", *_lines(value, f"{prefix}{field.name}.")]
        elif value is not None:
            own.append(f"{field.name} = {_toml(value)}")
    return own + nested


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case Enum():
            return _toml(value.value)
        case int() | float():
            return repr(value)
        case tuple():
            return "[" + ", ".join(_toml(each) for each in value) + "]"
        case _:
            escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
            return f'"{escaped}"'
