"""The reference of a node's settings, docs/reference/configuration.md, from the classes that hold them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple

from kvstore.ranges import plain, range_of
from kvstore.server.config import NodeConfig
from scripts.pages import one_line, table

HEAD = """# Settings of a node

Every setting of `node.toml`, for operators who configure nodes. `make reference` writes this page from the code: do not
edit it here. `kvstore node check --config node.toml` reports faults of a file, and values that are unsafe or odd.
[Configure a node](../how-to/configure-a-node.md) tells what to choose.

The end of a name is its unit: `_s` seconds, `_ms` milliseconds, `_bytes` bytes, `_per_s` a number per second. A setting
without a default is required. Numbers are finite: `inf` and `nan` are refused. If 0 means never, the description says
so. Elsewhere, use `1e9` seconds (thirty years) for a time that never comes.
"""
SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
SPANS = ((86_400, "days"), (3_600, "hours"), (60, "minutes"))


class Setting(NamedTuple):
    """One name of a table."""

    name: str
    default: str
    values: str
    text: str


def reference() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, cls, given, text in tables(NodeConfig, {}):
        parts.append(f"## {f'[{name}]' if name else 'At the top'}\n\n{text}\n")
        rows = [(f"`{each.name}`", each.default, each.values, each.text) for each in settings_of(cls, given)]
        parts.append(table(("setting", "default", "values", "description"), rows))
    return "\n".join(parts)


def tables(
    cls: type, given: Mapping[str, Any], prefix: str = "", text: str = ""
) -> Iterator[tuple[str, type, Mapping[str, Any], str]]:
    """A class and those within it, with their dotted names, the defaults that the outer one gives, and what each is
    about."""
    yield prefix, cls, given, text or cell(cls.__doc__ or "")
    texts, fields = texts_of(cls), {each.name: each for each in dataclasses.fields(cls)}
    for name, hint in typing.get_type_hints(cls).items():
        inner = bare(hint)
        if dataclasses.is_dataclass(inner):
            own = fields[name].default_factory
            made = {} if own is dataclasses.MISSING else values_in(own())
            yield from tables(inner, made, f"{prefix}.{name}".lstrip("."), texts[name])


def values_in(settings: Any) -> dict[str, Any]:
    """Each setting of a dataclass."""
    return {each.name: getattr(settings, each.name) for each in dataclasses.fields(settings)}


def settings_of(cls: type, given: Mapping[str, Any]) -> list[Setting]:
    """The settings of one table, without the tables within it."""
    hints, texts = typing.get_type_hints(cls, include_extras=True), texts_of(cls)
    return [
        Setting(each.name, default_of(each, given), values_of(hints[each.name]), texts[each.name])
        for each in dataclasses.fields(cls)
        if not dataclasses.is_dataclass(bare(hints[each.name]))
    ]


def texts_of(cls: type) -> dict[str, str]:
    """Return the description below each field of a class and of its base classes."""
    found: dict[str, str] = {}
    for each in reversed([one for one in cls.__mro__ if dataclasses.is_dataclass(one)]):
        body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(each))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                assert isinstance(below.value, ast.Constant)
                found[field.target.id] = cell(str(below.value.value))
    return found


def default_of(field: dataclasses.Field[Any], given: Mapping[str, Any]) -> str:
    """As the file would say it, and again in a larger unit where that reads better."""
    value = given.get(field.name, field.default)
    if value is dataclasses.MISSING:
        return "required"
    if value is None or value == ():
        return "none"
    return f"`{in_toml(value)}`{in_words(field.name, value)}"


def in_toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case Enum():
            return in_toml(value.value)
        case int() | float():
            return plain(value)
        case _:
            return f'"{value}"'


def in_words(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if "_bytes" in name:
        for size, unit in SIZES:
            if value >= size and value % size == 0:
                return f" ({int(value // size)} {unit})"
    seconds = value / 1000 if name.endswith("_ms") else value if re.search(r"(?<!per)_s(_max)?$", name) else 0
    for span, unit in SPANS:
        if seconds >= span and seconds % span == 0:
            count = int(seconds // span)
            return f" ({count} {unit if count > 1 else unit.rstrip('s')})"
    return ""


def values_of(hint: Any) -> str:
    """The values that a setting may have."""
    if found := range_of(hint):
        return str(found)
    inner = bare(hint)
    if isinstance(inner, type) and issubclass(inner, Enum):
        return ", ".join(
            f"`{in_toml(each)}`" + (f" ({each.name})" if isinstance(each.value, int) else "") for each in inner
        )
    if typing.get_origin(inner) is tuple:
        return f"a list: {values_of(typing.get_args(inner)[0])}"
    return {bool: "`true`, `false`", str: "text", Path: "a path", int: "a whole number", float: "a number"}[inner]


def bare(hint: Any) -> Any:
    """A type without its range, and without `| None`."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return next(each for each in typing.get_args(hint) if each is not type(None))
    return hint


def cell(text: str) -> str:
    """Return a docstring as it may be in a cell of a table. TOML has no None."""
    return one_line(re.sub(r"\bNone: ", "Left out: ", text))
