"""Every setting of a node: its range holds, and the reference in docs/configuration.md says what the code says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

from kvstore import config as toml
from kvstore.ranges import Range, above, at_least, between, range_of
from kvstore.server.config import NodeConfig
from kvstore.types import Quorum
from scripts import configuration
from tests.source import ROOT

GOOD: dict[str, Any] = {"id": "n1", "zookeeper": "127.0.0.1:2181/kvstore", "data_dir": "/d", "secret_file": "/s"}


def numbers(cls: type = NodeConfig, prefix: str = "") -> Iterator[tuple[str, type, Range | None]]:
    """Every number that node.toml may have, by its dotted name, but for quorums, which are checked as a whole."""
    for name, hint in get_type_hints(cls, include_extras=True).items():
        bare = configuration.bare(hint)
        if dataclasses.is_dataclass(bare) and bare is not Quorum:
            assert isinstance(bare, type)
            yield from numbers(bare, f"{prefix}{name}.")
        elif bare in (int, float):
            yield prefix + name, bare, range_of(hint)


NUMBERS = list(numbers())


def faults_with(name: str, value: float) -> list[str]:
    """What a file with one setting is told about it."""
    table: dict[str, Any] = dict(GOOD)
    *sections, last = name.split(".")
    inner = table
    for each in sections:
        inner = inner.setdefault(each, {})
    inner[last] = value
    return [str(each) for each in toml.look_at(table, NodeConfig)[1] if each.name == name]


def test_every_number_has_a_range() -> None:
    assert len(NUMBERS) > 40
    assert [name for name, _, found in NUMBERS if found is None] == []


@pytest.mark.parametrize(("name", "kind", "found"), NUMBERS, ids=[name for name, *_ in NUMBERS])
def test_what_is_beyond_its_range_is_refused_by_name(name: str, kind: type, found: Range | None) -> None:
    assert found is not None
    beyond: list[float] = [found.least if found.is_above else found.least - 1]
    if not math.isinf(found.most):
        beyond.append(found.most if found.is_below else found.most + 1)
    for value in beyond:
        assert faults_with(name, kind(value)) == [f"{name}: want {found}, got {kind(value)}"]
    if kind is float:
        assert [len(faults_with(name, value)) for value in (math.nan, math.inf, -math.inf)] == [1, 1, 1]
    within = kind(found.least + 1) if found.is_above else kind(found.least)
    if name != "storage.segment_bytes":  # a node wants more than a bookie by itself
        assert faults_with(name, within) == []


def test_a_range_is_said_in_plain_numbers() -> None:
    assert [str(each) for each in (at_least(0), above(0), between(1 << 10, 2 << 30), Range(0, 1, is_below=True))] == [
        "at least 0",
        "more than 0",
        "1024 to 2147483648",
        "0 to below 1",
    ]
    assert [value for value in (-1, 0, 0.5, 1, math.nan) if Range(0, 1, is_below=True).admits(value)] == [0, 0.5]
    assert [value for value in (0, 1e-9, math.inf) if above(0).admits(value)] == [1e-9]


def test_the_reference_is_what_the_code_says() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == configuration.reference(), "run `make reference`"


def test_the_reference_has_every_setting_once() -> None:
    page = configuration.reference()
    names = [name.rpartition(".")[2] for name, *_ in NUMBERS]
    assert [name for name in names if f"| `{name}` |" not in page] == []
    assert "| `retired_keep_s` | `86400` (1 day) | at least 0 | How long the state" in page
    assert "| `ack` | `2` | a whole number |" in page, "by the default of [log], which the class has none of"
