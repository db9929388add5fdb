"""The worker threads of blocking clients."""

from __future__ import annotations

import threading

import pytest

from kvstore.errors import Overloaded
from kvstore.rpc import workers
from kvstore.rpc.workers import Job, Late, Workers
from tests.client.interruptions import interruptions
from tests.waiting import PATIENCE_S, wait_until_blocking


def fails() -> None:
    raise StopIteration("of the job")


def test_caller_gets_the_result_or_the_error_of_its_job() -> None:
    assert workers.run(lambda: 42) == 42
    with pytest.raises(StopIteration, match="of the job"):
        workers.run(fails)


def test_caller_waits_no_longer_than_it_wants_to() -> None:
    ending = threading.Event()
    with pytest.raises(Late):
        workers.run(lambda: ending.wait(PATIENCE_S), 0.01)
    workers.run_within(lambda: ending.wait(PATIENCE_S), 0.01)
    ending.set()


def test_job_of_a_worker_runs_in_place() -> None:
    assert workers.run(lambda: workers.run(threading.get_ident) == threading.get_ident())
    assert not workers.is_worker()


def test_job_that_is_started_twice_runs_once() -> None:
    pool, runs = Workers(), list[int]()
    job, blocker = Job(lambda: runs.append(1)), threading.Event()
    pool.start(job)
    pool.start(job)
    job.wait(PATIENCE_S)
    pool.start(job)
    pool.start(Job(lambda: blocker.wait(PATIENCE_S)))
    last = Job(lambda: runs.append(2))
    pool.start(last)
    last.wait(PATIENCE_S)
    blocker.set()
    assert runs == [1, 2]


def test_workers_are_used_again_and_end_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Workers()
    for _ in range(50):
        job = Job(lambda: None)
        pool.start(job)
        job.wait(PATIENCE_S)
    assert len(pool.idents) == 1
    monkeypatch.setattr(workers, "IDLE_S", 0.01)
    pool.start(Job(lambda: None))
    wait_until_blocking(lambda: not pool.idents)


def test_job_beyond_the_limit_of_threads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "THREADS_MAX", 1)
    pool, ending = Workers(), threading.Event()
    pool.start(Job(lambda: ending.wait(PATIENCE_S)))
    wait_until_blocking(lambda: bool(pool.idents))
    with pytest.raises(Overloaded, match="at most 1 calls"):
        pool.start(Job(lambda: None))
    ending.set()


def test_interrupted_callers_leave_a_pool_that_works() -> None:
    for _ in interruptions(lambda: workers.run(lambda: None, PATIENCE_S)):
        assert workers.run(lambda: 42, PATIENCE_S) == 42
    assert len(workers.workers().idents) < 20
