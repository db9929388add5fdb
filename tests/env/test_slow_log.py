"""The slow log: a bounded ring of operations with hashes in place of keys."""

from __future__ import annotations

import logging
import math

import pytest

from kvstore.env.logs.fields import fields_of
from kvstore.env.slow_log import KEPT, PER_SECOND_MAX, SlowLog, hash_of

KEY = b"customers/4711"


class Time:
    def __init__(self) -> None:
        self.now = 10.0

    def log(self, slow_ms: int = 100) -> SlowLog:
        return SlowLog(slow_ms, lambda: self.now, lambda: int(self.now * 1000), lambda: 0.25)


def test_note_has_the_hash_of_its_key_and_the_parts_of_its_time(caplog: pytest.LogCaptureFixture) -> None:
    log = Time().log()
    with caplog.at_level(logging.INFO, "kvstore.slow"):
        log.note("leader", "write", 0.5, key=KEY, partition="p1", operations=3, queue=0.1, log=0.4)
    (found,) = log.latest()
    assert (found.date_ms, found.at, found.key, found.operations, found.starved) == (
        10_000,
        "leader",
        hash_of(KEY),
        3,
        0.25,
    )
    assert found.parts == {"queue": 0.1, "log": 0.4}
    (record,) = caplog.records
    said = record.getMessage()
    assert "4711" not in said
    assert f"at=leader operation=write key={hash_of(KEY)} partition=p1 took_ms=500.0 operations=3" in said
    assert said.endswith("queue_ms=100.0 log_ms=400.0")
    assert fields_of(record.msg, record.args)["took_ms"] == 500.0
    assert record.__dict__["fields"] == {"queue_ms": 100.0, "log_ms": 400.0}


def test_hash_of_a_key_is_stable() -> None:
    """Operators compare the hash with that of keys they know, also across versions."""
    assert hash_of(KEY) == "7f872529588df953"
    assert hash_of(KEY + b"x") != hash_of(KEY)


def test_missing_key_has_no_hash() -> None:
    log = Time().log()
    for key in (None, b"", 7, "text"):
        log.note("endpoint", "SCAN", 1.0, key=key)
    assert {each.key for each in log.latest()} == {""}


def test_nothing_is_slow_when_the_log_is_off() -> None:
    log = Time().log(0)
    assert log.limit_s == math.inf
    log.note("endpoint", "GET", 99.0, key=KEY)
    assert (log.latest(), log.total) == ([], 0)
    assert SlowLog().limit_s == math.inf


def test_some_notes_are_kept_and_all_are_counted_in_one_second() -> None:
    time = Time()
    log = time.log()
    for _ in range(PER_SECOND_MAX + 7):
        log.note("leader", "write", 1.0, operations=2)
    assert len(log.latest()) == PER_SECOND_MAX
    assert log.total == 2 * (PER_SECOND_MAX + 7)
    assert log.statistics() == {
        "slow_endpoint_total": 0,
        "slow_waiting_total": 0,
        "slow_link_total": 0,
        "slow_leader_total": 2 * (PER_SECOND_MAX + 7),
        "slow_left_out_total": 14,
    }
    time.now += 1
    log.note("link", "GET", 1.0)
    assert log.latest(1)[0].at == "link"


def test_ring_is_bounded_and_the_latest_come_first() -> None:
    time = Time()
    log = time.log()
    for number in range(KEPT + 5):
        time.now += 1
        log.note("endpoint", "GET", 1.0, key=b"%d" % (number % 2))
    assert len(log.latest()) == KEPT
    assert [each.date_ms for each in log.latest(2)] == [int(time.now * 1000), int(time.now * 1000) - 1000]
    assert {each.key for each in log.latest(key=hash_of(b"0"))} == {hash_of(b"0")}
