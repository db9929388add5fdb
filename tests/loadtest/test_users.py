"""Users measure from when an operation was due, and tell what they never came to."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """Of one user with ten operations per second due, each of which takes half a second."""
    command = [sys.executable, "-m", "tests.loadtest.stalled_users"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def test_waiting_for_ones_turn_is_latency_and_no_service_time(figures: dict[str, Any]) -> None:
    assert figures["service_max_ms"] > 490
    assert figures["response_max_ms"] > figures["service_max_ms"] + 200


def test_what_was_due_and_never_begun_is_told(figures: dict[str, Any]) -> None:
    assert figures["due"] > figures["done"] + figures["errors"] + 4


def test_a_wrong_value_is_an_error_and_is_kept_in_words(figures: dict[str, Any]) -> None:
    assert figures["errors"] >= 1
    assert len(figures["wrong"]) == figures["errors"]
    assert "slow read:" in figures["wrong"][0]
    assert figures["error_counts"] == [["slow", "read", "WrongValue", figures["errors"]]]


SCAN = """
import locust
from types import SimpleNamespace
from loadtest.grpc_user import GrpcDoor

item = SimpleNamespace(value=b"value")
client = SimpleNamespace(scan=lambda *_, **__: iter([(b"a", item), (b"b", item)]))
heard_before = []
judge = SimpleNamespace(NO_FLOOR=None, check=lambda *_: heard_before.append(door.watch.heard > 0))
door = GrpcDoor(client, judge, None, None)
door.scan(b"a", b"c", 2)
print(heard_before)
"""


def test_judging_a_scan_is_no_service_time() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", SCAN], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert answer.stdout == "[True, True]\n"
