"""The worker threads of blocking clients."""

from __future__ import annotations

import gc
import threading
from contextvars import ContextVar
from typing import Any
from weakref import ref

import pytest

from kvstore.errors import Overloaded
from kvstore.rpc import workers
from kvstore.rpc.workers import Job, Late, Workers
from tests.client.interruptions import interruptions
from tests.waiting import PATIENCE_S, wait_until_blocking


def fails() -> None:
    raise StopIteration("of the job")


def test_caller_gets_result_or_error_of_its_job() -> None:
    assert workers.run(lambda: 42) == 42
    with pytest.raises(StopIteration, match="of the job"):
        workers.run(fails)


def test_job_runs_in_context_variables_of_its_caller() -> None:
    """Tracers of gRPC calls used to lose the caller's span."""
    span = ContextVar("span", default="none")
    span.set("of the caller")
    assert workers.run(span.get) == "of the caller"


def test_job_error_keeps_no_values_alive() -> None:
    """The job, its error, the traceback and the caller's values used to be kept until a garbage collection."""
    seen = list[ref[threading.Event]]()

    def refuses() -> None:
        value = threading.Event()
        seen.append(ref(value))
        raise ValueError("refused")

    gc.disable()
    try:
        with pytest.raises(ValueError, match="refused"):
            workers.run(refuses)
        wait_until_blocking(lambda: seen[0]() is None)
    finally:
        gc.enable()


def test_job_runs_in_place_when_interpreter_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on no thread starts in an atexit handler, which could therefore write nothing."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    pool, job = Workers(), Job(threading.get_ident)
    pool.start(job)
    assert job.wait(0.0) == threading.get_ident()


def test_caller_waits_only_for_its_timeout() -> None:
    ending = threading.Event()
    with pytest.raises(Late):
        workers.run(lambda: ending.wait(PATIENCE_S), 0.01)
    workers.run_within(lambda: ending.wait(PATIENCE_S), 0.01)
    ending.set()


def test_job_of_a_worker_runs_in_place() -> None:
    assert workers.run(lambda: workers.run(threading.get_ident) == threading.get_ident())
    assert not workers.is_worker()


def test_job_started_twice_runs_once() -> None:
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


def test_workers_are_reused_and_end_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Workers()
    for _ in range(50):
        job = Job(lambda: None)
        pool.start(job)
        job.wait(PATIENCE_S)
    assert len(pool.idents) == 1
    monkeypatch.setattr(workers, "IDLE_S", 0.01)
    pool.start(Job(lambda: None))
    wait_until_blocking(lambda: not pool.idents)


def test_job_beyond_thread_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "THREADS_MAX", 1)
    pool, ending = Workers(), threading.Event()
    pool.start(Job(lambda: ending.wait(PATIENCE_S)))
    wait_until_blocking(lambda: bool(pool.idents))
    with pytest.raises(Overloaded, match="at most 1 concurrent calls"):
        pool.start(Job(lambda: None))
    ending.set()


def test_interrupted_callers_leave_a_working_pool() -> None:
    for _ in interruptions(lambda: workers.run(lambda: None, PATIENCE_S)):
        assert workers.run(lambda: 42, PATIENCE_S) == 42
    assert len(workers.workers().idents) < 20
