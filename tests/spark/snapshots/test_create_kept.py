"""A snapshot's pin is renewed while its job runs, and a job whose pin has expired is ended."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from kvstore.client.core.config import ClientConfig
from kvstore.errors import InvalidRequest, NoSuchPin, PositionTrimmed, Unavailable
from kvstore.spark.snapshots import create, planning
from kvstore.spark.snapshots.directory import DirectoryStore
from kvstore.spark.snapshots.manifest import SnapshotKind
from kvstore.spark.snapshots.planning import SnapshotRequest
from kvstore.spark.snapshots.runners import SparkRunner
from kvstore.spark.snapshots.work import Work
from tests.spark.snapshots.made import manifest_of, places_of
from tests.spark.snapshots.test_work import PLAN

PIN_TTL_S = 0.4
WAIT_S = 30


class Servers:
    """Renewals, each with the next answer; the last answer is repeated."""

    def __init__(self, *answers: Exception | None) -> None:
        self._answers = list(answers)
        self.renewed = threading.Semaphore(0)
        self.held: list[dict[str, int]] = []
        self.given_back: set[str] = set()
        self.cancelled = threading.Event()
        self.session: Any = SimpleNamespace(sparkContext=SimpleNamespace(cancelJobGroup=self._cancel))
        self.group = ""

    def renew_pin(self, cluster: ClientConfig, id: str, *, ttl_s: float, partitions: list[str], identity: str) -> int:
        assert identity == "c"
        assert (id, ttl_s, partitions[:2]) == (PLAN.pin, PIN_TTL_S, ["p1", "p2"]), "where it was lost too"
        self.renewed.release()
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer is not None:
            raise answer
        return 0

    def _cancel(self, group: str) -> None:
        self.group = group
        self.cancelled.set()

    # the feed, for an incremental

    def __call__(self, cluster: ClientConfig, identity: str = "") -> Servers:
        return self

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def hold(self, name: str, positions: dict[str, int], ttl_s: float, *, timeout_s: float | None = None) -> None:
        assert name == "snapshot-s1"
        if ttl_s:
            assert ttl_s == PIN_TTL_S
            self.held.append(positions)
        else:
            self.given_back.update(positions)

    def unpin(self, cluster: ClientConfig, id: str, *, timeout_s: float) -> list[str]:
        self.given_back.add(id)
        return []


CHECK_S = 0.01


def servers(monkeypatch: pytest.MonkeyPatch, *answers: Exception | None) -> Servers:
    found = Servers(*answers)
    monkeypatch.setattr(create, "renew_pin", found.renew_pin)
    monkeypatch.setattr(create, "FeedReader", found)
    monkeypatch.setattr(planning, "FeedReader", found)
    monkeypatch.setattr(planning, "unpin", found.unpin)
    return found


def wanted(**more: Any) -> SnapshotRequest:
    return SnapshotRequest(cluster=ClientConfig(endpoints=("127.0.0.1:1",)), instance="c", pin_ttl_s=PIN_TTL_S, **more)


@pytest.mark.parametrize("fails", [Unavailable("away"), FileNotFoundError("tls.crt")])
def test_pin_is_renewed_repeatedly_even_after_a_failure(monkeypatch: pytest.MonkeyPatch, fails: Exception) -> None:
    found = servers(monkeypatch, None, fails, None)
    with create.kept(wanted(), PLAN, SparkRunner(found.session), lambda: None, CHECK_S):
        for _ in range(4):
            assert found.renewed.acquire(timeout=WAIT_S)
    assert not found.cancelled.is_set()
    assert found.held == []


def test_incremental_holds_the_logs_from_its_parent_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of a partition that joined since is held from its beginning; that of one that left cannot be held."""
    found = servers(monkeypatch, None)
    places = tuple(replace(each, sequence=7) for each in places_of([]))
    joined, left = replace(places[0], partition="p3"), replace(places[0], partition="p4", ledger=-1)
    plan = replace(PLAN, partitions=(*places, joined, left))
    parent = manifest_of("s0", None, (*places, replace(left, ledger=2)))
    with create.kept(wanted(parent=parent), plan, SparkRunner(found.session), lambda: None, CHECK_S):
        for _ in range(2):
            assert found.renewed.acquire(timeout=WAIT_S)
    assert found.held[0] == {"p1": 7, "p2": 7, "p3": 0}


def test_incremental_whose_parent_is_removed_meanwhile_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found, store = servers(monkeypatch, None), DirectoryStore(tmp_path)
    plan = replace(PLAN, kind=SnapshotKind.INCREMENTAL, parent="s0", pieces=())
    found.session.sparkContext.defaultParallelism = 1
    with pytest.raises(
        InvalidRequest, match="snapshot s0 was removed meanwhile, but s1 continues it; take a full snapshot"
    ):
        create._finished(store, Work.begin(store, plan), plan, wanted(), SparkRunner(found.session), lambda *_: None)
    assert os.listdir(tmp_path) == [".lock"]
    assert found.given_back == {"snapshot-s1", "p1", "p2"}, "the logs of both partitions too"


def test_expired_pin_ends_the_job_and_is_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found = servers(monkeypatch, NoSuchPin("gone"))

    def job() -> None:
        with create.kept(wanted(), PLAN, SparkRunner(found.session), lambda: None, CHECK_S):
            assert found.cancelled.wait(WAIT_S)
            raise Unavailable("the Spark job failed: cancelled")

    with pytest.raises(NoSuchPin, match="gone"):
        job()
    assert found.group == "kvstore snapshot s1"


@pytest.mark.parametrize("fails", [False, True])
def test_logs_are_held_for_the_next_snapshot_before_the_pin_is_released(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool
) -> None:
    """Only the pin kept the log of a partition that left meanwhile."""
    events: list[str] = []
    nothing: Any = None

    def hold(_: object) -> None:
        events.append("held")
        if fails:
            raise Unavailable("away")

    monkeypatch.setattr(create, "resumed_or_none", lambda *_: (nothing, PLAN))
    monkeypatch.setattr(create, "_finished", lambda *_: manifest_of("s1", None, places_of([])))
    monkeypatch.setattr(create, "_release_pin", lambda *_: events.append("released"))
    with pytest.raises(Unavailable) if fails else nullcontext():
        create.create(DirectoryStore(tmp_path), wanted(), Mock(), lambda *_: None, hold)
    assert events == ["held", "released"]


def test_abandoned_work_is_resumed_only_while_its_logs_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    found = servers(monkeypatch, None)
    parent = manifest_of("s0", None, places_of([]))
    assert create._renewed(PLAN, wanted(parent=parent))
    assert found.held == [{"p1": 0, "p2": 0}]

    def gone(*_: object, **__: object) -> None:
        raise PositionTrimmed("p1", 0, 7)

    monkeypatch.setattr(found, "hold", gone)
    assert not create._renewed(PLAN, wanted(parent=parent))


@pytest.mark.parametrize("fails", [OSError(errno.ESTALE, "stale file handle"), Unavailable("s3://x: Timeout")])
def test_directory_that_cannot_be_listed_ends_no_renewal(monkeypatch: pytest.MonkeyPatch, fails: Exception) -> None:
    """A shared file system can be slow for a moment, and so can an object store; the pin expired while the job ran."""

    def check() -> None:
        raise fails

    found = servers(monkeypatch, None)
    with create.kept(wanted(), PLAN, SparkRunner(found.session), check, CHECK_S):
        for _ in range(2):
            assert found.renewed.acquire(timeout=WAIT_S)
