"""The choice of the runner of a snapshot by the servers' answers; and the end of a runner without progress."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest

from kvstore.errors import PermissionDenied, Unavailable
from kvstore.spark.snapshots import runners
from kvstore.spark.snapshots.runners import SMALL_ROWS, SparkRunner, is_small
from tests.waiting import PATIENCE_S


class Said:
    """Servers whose partition has so many changes and so many keys; None: the user may not read them."""

    def __init__(self, changes: int | None, keys: int | None) -> None:
        self._changes, self._keys = changes, keys

    def __enter__(self) -> Said:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def positions(self) -> list[Any]:
        if self._changes is None:
            raise PermissionDenied("user anna lacks the right watch")
        return [SimpleNamespace(partition="p1", latest=self._changes)]

    def count(self) -> int:
        if self._keys is None:
            raise PermissionDenied("user nightly lacks the right read")
        return self._keys


@pytest.mark.parametrize(
    ("changes", "keys", "small"),
    [
        (None, None, True),
        (SMALL_ROWS, None, True),
        (SMALL_ROWS + 1, SMALL_ROWS, True),
        (SMALL_ROWS + 1, SMALL_ROWS + 1, False),
        (SMALL_ROWS + 1, None, False),
    ],
)
def test_full_snapshot_is_small_by_its_changes_or_else_by_its_keys(
    changes: int | None, keys: int | None, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FeedReader", "Client"):
        monkeypatch.setattr(runners, name, lambda *_: Said(changes, keys))
    wanted: Any = SimpleNamespace(cluster="kv://127.0.0.1:1", instance="c", parent=None, where=Path())
    assert is_small(wanted) is small


class Starving:
    """A Spark in which no task runs after `tasks` polls; its job ends when it is cancelled."""

    def __init__(self, tasks: int) -> None:
        self._tasks = tasks
        self.polls = 0
        self.cancelled = threading.Event()
        self.defaultParallelism = 2

    @property
    def session(self) -> Any:
        return SimpleNamespace(sparkContext=self)

    def setJobGroup(self, *_: Any, **__: Any) -> None:
        """It has one job."""

    def cancelJobGroup(self, _: str) -> None:
        self.cancelled.set()

    def statusTracker(self) -> Starving:
        return self

    def getActiveStageIds(self) -> list[int]:
        return [1]

    def getStageInfo(self, _: int) -> Any:
        self.polls += 1
        return SimpleNamespace(numActiveTasks=int(self.polls <= self._tasks))

    def parallelize(self, *_: Any) -> Starving:
        return self

    def map(self, _: Any) -> Starving:
        return self

    def collect(self) -> None:
        assert self.cancelled.wait(PATIENCE_S)
        raise RuntimeError("Job 0 cancelled part of cancelled job group")

    def foreach(self, _: Any) -> None:
        self.collect()


@pytest.mark.parametrize("does", ["wake", "run"])
def test_job_that_loses_all_executors_fails(does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pin was renewed for as long as Spark waited, which was without limit."""
    monkeypatch.setattr(runners, "POLL_S", 0.01)
    monkeypatch.setattr(runners, "STARVED_S", 0.3)
    spark = Starving(tasks=50)
    runner = SparkRunner(spark.session)
    job: Any = None
    with pytest.raises(Unavailable, match="Spark gave the job no executor for"):
        _ = runner.wake() if does == "wake" else runner.run(job, [job], "g")  # type: ignore[func-returns-value]
    assert spark.polls > 50, "as long as tasks run nobody is impatient"
