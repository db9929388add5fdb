"""Callers of a client that wait because too many operations are in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from math import inf

import pytest

from kvstore.client import AsyncClient
from kvstore.client.aio.engine import AsyncEngine
from kvstore.client.blocking.engine import BlockingEngine
from kvstore.client.core import operations
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.operation import IN_FLIGHT_MAX, ClientOperation, Numbering
from kvstore.env.library_env import library_env
from kvstore.errors import InvalidRequest, StoreError, Unavailable
from tests.client.model import ModelCluster
from tests.client.serving import serving
from tests.waiting import PATIENCE_S, wait_until_blocking


async def test_waiting_callers_are_not_woken_needlessly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the cost is quadratic in the number of callers, and their deadlines pass meanwhile."""
    count, tried = 5 * IN_FLIGHT_MAX, 0
    begin = Numbering.begin

    def counted(self: Numbering, operation: ClientOperation) -> bool:
        nonlocal tried
        tried += 1
        return begin(self, operation)

    async with serving(ModelCluster(1, 1)) as servers, AsyncClient(servers.patient_url) as client:
        monkeypatch.setattr(Numbering, "begin", counted)
        versions = await asyncio.gather(*(client.put(b"%d" % number, b"v") for number in range(count)))
        assert versions == sorted(versions), "in the order of coming"
        assert tried <= 3 * count
        assert client._engine is not None
        assert client._engine._waiting == {}


async def test_caller_that_stops_waiting_keeps_no_slot() -> None:
    engine = AsyncEngine(library_env("test"), ClientConfig(endpoints=("127.0.0.1:1",)))
    numbering = engine._numberings["p1"]
    in_flight = [operations.get(b"k") for _ in range(IN_FLIGHT_MAX)]
    assert all(map(numbering.begin, in_flight))

    def waits(timeout_s: float) -> asyncio.Future[None]:
        operation = operations.get(b"k")
        operation.deadline = engine.env.clock.now() + timeout_s
        return asyncio.ensure_future(engine._wait_admission(numbering, operation, timeout_s))

    late, first, second, third = (waits(timeout_s) for timeout_s in (0.0, *[PATIENCE_S] * 3))
    with pytest.raises(Unavailable, match="too many operations in flight"):
        await late
    second.cancel()  # while it waits
    numbering.end(in_flight.pop(0))
    engine._admit_waiting(numbering)
    first.cancel()  # when it has just begun
    await asyncio.wait_for(third, PATIENCE_S)
    assert first.cancelled()
    assert second.cancelled()
    assert not numbering.has_capacity()
    assert engine._waiting == {}
    await engine.close()


CALLERS = 50


class Threads:
    """Callers of a blocking client whose partition has no free slot, in order of arrival."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self.engine = BlockingEngine(library_env("test"), ClientConfig(endpoints=("127.0.0.1:1",)))
        self.engine._read_at = self.engine.env.clock.now() + PATIENCE_S  # prevents topology reads
        self.numbering = self.engine.seen.numberings["p1"]
        self.in_flight = [operations.get(b"k") for _ in range(IN_FLIGHT_MAX)]
        for each in self.in_flight:
            each.deadline = inf
        assert all(map(self.numbering.begin, self.in_flight))
        self.begun: list[ClientOperation] = []
        self.failures: list[StoreError] = []

    def come(self, timeout_s: float = PATIENCE_S) -> ClientOperation:
        operation = operations.get(b"k")
        operation.partition = "p1"
        waiting = len(self.engine._admission.waiting.get(self.numbering, ()))
        self._threads.submit(self._begin, operation, timeout_s)
        if timeout_s:
            wait_until_blocking(lambda: len(self.engine._admission.waiting[self.numbering]) > waiting)
        return operation

    def _begin(self, operation: ClientOperation, timeout_s: float) -> None:
        try:
            self.engine._begin(operation, timeout_s, may_wait=True)
        except StoreError as error:
            self.failures.append(error)
        else:
            self.begun.append(operation)

    def end_one(self) -> None:
        self.engine._admission.end([self.in_flight.pop()])


@contextmanager
def threads() -> Iterator[Threads]:
    with ThreadPoolExecutor(CALLERS) as pool:
        made = Threads(pool)
        with closing(made.engine):
            yield made


def test_waiting_threads_wake_one_by_one_in_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, tried = Numbering.begin, 0

    def counted(self: Numbering, operation: ClientOperation) -> bool:
        nonlocal tried
        tried += 1
        return begin(self, operation)

    with threads() as callers:
        waiting = [callers.come() for _ in range(CALLERS)]
        monkeypatch.setattr(Numbering, "begin", counted)
        while len(callers.begun) < 20:
            count = len(callers.begun)
            callers.end_one()
            wait_until_blocking(lambda count=count: len(callers.begun) > count)
        assert callers.begun == waiting[:20]
        assert tried <= 3 * 20


def test_waiting_threads_are_notified_when_the_client_closes() -> None:
    with threads() as callers:
        callers.come(10 * PATIENCE_S)
        callers.come(10 * PATIENCE_S)
    assert [type(each) for each in callers.failures] == [InvalidRequest] * 2


def test_thread_past_its_deadline_keeps_no_slot() -> None:
    with threads() as callers:
        callers.come(0.0)
        wait_until_blocking(lambda: callers.failures)
        assert isinstance(callers.failures[0], Unavailable)
        callers.engine._admission.end(callers.in_flight)
        assert callers.numbering._in_flight == {}
        assert callers.engine._admission.waiting == {}
