"""Users measure from the time an operation was due, and report operations that they never began."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """Results of one user with ten operations per second due, each of which takes half a second; and of users that
    were started by hand."""
    command = [sys.executable, "-m", "tests.loadtest.generator.stalled_users"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def test_waiting_for_ones_turn_is_latency_and_no_service_time(figures: dict[str, Any]) -> None:
    assert figures["service_max_ms"] > 490
    assert figures["response_max_ms"] > figures["service_max_ms"] + 200


def test_only_a_user_whose_process_is_busy_is_late(figures: dict[str, Any]) -> None:
    assert figures["late_min_ms"] < figures["service_max_ms"] / 2
    assert figures["hogged_late_ms"] > 190


def test_operations_due_and_never_begun_are_reported(figures: dict[str, Any]) -> None:
    assert figures["due"] > figures["done"] + figures["errors"] + 4


def test_wrong_value_is_an_error_and_its_description_is_kept(figures: dict[str, Any]) -> None:
    assert figures["errors"] >= 1
    assert len(figures["wrong"]) == figures["errors"]
    assert "slow read:" in figures["wrong"][0]
    assert figures["error_counts"] == [["slow", "read", "WrongValue", figures["errors"]]]


def test_each_user_class_has_every_workload_on_every_node(figures: dict[str, Any]) -> None:
    """This holds though user classes start in turn, and there are as many nodes as workloads."""
    workloads = ["ycsb-a", "ycsb-b", "ycsb-c"]
    assert [workload for workload, _ in figures["grpc"]] == workloads * 3
    assert [workload for workload, _ in figures["resp"]] == workloads * 3
    assert [node for _, node in figures["resp"]] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_two_users_draw_differently(figures: dict[str, Any]) -> None:
    assert len(set(figures["drawn"])) == len(figures["drawn"]) == 18


def test_operation_whose_user_is_killed_was_due(figures: dict[str, Any]) -> None:
    assert figures["killed"] == {"due": 1, "done": 0, "errors": 0}


def test_time_of_a_failed_operation_is_its_end(figures: dict[str, Any]) -> None:
    """A read that received an answer, and then a write that did not."""
    assert figures["failed_after_s"] > 0.29


END = "--- end"
DOOR = """
import locust
from types import SimpleNamespace
from kvstore.client import Item, Level
from kvstore.errors import OutcomeUnknown
from kvstore.loadtest.generator.expectations import Expectations
from kvstore.loadtest.generator.grpc_user import GrpcEndpoint
from kvstore.loadtest.generator.resp_user import RespEndpoint
from kvstore.loadtest.generator.values import Stamp, WrongValue, encode
from kvstore.loadtest.generator.workloads import Keyspace

def report(call):
    try:
        call()
    except (WrongValue, OutcomeUnknown) as error:
        print(error)

def item(key, number, version):
    return Item(encode(key, Stamp(1, number), 60), version, 1, 1, 0)

"""
SCAN = """
items = [(b"a", item(b"a", 1, 5)), (b"b", item(b"b", 1, 6))]
client = SimpleNamespace(scan=lambda *_, **__: iter(items))
heard_before = []
judge = SimpleNamespace(
    there=lambda *_: {},
    check=lambda *_: heard_before.append(endpoint.watch.received > 0),
    scanned=lambda *_: None,
)
endpoint = GrpcEndpoint(client, judge, None, None)
endpoint.scan(b"a", b"c", 2)
print(heard_before)
"""


def said_by(script: str) -> list[str]:
    """Return the lines of one of SCRIPTS."""
    return said_by_all()[SCRIPTS.index(script)]


@cache
def said_by_all() -> list[list[str]]:
    """Return the lines of each script; Locust is loaded once for all of them, in a separate process."""
    scripts = "".join(f"exec({script!r}, {{**globals()}})\nprint({END!r})\n" for script in SCRIPTS)
    command = [sys.executable, "-c", DOOR + scripts]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    *parts, rest = answer.stdout.split(f"{END}\n")
    assert (len(parts), rest) == (len(SCRIPTS), "")
    return [part.splitlines() for part in parts]


def test_judging_a_scan_is_no_service_time() -> None:
    assert said_by(SCAN) == ["[True, True]"]


OLD_SCAN = """
judge, keys = Expectations(1), Keyspace(b"t/", 2, 1)
page = [(keys.record(each), item(keys.record(each), each + 1, 5 + each)) for each in range(2)]
client = SimpleNamespace(scan=lambda *_, **__: iter(page))
endpoint = GrpcEndpoint(client, judge, keys, Level.LINEARIZABLE)
for key, _ in page:
    judge.acknowledged(judge.begin(key), version=5)
report(lambda: endpoint.scan(keys.records, b"u", 2))
page[0] = (page[0][0], item(page[0][0], 1, 4))
report(lambda: endpoint.scan(keys.records, b"u", 2))
page[:] = [(page[0][0], item(page[0][0], 1, 5)), (page[1][0], item(page[1][0], 2, 5))]
report(lambda: endpoint.scan(keys.records, b"u", 2))
"""


def test_scan_gives_no_older_version_than_was_seen_before() -> None:
    assert said_by(OLD_SCAN) == [
        "b't/r/000000000000' was read at version 4 after version 5 had been seen",
        "b't/r/000000000001' was read at version 5 after version 6 had been seen",
    ]


OLD_MGET = """
judge, keys = Expectations(1), Keyspace(b"t/", 1, 1)
key = keys.record(0)
endpoint = RespEndpoint(["h:1"], 0, judge, keys)
endpoint._ask = lambda verb, *_, is_read: (b"0", [key]) if verb == b"SCAN" else [encode(key, Stamp(1, 1), 60)]
judge.acknowledged(judge.begin(key))
report(lambda: endpoint.scan(keys.records, b"u", 2))
judge.acknowledged(judge.begin(key))
report(lambda: endpoint.scan(keys.records, b"u", 2))
"""


def test_scan_of_redis_gives_no_older_value_than_was_there_before() -> None:
    assert said_by(OLD_MGET) == ["b't/r/000000000000' holds our write 1, which a later write had overwritten"]


LEVELS = """
judge, keys = Expectations(1), Keyspace(b"t/", 1, 1)
key = keys.record(0)
found = [None]
client = SimpleNamespace(get=lambda key, level: found[0], put=lambda *_, **__: 4)
resp = RespEndpoint(["h:1"], 0, judge, keys)
resp._ask = lambda *words, is_read: None if not is_read else encode(key, Stamp(1, 1), 60)
endpoints = {level: GrpcEndpoint(client, judge, keys, level) for level in Level}
resp.write(key, 60)
resp.write(key, 60)
for found[0] in (None, item(key, 1, 3)):
    for level in (Level.LINEARIZABLE, Level.SESSION, Level.STALE):
        print(level.name)
        report(lambda: endpoints[level].read(key))
report(lambda: resp.read(key))
print("MODIFY")
report(lambda: endpoints[Level.STALE].modify(key, 60))
"""


def test_each_endpoint_and_level_has_its_own_expectations() -> None:
    """Two writes through the Redis endpoint; then a read from a replica that lags behind."""
    absent = "b't/r/000000000000' is absent, but was written: version unknown"
    old = "b't/r/000000000000' holds our write 1, which a later write had overwritten"
    assert said_by(LEVELS) == [
        *("LINEARIZABLE", absent, "SESSION", "STALE"),
        *("LINEARIZABLE", old, "SESSION", "STALE"),
        old,
        *("MODIFY", old),
    ]


UNKNOWN = """
def fail(*_, **__):
    raise OutcomeUnknown("nobody knows")

judge, keys = Expectations(1), Keyspace(b"t/", 1, 1)
key = keys.record(0)
grpc = GrpcEndpoint(SimpleNamespace(put=fail), judge, keys, Level.LINEARIZABLE)
resp = RespEndpoint(["h:1"], 0, judge, keys)
resp._ask = fail
report(lambda: grpc.write(key, 60))
report(lambda: resp.write(key, 60))
last = [judge.begin(key) for _ in range(2)]
for each in last:
    judge.acknowledged(each)
judge.acknowledged(judge.begin(key))
for number in (1, 2, 3):
    report(lambda: judge.check(key, encode(key, Stamp(1, number), 60), judge.floor(key)))
"""


def test_write_whose_answer_was_lost_may_appear_at_any_time() -> None:
    assert said_by(UNKNOWN) == [
        "nobody knows",
        "nobody knows",
        "b't/r/000000000000' holds our write 3, which a later write had overwritten",
    ]


SAME_VERSION = """
judge, keys = Expectations(1), Keyspace(b"t/", 1, 1)
found = [None]
client = SimpleNamespace(get=lambda key, level: found[0], put=lambda *_, **__: 5)
endpoint = GrpcEndpoint(client, judge, keys, Level.LINEARIZABLE)
report(lambda: endpoint.compare_and_set(0, 60))
found[0] = Item(encode(keys.register(0), Stamp(0, 1), 60), 5, 1, 1, 0)
report(lambda: endpoint.compare_and_set(0, 60))
"""


def test_compare_and_set_makes_a_newer_version() -> None:
    assert said_by(SAME_VERSION) == ["b't/c/000000000000' was written as version 5 after version 5 had been seen"]


RESP_SCAN = """
keys, judge = Keyspace(b"t/", 6, 1), Expectations(1)
names = [keys.record(number) for number in range(6)]
for name in names:
    judge.acknowledged(judge.begin(name))
pages = iter([(b"7", names[:2]), (b"0", names[2:])] + [(b"7", names[:2]), (b"0", names[3:])])
values = {name: encode(name, Stamp(1, number), 60) for number, name in enumerate(names, 1)}
endpoint = RespEndpoint(["h:1"], 0, judge, keys)
endpoint._ask = lambda verb, *words, is_read: next(pages) if verb == b"SCAN" else [values[word] for word in words]
for _ in range(3):
    assert endpoint.scan(keys.records, b"u", 2) > 0
report(lambda: endpoint.scan(keys.records, b"u", 2))
"""


def test_scan_of_redis_that_is_through_has_given_what_was_there() -> None:
    assert said_by(RESP_SCAN) == ["a scan missed b't/r/000000000002', which existed before the scan began"]


SCRIPTS = (SCAN, OLD_SCAN, OLD_MGET, LEVELS, UNKNOWN, SAME_VERSION, RESP_SCAN)
