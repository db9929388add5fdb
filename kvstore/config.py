"""Reads a TOML table into a frozen configuration dataclass and reports all of its faults in one error."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import sys
import tomllib
import types
import typing
from collections.abc import Container, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvstore.errors import ConfigError
from kvstore.places import fault_of
from kvstore.ranges import range_faults_of

T = TypeVar("T")
_UNPARSED = (ValueError, RecursionError)
"""Errors of `tomllib`: text that is not TOML, a number with too many digits, or lists that are nested too deeply."""
_NAME = re.compile(r"[a-z_]+(\.[a-z_]+)*")
_OWN_NAME = re.compile(r"([a-z_]+)((?:\.[a-z_]+)*)(?:\[\d+\])?: ", re.ASCII)


class Fault(NamedTuple):
    """A fault of one setting or of a table of settings."""

    name: str
    """The setting's name, with dots between tables; empty if the fault concerns the whole file."""
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" if self.name else self.text


def read(path: Path, cls: type[T], settings: Sequence[Setting] = ()) -> T:
    """Return the configuration in a TOML file. `settings` override the values of the file.

    Raises ConfigError with the name of the file and every fault in it.
    """
    table = with_settings(parse(text_of(path), path), settings)
    try:
        return from_table(table, cls)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def text_of(path: Path) -> str:
    """Return the text of a configuration file. Raises ConfigError with the file's name."""
    try:
        return path.read_text(encoding="utf-8-sig")  # Windows editors write a byte order mark
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def parse(text: str, path: Path) -> dict[str, Any]:
    """Parse the text of a configuration file. Raises ConfigError with the file's name."""
    try:
        return tomllib.loads(text)
    except _UNPARSED as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def from_table(table: Mapping[str, Any], cls: type[T]) -> T:
    """Build `cls` from a table. A nested dataclass is its own table.

    Raises ConfigError with every fault and the dotted name of each setting at fault.
    """
    value, faults = build_or_faults(table, cls)
    if value is None:
        raise ConfigError(*map(str, faults))
    return value


def build_or_faults(table: Mapping[str, Any], cls: type[T]) -> tuple[T | None, list[Fault]]:
    """Build `cls` as `from_table` does, but return the faults. The value is None if there are any."""
    faults: list[Fault] = []
    value = _build(table, cls, "", faults)
    return (None if faults else typing.cast("T", value)), faults


class Setting(NamedTuple):
    """A value that overrides one setting of a file."""

    name: str
    """The setting's name, with dots between tables."""
    value: Any


def setting(text: str) -> Setting:
    """Parse TABLE.NAME=VALUE, the form in which commands take settings. A value that is not TOML counts as a string.
    Raises ConfigError."""
    name, is_there, value = text.partition("=")
    if not is_there or not _NAME.fullmatch(name):
        raise ConfigError(f"--set {text}: expected SECTION.NAME=VALUE, for example autorecovery.lost_bookie_delay_s=5")
    try:
        found = tomllib.loads(f"value = {value}")
    except _UNPARSED:
        return Setting(name, value)
    return Setting(name, found["value"]) if list(found) == ["value"] else Setting(name, value)


def with_settings(table: Mapping[str, Any], settings: Sequence[Setting]) -> dict[str, Any]:
    """Return a copy of a table with overridden values. Raises ConfigError if a name lies below a value."""
    found = dict(table)
    for each in settings:
        *sections, name = each.name.split(".")
        inner = found
        for section in sections:
            inner[section] = dict(below) if isinstance(below := inner.get(section, {}), dict) else below
            inner = inner[section]
            if not isinstance(inner, dict):
                raise ConfigError(f"--set {each.name}: {section} is a value, not a section")
        inner[name] = each.value
    return found


def to_toml(config: Any) -> str:
    """Return the TOML text that `from_table` reads back into `config`. Default values are omitted."""
    return "\n".join(_lines(config, "")) + "\n"


def _build(table: Mapping[str, Any], cls: type, prefix: str, faults: list[Fault]) -> Any:
    """Build `cls`, or return None if that is impossible, and add every fault that can be found.

    A check that compares settings needs a valid value for each of them. If a value is invalid, only names, types and
    ranges are checked. An unknown name does not hide other faults.
    """
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    known = {*fields, *getattr(cls, "RETIRED", ())}  # files of earlier releases may still contain these
    faults += [Fault(f"{prefix}{name}", _unknown(name, tuple(fields))) for name in table if name not in known]
    values: dict[str, Any] = {}
    missing, is_complete = set[str](), True
    for name, field in fields.items():
        if name in table:
            faults_before = len(faults)
            value = _value(table[name], hints[name], f"{prefix}{name}", faults)
            if len(faults) == faults_before or dataclasses.is_dataclass(value):
                values[name] = value
            else:
                is_complete = False
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            faults.append(Fault(f"{prefix}{name}", "missing"))
            missing.add(name)
            if hints[name] in (str, Path):
                values[name] = hints[name](name)  # a placeholder, so that the other settings can be checked
            else:
                is_complete = False
    try:
        value = cls(**values) if is_complete else None
        found = [] if is_complete else range_faults_of(cls, values)
    except (ValueError, ConfigError) as error:
        value, found = None, list(getattr(error, "faults", (str(error),)))
    placed = [_placed(text, prefix, fields) for text in found]
    faults += [each for each in placed if each.name.removeprefix(prefix) not in missing]
    return None if missing else value


def _unknown(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"unknown; {meant}known are {', '.join(known)}"


def _placed(text: str, prefix: str, known: Container[str]) -> Fault:
    """Attribute a fault that a class reports to the setting it names first, or else to the whole table."""
    found = _OWN_NAME.match(text)
    if found is None or found[1] not in known:
        return Fault(prefix.rstrip("."), text)
    return Fault(prefix + found[1] + found[2], text[found.end() :])


def _value(value: Any, hint: Any, name: str, faults: list[Fault]) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:  # never from TOML, which has no null
            return None
        hint = next(each for each in typing.get_args(hint) if each is not type(None))
        origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, dict):
            return _build(value, hint, f"{name}.", faults)
        faults.append(Fault(name, f"expected a table, got {value!r}"))
        return None
    if origin is tuple:
        if isinstance(value, list):
            return tuple(_value(each, typing.get_args(hint)[0], f"{name}[{i}]", faults) for i, each in enumerate(value))
        faults.append(Fault(name, f"expected a list, got {value!r}"))
        return None
    return _scalar(value, hint, name, faults)


_SHOWN = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", Path: "a path"}
"""Types of values, as errors name them to people who do not know Python."""


def _scalar(value: Any, hint: Any, name: str, faults: list[Fault]) -> Any:
    if hint is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if hint is Path and isinstance(value, str):
        if fault := fault_of(value):
            faults.append(Fault(name, fault))
            return None
        return Path(value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            faults.append(Fault(name, f"expected one of {', '.join(str(each.value) for each in hint)}, got {value!r}"))
            return None
    plain = getattr(hint, "__supertype__", hint)
    if type(value) is not plain:
        faults.append(Fault(name, f"expected {_SHOWN.get(plain, plain.__name__)}, got {value!r}"))
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
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML has JSON's escapes
