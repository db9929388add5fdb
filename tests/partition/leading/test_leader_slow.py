"""Which operations of a leader are slow, and where their time went; log lines about operations contain no keys."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvstore.env.slow_log import hash_of
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.evaluate import Evaluator
from kvstore.partition.state.commands import Get, Level, Put
from tests.partition.one_partition import Partition

KEY = b"customers/4711"


@pytest.fixture
def p() -> Partition:
    return Partition().start()


def test_write_acknowledged_in_time_is_not_slow(p: Partition) -> None:
    p.submit(Put(KEY, b"1"))
    p.wait(0.09)
    p.acknowledge()
    assert p.slow.latest() == []


def test_slow_entry_reports_queue_and_log_time(p: Partition) -> None:
    entries_max = p.config.entries_in_flight_max
    for number in range(entries_max):
        p.submit(Put(b"%d" % number, b"1"))
    p.submit(Put(KEY, b"1"), Put(b"other", b"2"))
    p.wait(0.06)
    p.acknowledge()
    assert p.slow.latest() == []
    p.wait(0.07)
    p.acknowledge(entries_max)
    found = {each.key: each for each in p.slow.latest()}
    last = found[hash_of(KEY)]
    assert (last.at, last.operation, last.partition, last.operations) == ("leader", "write", "p1", 2)
    assert {name: round(part, 3) for name, part in last.parts.items()} == {"queue": 0.06, "log": 0.07}
    assert round(last.took_s, 3) == 0.13


def test_read_that_waits_long_for_its_proof_is_slow(p: Partition) -> None:
    p.do(Put(KEY, b"1"))
    p.submit(Get(KEY, Level.STRICT))
    p.wait(0.2)
    p.acknowledge()
    (found,) = p.slow.latest()
    assert (found.operation, found.key, round(found.parts["proof"], 3)) == ("GET", hash_of(KEY), 0.2)


def test_operation_refused_for_its_age_is_slow() -> None:
    config = PartitionConfig(expiry_sweep_s=0, lease_ms=500, queue_wait_max_s=1.0)
    p = Partition(config).start()
    for number in range(config.entries_in_flight_max):
        p.submit(Put(b"%d" % number, b"1"))
    late = p.submit(Put(KEY, b"1"), Put(b"other", b"2"))
    p.wait(1.5)
    assert all(isinstance(p.result(token), Unavailable) for token in late)
    (found,) = p.slow.latest()
    assert (found.operation, found.key, found.operations, found.took_s) == ("refused", hash_of(KEY), 2, 1.0)


def test_malformed_operation_is_logged_without_key_and_value(
    p: Partition, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Evaluator, items: list[Any], date_ms: int) -> Any:
        raise KeyError(items[0][0][1])

    monkeypatch.setattr(Evaluator, "evaluate", broken)
    with caplog.at_level(logging.INFO):
        (token,) = p.submit(Put(KEY, b"who-they-are"))
    assert isinstance(p.result(token), InvalidRequest)
    assert f"operation=3 key={hash_of(KEY)} cannot be evaluated" in caplog.text
    assert "in broken" in caplog.text, "the traceback shows where it happened"
    assert "4711" not in caplog.text
    assert "who-they-are" not in caplog.text
