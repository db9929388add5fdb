"""A latency goal can be set for each kind of operation."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvstore.loadtest.generator.options import Options
from kvstore.loadtest.report.goals import COUNT_MIN, Goals, p99_goals, slow, unknown
from tests.source import ROOT


@pytest.mark.parametrize(
    ("text", "goals"),
    [
        ("", {}),
        ("50", {"": 50.0}),
        ("read=20,update=50.5", {"read": 20.0, "update": 50.5}),
        ("read=20,100", {"read": 20.0, "": 100.0}),
        ("look=20,buy_all=50", {"look": 20.0, "buy_all": 50.0}),
    ],
)
def test_goals_are_for_all_operations_or_for_some(text: str, goals: dict[str, float]) -> None:
    assert p99_goals(text) == goals


@pytest.mark.parametrize(
    "text", ["0", "-1", "x", "inf", "nan", "read=", "re ad=20", "1a=20", "=20", "20,30", "read=1,read=2"]
)
def test_invalid_goal_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match="expected milliseconds, or OPERATION=milliseconds once per operation of read, update"
    ):
        p99_goals(text)


def test_goal_must_name_an_existing_operation() -> None:
    assert unknown(p99_goals("read=20,look=5,50"), ["look"]) == ""
    assert unknown(p99_goals("raed=20,look=5"), ["buy"]).endswith("compare-and-set, buy, got raed, look")


def test_goals_of_the_docs_are_taken_with_their_user() -> None:
    page = (ROOT / "docs" / "tutorials" / "load-test.md").read_text()
    (text,) = re.findall(r"--p99-ms (\S+) Shop", page)
    (operations,) = re.findall(r"operations = (\{.*?\})", page)
    assert unknown(Options(p99_ms=text).goals.p99_ms, json.loads(operations)) == ""


def line(operation: str, p99_ms: float, count: int = COUNT_MIN) -> dict[str, Any]:
    return {"endpoint": "grpc", "operation": operation, "p99_ms": p99_ms, "count": count}


def test_missed_goals_are_reported_and_rare_operations_not_judged() -> None:
    lines = [line("read", 21.0), line("update", 99.0), line("scan", 101.0), line("insert", 900.0, COUNT_MIN - 1)]
    assert slow(lines, Goals(p99_ms={"read": 20.0, "": 100.0})) == [
        "grpc read: p99 is 21 ms; the goal is 20 ms",
        "grpc scan: p99 is 101 ms; the goal is 100 ms",
    ]
    assert slow(lines, Goals()) == []
