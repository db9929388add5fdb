"""The cursor of a watch: its position, and its request to the next server."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.client.core.values import Item
from kvstore.client.core.watching import WatchCursor, WatchedKeys, is_final
from kvstore.errors import InvalidRequest, OutcomeUnknown, Overloaded, PositionTrimmed, Unavailable
from kvstore.proto import kv_pb2

EVERYTHING = WatchedKeys(b"", b"")


def positions(**at: int) -> kv_pb2.WatchResponse:
    return kv_pb2.WatchResponse(positions=at)


def changes(partition: str, sequence: int, *sequences: int) -> kv_pb2.WatchResponse:
    message = kv_pb2.WatchResponse(partition=partition, sequence=sequence)
    for each in sequences:
        record = kv_pb2.Record(value=b"v", version=each, created=1, written_ms=5)
        message.changes.append(kv_pb2.Change(key=b"k", record=record, sequence=each, time_ms=5))
    return message


def test_watch_from_now_sends_its_clients_progress_until_it_has_a_position() -> None:
    reading = WatchCursor(EVERYTHING, None, {"p1": 7})
    assert (dict(reading.request().after), dict(reading.request().seen)) == ({}, {"p1": 7})
    reading.take(positions(p1=9, p2=0))
    assert (dict(reading.request().after), dict(reading.request().seen)) == ({"p1": 9, "p2": 0}, {})


def test_position_is_behind_the_returned_changes_and_no_further() -> None:
    reading = WatchCursor(EVERYTHING, None, {})
    reading.take(positions(p1=0, p2=4))
    reading.take(changes("p1", 9, 3, 5))
    assert reading.position == {"p1": 0, "p2": 4}
    assert reading.give().version == 3
    assert reading.position == {"p1": 3, "p2": 4}
    assert dict(reading.request().after) == {"p1": 3, "p2": 4}, "what was not given out comes again"
    assert not reading.has_more
    reading.take(changes("p1", 9, 5))
    assert reading.give().version == 5
    assert reading.position == {"p1": 9, "p2": 4}, "all up to there has come"


def test_partition_that_is_no_longer_named_is_forgotten() -> None:
    reading = WatchCursor(EVERYTHING, {"p1": 1, "p2": 2}, {})
    reading.take(positions(p2=2))
    assert reading.position == {"p2": 2}


def test_change_is_returned_unchanged() -> None:
    reading = WatchCursor(EVERYTHING, {"p1": 0}, {})
    message = changes("p1", 4, 3)
    message.changes.append(kv_pb2.Change(key=b"k", sequence=4, time_ms=6, expired=True))
    part = kv_pb2.Change(key=b"k", sequence=5, time_ms=6, transaction="p2/7/1", transaction_keys=3)
    message.changes.append(part)
    reading.take(message)
    assert reading.give() == (b"k", Item(b"v", 3, 1, 5, 0), 3, 5, "p1", False, "", 0)
    assert reading.give() == (b"k", None, 4, 6, "p1", True, "", 0)
    assert reading.give() == (b"k", None, 5, 6, "p1", False, "p2/7/1", 3)


def test_watch_follows_one_key_or_a_range() -> None:
    assert WatchedKeys.of(b"k", b"", b"", b"", keys_only=False, heartbeat_s=1.0).key == b"k"
    assert WatchedKeys.of(None, b"k", b"", b"", keys_only=False, heartbeat_s=1.0)[:2] == (b"k", b"l")
    for key, prefix, start in ((b"k", b"p", b""), (b"k", b"", b"s"), (None, b"p", b"s"), (b"", b"", b"")):
        with pytest.raises(InvalidRequest):
            WatchedKeys.of(key, prefix, start, b"", keys_only=False, heartbeat_s=1.0)


@pytest.mark.parametrize("heartbeat_s", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_heartbeat_is_refused(heartbeat_s: float) -> None:
    with pytest.raises(InvalidRequest, match="expected heartbeat_s"):
        WatchedKeys.of(b"k", b"", b"", b"", keys_only=False, heartbeat_s=heartbeat_s)


@pytest.mark.parametrize("of", [("k", b""), (None, "k")])
def test_watch_of_a_value_that_is_not_bytes_is_refused(of: Any) -> None:
    with pytest.raises(InvalidRequest, match="as bytes, got str"):
        WatchedKeys.of(*of, b"", b"", keys_only=False, heartbeat_s=1.0)


def test_only_permanent_errors_end_a_watch() -> None:
    assert is_final(PositionTrimmed("p1", 1, 2))
    assert is_final(InvalidRequest("x"))
    assert not any(is_final(error) for error in (Unavailable("x"), Overloaded("x"), OutcomeUnknown("x")))


@pytest.mark.parametrize("wrong", [-1, 1 << 64, "7", 1.5, None, True])
def test_impossible_position_is_refused_before_a_server_is_asked(wrong: Any) -> None:
    """No server would get it: the watch would report at its deadline that nobody answers."""
    with pytest.raises(
        InvalidRequest, match=r"expected `after` as \{partition: sequence\} with sequences from 0 on, got 'p1'"
    ):
        WatchCursor(EVERYTHING, {"p1": wrong}, {})
