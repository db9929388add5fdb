"""Callers that share a link to one server, when one of them closes it or is interrupted by Ctrl-C or a timeout of
gevent."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvstore.client.blocking import link as blocking_link
from kvstore.client.blocking.engine import BlockingEngine
from kvstore.client.blocking.link import BlockingLink, CallWaiter
from kvstore.client.core import operations
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.operation import ClientOperation, Numbering
from kvstore.client.core.routing import Routing
from kvstore.env.clock import SystemClock
from kvstore.env.library_env import library_env
from kvstore.errors import InvalidRequest, OutcomeUnknown, Unavailable
from kvstore.limits import CLIENT_BYTES
from kvstore.proto import kv_pb2
from tests.waiting import PATIENCE_S

NOBODY = "127.0.0.1:1"
Execute = Callable[[kv_pb2.Frame], kv_pb2.Answers]


class Stub:
    """A server that the test scripts; by default it finds no key."""

    def __init__(self, *calls: Execute) -> None:
        self._calls = list(calls)

    def Execute(self, frame: kv_pb2.Frame, timeout: float) -> kv_pb2.Answers:
        return self._calls.pop(0)(frame) if self._calls else answers(frame)


def answers(frame: kv_pb2.Frame) -> kv_pb2.Answers:
    return kv_pb2.Answers(absent=[lane.first + at for lane in frame.lanes for at in range(len(lane.keys))])


def interrupted(frame: kv_pb2.Frame) -> kv_pb2.Answers:
    raise KeyboardInterrupt


def link_to(stub: Any) -> BlockingLink:
    link = BlockingLink(NOBODY, SystemClock(), PATIENCE_S, Routing(), {}, threading.Lock(), None)
    link._stub = stub
    return link


def read() -> ClientOperation:
    operation = operations.get(b"k")
    operation.partition = "p1"
    operation.deadline = SystemClock().now() + PATIENCE_S
    Numbering(b"c" * CLIENT_BYTES).begin(operation)
    return operation


def test_closed_link_returns_no_topology() -> None:
    link = BlockingLink(NOBODY, SystemClock(), PATIENCE_S, Routing(), {}, threading.Lock(), None)
    link.close()
    with pytest.raises(Unavailable):
        link.topology(PATIENCE_S)


def test_write_with_an_unreadable_answer_may_have_been_done() -> None:
    def uneven(frame: kv_pb2.Frame) -> kv_pb2.Answers:
        return kv_pb2.Answers(numbers=[frame.lanes[0].first])

    link, write = link_to(Stub(uneven)), operations.put(b"k", b"v")
    write.partition, write.deadline = "p1", SystemClock().now() + PATIENCE_S
    Numbering(b"c" * CLIENT_BYTES).begin(write)
    answer, _ = link.run(write)
    assert isinstance(answer, OutcomeUnknown)
    assert link.is_broken


def test_other_callers_send_after_the_sender_was_interrupted() -> None:
    link = link_to(Stub(interrupted))
    with pytest.raises(KeyboardInterrupt):
        link.run(read())
    answer, _ = link.run(read())
    assert answer is None


def test_caller_behind_an_interrupted_sender_may_retry() -> None:
    def both_wait(frame: kv_pb2.Frame) -> kv_pb2.Answers:
        """The frame of the first caller; the two others queue meanwhile."""
        sends.set()
        for _ in range(3):
            assert queued.acquire(timeout=PATIENCE_S)
        return answers(frame)

    class Queue(deque[ClientOperation]):
        def append(self, operation: ClientOperation) -> None:
            super().append(operation)
            queued.release()

    queued, sends = threading.Semaphore(0), threading.Event()
    link = link_to(Stub(both_wait, interrupted))
    link._pending = Queue()
    with ThreadPoolExecutor(3) as threads:
        told = [threads.submit(link.run, read())]
        assert sends.wait(PATIENCE_S), "or its frame would have another caller's operation, too"
        told += [threads.submit(link.run, read()) for _ in range(2)]
        errors = [each.exception(PATIENCE_S) for each in told]
        found = [each.result()[0] for each in told if each.exception() is None]
    assert [type(each) for each in errors if each] == [KeyboardInterrupt]
    assert [str(each) for each in found if each is not None] == ["its sender was interrupted"]


# docs/protocol.md M16
def test_frame_names_the_ring_that_is_known_when_it_is_sent() -> None:
    """Its sender may have queued before the ring changed, and other callers after that: a follower that has the old
    ring would answer their session reads by the token of another partition."""
    engine = BlockingEngine(library_env("test"), ClientConfig(endpoints=(NOBODY,)))
    engine.routing.answered.add(NOBODY)
    engine.routing.ring_version = 1
    versions = list[int]()

    class Queue(deque[ClientOperation]):
        def append(self, operation: ClientOperation) -> None:
            super().append(operation)
            queued.release()

    def ring_changes(frame: kv_pb2.Frame) -> kv_pb2.Answers:
        """The frame of the first caller. The second queues before the ring changes, the third after it."""
        threads.submit(engine._attempt, read())
        assert queued.acquire(timeout=PATIENCE_S)
        engine.routing.ring_version = 3
        threads.submit(engine._attempt, read())
        assert queued.acquire(timeout=PATIENCE_S)
        return noted(frame)

    def noted(frame: kv_pb2.Frame) -> kv_pb2.Answers:
        versions.append(frame.ring_version)
        return answers(frame)

    link, queued = engine._open(NOBODY), threading.Semaphore(0)
    assert link is not None
    link._stub = Stub(ring_changes, noted)
    with ThreadPoolExecutor(3) as threads:
        first = read()
        link._pending = Queue()
        told = threads.submit(engine._attempt, first)
        assert queued.acquire(timeout=PATIENCE_S)
        assert told.result(PATIENCE_S) is None
    assert versions == [1, 3]
    engine.close()


def test_impossible_frame_blocks_no_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("a fault of ours")

    link = link_to(Stub())
    with monkeypatch.context() as patch:
        patch.setattr(blocking_link, "frame_of", fail)
        other = read()
        other.waiter = CallWaiter()
        link._pending.append(other)
        with pytest.raises(TypeError):
            link.run(read())
    assert str(other.waiter.answer) == "its sender was interrupted; nothing was sent"
    assert link.run(read())[0] is None


def test_begun_operations_end_when_the_next_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the numbering would count it as in flight forever, and be full after some time."""
    engine = BlockingEngine(library_env("test"), ClientConfig(endpoints=(NOBODY,)))
    engine._read_at = float("inf")
    wanted = [operations.put(b"k", b"v") for _ in range(3)]
    for each in wanted:
        each.partition = "p1"
    original = engine._begin

    def fails_at_the_second(operation: ClientOperation, timeout_s: float, *, may_wait: bool) -> bool:
        if operation is wanted[1]:
            raise InvalidRequest("the client is closed")
        return original(operation, timeout_s, may_wait=may_wait)

    monkeypatch.setattr(engine, "_begin", fails_at_the_second)
    with pytest.raises(InvalidRequest):
        engine.run_all(wanted, PATIENCE_S)
    assert engine.seen.numberings["p1"].first_unacknowledged == 2
    engine.close()


def test_baton_is_not_passed_to_an_interrupted_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted(CallWaiter):
        def wait(self, timeout_s: float) -> bool:
            raise KeyboardInterrupt

    def another_comes(frame: kv_pb2.Frame) -> kv_pb2.Answers:
        monkeypatch.setattr(blocking_link, "CallWaiter", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            link.run(read())
        monkeypatch.undo()
        return answers(frame)

    link = link_to(Stub(another_comes))
    for _ in range(2):
        answer, _ = link.run(read())
        assert answer is None
