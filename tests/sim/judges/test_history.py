"""A history records operations and answers as they happened, and survives a round trip through a file."""

from math import inf
from pathlib import Path

import pytest

from tests.sim.judges.history import History, Kind, Operation, Result


def recorded() -> History:
    clock = iter(range(100))
    history = History(lambda: float(next(clock)))
    history.begin("p1", Kind.PUT, b"k\xff\n", b"\0a", node="n1").ok(version=7)
    history.begin("p1", Kind.GET, b"k").ok(b"value", version=7)
    history.begin("p2", Kind.INCR, b"c", delta=2).ok(2, version=8)
    history.begin("p1", Kind.CAS, b"k", b"new", expected=None).fail(condition_failed=True, version=7)
    history.begin("p1", Kind.PUT, b"k", b"x").fail()
    history.begin("p2", Kind.DEL, b"k").info()
    history.begin("p3", Kind.GET, b"k").ok(None)
    return history


def test_operations_are_kept_with_times_and_answers() -> None:
    first, second, third, *_, unknown, last = recorded()
    assert first == Operation(
        process="p1",
        kind=Kind.PUT,
        key=b"k\xff\n",
        value=b"\0a",
        began=0,
        ended=1,
        result=Result.OK,
        version=7,
        node="n1",
    )
    assert (second.value, second.began, second.ended) == (b"value", 2, 3)
    assert (third.value, third.delta, third.version) == (2, 2, 8)
    assert (unknown.result, unknown.ended) == (Result.INFO, inf)
    assert last.value is None
    assert recorded().counts() == {Result.OK: 4, Result.FAIL: 2, Result.INFO: 1}
    assert list(recorded().by_key()) == [b"k\xff\n", b"k", b"c"]


def test_history_survives_file_round_trip(tmp_path: Path) -> None:
    history = recorded()
    history.dump(tmp_path / "history.jsonl")
    assert History.load(tmp_path / "history.jsonl").operations == history.operations
    assert len(History.load(tmp_path / "history.jsonl", tmp_path / "history.jsonl")) == 14


def test_process_runs_one_operation_at_a_time_and_none_after_unknown_one() -> None:
    history = History()
    first = history.begin("p", Kind.GET, b"k")
    with pytest.raises(ValueError, match="before the outcome of its last operation"):
        history.begin("p", Kind.GET, b"k")
    first.ok()
    history.begin("p", Kind.PUT, b"k", b"v").info()
    with pytest.raises(ValueError, match="before the outcome of its last operation"):
        history.begin("p", Kind.GET, b"k")


def test_operation_ends_once() -> None:
    pending = History().begin("p", Kind.GET, b"k")
    pending.ok()
    with pytest.raises(AssertionError, match="ended twice"):
        pending.info()


def test_unanswered_operation_has_unknown_outcome() -> None:
    history = History()
    history.begin("p", Kind.PUT, b"k", b"v")
    history.close()
    history.close()
    assert [o.result for o in history] == [Result.INFO]


def test_invalid_operations_are_refused() -> None:
    with pytest.raises(ValueError, match="expected an end after the beginning"):
        Operation(process="p", kind=Kind.GET, key=b"k", began=2, ended=1, result=Result.OK)
    with pytest.raises(ValueError, match="exactly if the outcome is known"):
        Operation(process="p", kind=Kind.GET, key=b"k", began=1, ended=2, result=Result.INFO)
    with pytest.raises(ValueError, match="exactly if the outcome is known"):
        Operation(process="p", kind=Kind.GET, key=b"k", began=1, result=Result.OK)


def test_idle_run_proves_nothing() -> None:
    history = recorded()
    history.require(4)
    history.require(2, until=4)
    with pytest.raises(AssertionError, match="only 4 operations succeeded"):
        history.require(5)
    with pytest.raises(AssertionError, match="only 1 operations succeeded between 6"):
        history.require(2, since=6)
