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
judge = SimpleNamespace(
    NO_FLOOR=None,
    there=lambda *_: [],
    check=lambda *_: heard_before.append(door.watch.heard > 0),
    scanned=lambda *_: None,
)
door = GrpcDoor(client, judge, None, None)
door.scan(b"a", b"c", 2)
print(heard_before)
"""


def test_judging_a_scan_is_no_service_time() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", SCAN], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert answer.stdout == "[True, True]\n"


RESP_SCAN = """
import locust
from loadtest.expectations import Expectations
from loadtest.resp_user import RespDoor
from loadtest.values import Stamp, WrongValue, encode
from loadtest.workloads import Keyspace

keys, judge = Keyspace(b"t/", 6, 1), Expectations(1)
names = [keys.record(number) for number in range(6)]
for name in names:
    judge.acknowledged(judge.begin(name))
pages = iter([(b"7", names[:2]), (b"0", names[2:])] + [(b"7", names[:2]), (b"0", names[3:])])
values = {name: encode(name, Stamp(1, number), 60) for number, name in enumerate(names, 1)}
door = RespDoor(["h:1"], 0, judge, keys)
door._ask = lambda verb, *words, is_read: next(pages) if verb == b"SCAN" else [values[word] for word in words]
for _ in range(3):
    assert door.scan(keys.records, b"u", 2) > 0
try:
    door.scan(keys.records, b"u", 2)
except WrongValue as error:
    print(error)
"""


def test_a_scan_of_redis_that_is_through_has_given_what_was_there() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", RESP_SCAN], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert answer.stdout == "a scan passed over b't/r/000000000002', which was there before it began\n"
