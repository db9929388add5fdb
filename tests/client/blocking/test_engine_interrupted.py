"""Blocking clients whose callers are interrupted by an exception of a signal handler at each step of a call: the client
must serve all threads again at once. Also calls that hang in gRPC: another connection replaces theirs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from typing import Any

import pytest

from kvstore.client import Batch, Client, ClientConfig
from kvstore.client.blocking import engine as engine_module
from kvstore.client.blocking import link as link_module
from kvstore.client.blocking.engine import BlockingEngine
from kvstore.client.blocking.link import BlockingLink
from kvstore.client.coordination.blocking import Queue, Session
from kvstore.client.coordination.steps import WriteStep
from kvstore.client.core import operation as operation_module
from kvstore.client.core import operations
from kvstore.client.core.operation import IN_FLIGHT_MAX, OVERDUE_S, ClientOperation, Numbering
from kvstore.env.clock import SystemClock
from kvstore.env.library_env import library_env
from kvstore.errors import OutcomeUnknown, StoreError, Unavailable
from kvstore.limits import CLIENT_BYTES
from kvstore.proto import kv_pb2
from kvstore.rpc import workers
from tests.beside import beside, in_time
from tests.client.blocking.test_link import NOBODY, answers, link_to, read
from tests.client.interruptions import Struck, interruptions
from tests.client.model import ModelCluster
from tests.client.serving import Servers, serving_in_a_thread
from tests.waiting import PATIENCE_S, wait_until_blocking


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with serving_in_a_thread(ModelCluster()) as running:
        yield running


@pytest.fixture
def client(servers: Servers) -> Iterator[Client]:
    with Client(servers.patient_url) as opened:
        yield opened


CALLS: dict[str, Callable[[Client], object]] = {
    "get": lambda client: client.get(b"k"),
    "put": lambda client: client.put(b"k", b"v", ttl_s=60),
    "get_many": lambda client: client.get_many([b"%d" % number for number in range(9)]),
    "put_many": lambda client: client.put_many({b"%d" % number: b"v" for number in range(9)}),
    "scan": lambda client: list(client.scan()),
    "count": lambda client: client.count(),
    "batch": lambda client: client.batch(Batch().put(b"{t}a", b"v").increment(b"{t}n")),
    "token": lambda client: client.absorb(client.token),
    "statistics": lambda client: client.statistics(),
}


@pytest.mark.parametrize("call", CALLS)
def test_client_serves_all_threads_wherever_a_call_is_interrupted(client: Client, call: str) -> None:
    for _ in interruptions(lambda: CALLS[call](client)):
        client.get(b"k")
        assert in_time(lambda: client.put(b"other", b"v"))
    _assert_nothing_is_held(client)


def _assert_nothing_is_held(client: Client) -> None:
    engine = client._engine
    assert engine is not None
    wait_until_blocking(lambda: not any(each._in_flight or each._size for each in engine.seen.numberings.values()))
    wait_until_blocking(lambda: not any(link.is_busy or link._pending for link in engine._links.values()))
    assert not engine._admission.waiting
    assert engine._reader is None


def test_interrupted_opening_and_closing_affect_no_other_client(servers: Servers, client: Client) -> None:
    def open_and_close() -> None:
        with Client(servers.patient_url) as another:
            another.get(b"k")

    for _ in interruptions(open_and_close):
        assert in_time(lambda: client.put(b"k", b"v"))


def test_session_works_wherever_a_call_is_interrupted(client: Client) -> None:
    with Session(client, b"t") as session:
        for _ in interruptions(lambda: session.put(b"name", b"v", timeout_s=PATIENCE_S)):
            with suppress(StoreError):  # the key of an interrupted call is deleted meanwhile
                in_time(lambda: session.delete(b"name", timeout_s=PATIENCE_S))
            assert session.is_alive


def test_session_whose_opening_is_interrupted_is_closed(client: Client) -> None:
    sessions: list[Session] = []

    def open_another() -> None:
        sessions.append(Session(client, b"t"))
        sessions[-1].open()

    for _ in interruptions(open_another):
        """Each step."""
    *interrupted, last = sessions
    assert last.is_alive
    last.close()
    wait_until_blocking(lambda: not any(each.is_alive for each in interrupted))
    wait_until_blocking(lambda: "kvstore session" not in [thread.name for thread in threading.enumerate()])


# docs/protocol.md Q6
@pytest.mark.parametrize("is_answered", [False, True])
def test_session_keeps_no_claim_of_interrupted_caller(
    client: Client, monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    """The session renewed the claim for as long as it lived, and nobody worked on the item."""
    jobs: list[workers.Job[Any]] = []
    is_sent, has_left = threading.Event(), threading.Event()
    with Session(client, b"claims") as session:
        queue, run_step, batch = Queue(session, b"q"), session._run_step, client.batch
        queue.put(b"item")

        def answered_late(*given: Any, **options: Any) -> Any:
            results = batch(*given, **options)
            is_sent.set()
            assert is_answered or has_left.wait(PATIENCE_S)
            return results

        def struck_while_it_claims(step: Any) -> Any:
            if not isinstance(step, partial) or not isinstance(step.args[0], WriteStep):
                return run_step(step)
            monkeypatch.setattr(client, "batch", answered_late)
            jobs.append(workers.Job(step))
            workers.start(jobs[0])
            assert jobs[0].join(PATIENCE_S) if is_answered else is_sent.wait(PATIENCE_S)
            raise Struck

        monkeypatch.setattr(session, "_run_step", struck_while_it_claims)
        with pytest.raises(Struck):
            queue.take()
        has_left.set()
        assert jobs[0].join(PATIENCE_S)
        assert session.lease.keys == {}


# ── a call that gRPC does not return ──


class Hanging:
    """A server whose first call never ends, not even after its time."""

    def __init__(self) -> None:
        self.hangs, self.released = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def Execute(self, frame: kv_pb2.Frame, timeout: float) -> kv_pb2.Answers:
        if self._lock.acquire(blocking=False):
            self.hangs.set()
            self.released.wait()
        return answers(frame)


def test_callers_break_a_link_whose_sender_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "HANGS_S", 0.05)
    monkeypatch.setattr(link_module, "GRACE_S", 0.05)
    server = Hanging()
    link = link_to(server)
    link._attempt_s = 0.05
    with ThreadPoolExecutor(3) as threads:
        sender = threads.submit(link.run, read())
        assert server.hangs.wait(PATIENCE_S)
        others = [threads.submit(link.run, read()) for _ in range(2)]
        told = [each.result(PATIENCE_S)[0] for each in others]
        assert [type(each) for each in told] == [Unavailable] * 2, "long before their deadline"
        assert link.is_broken
        server.released.set()
        assert sender.result(PATIENCE_S)[0] is None


def test_client_replaces_a_link_whose_sender_hangs(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = client._engine
    assert engine is not None
    client.get(b"k")
    for module, name, value in ((link_module, "HANGS_S", 0.05), (engine_module, "LATE_S", 0.5)):
        monkeypatch.setattr(module, name, value)
    server = Hanging()
    before = dict(engine._links)
    for link in before.values():
        link._attempt_s = 0.05
        link._stub = server  # type: ignore[assignment]

    def hang() -> None:
        with pytest.raises(StoreError):
            client.get(b"k", timeout_s=0.1)

    try:
        with beside(lambda _: hang()):  # its caller uses our clock, not gRPC's
            assert server.hangs.wait(PATIENCE_S)
            in_time(lambda: client.get(b"k"))
            assert client.statistics()["link_breaks"] >= 1
    finally:
        server.released.set()


def test_topology_is_read_again_when_its_reader_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, released = list[BlockingLink](), threading.Event()

    def hang(link: BlockingLink, timeout_s: float) -> kv_pb2.TopologyResponse:
        asked.append(link)
        released.wait()
        raise Unavailable("released")

    monkeypatch.setattr(BlockingLink, "topology", hang)
    monkeypatch.setattr(engine_module, "LATE_S", 0.05)
    engine = BlockingEngine(library_env("test"), ClientConfig(endpoints=(NOBODY,), connect_timeout_s=0.05))
    engine._links[NOBODY] = first = link_to(None)
    engine.routing._ranges = [0], ["p1"]  # a topology is known
    with closing(engine), beside(lambda _: engine._read_topology()):
        try:
            wait_until_blocking(lambda: asked == [first] and engine._reader is not None and engine._reader[1] is first)
            assert engine._read_topology(0.0) is None, "another caller reads it"
            wait_until_blocking(lambda: engine._reader is not None and SystemClock().now() > engine._reader[0])
            engine._read_topology(0.0)
            assert first.is_broken
        finally:
            released.set()


def test_operations_of_a_hung_worker_free_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_module, "OVERDUE_S", 0.0)
    engine = BlockingEngine(library_env("test"), ClientConfig(endpoints=(NOBODY,)))
    engine._read_at = float("inf")
    hung = [operations.put(b"k", b"v") for _ in range(IN_FLIGHT_MAX)]
    wanted = operations.put(b"k", b"v")
    for each in (*hung, wanted):
        each.partition = "p1"
    for each in hung:
        engine._begin(each, 0.0, may_wait=False)
    assert engine._begin(wanted, PATIENCE_S, may_wait=False)
    engine._admission.end([hung[0]])
    assert engine.seen.numberings["p1"].first_unacknowledged == wanted.sequence
    engine.close()


def test_write_of_a_stalled_worker_is_not_reported_as_not_done(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller got Unavailable, and the worker sent the write after that."""
    engine, released = client._engine, threading.Event()
    assert engine is not None
    choose = engine._choose

    def choose_late(operation: ClientOperation) -> BlockingLink | None:
        released.wait(PATIENCE_S)
        return choose(operation)

    monkeypatch.setattr(engine_module, "LATE_S", 0.05)
    monkeypatch.setattr(engine, "_choose", choose_late)
    with pytest.raises(OutcomeUnknown, match="may still be carried out"):
        client.put(b"late", b"v", timeout_s=0.05)
    with pytest.raises(Unavailable):
        client.get(b"late", timeout_s=0.05)
    released.set()


def test_session_does_not_outwait_its_call_for_a_stalled_worker(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps made their calls in a worker, where nothing bounded them."""
    engine, released = client._engine, threading.Event()
    assert engine is not None
    with Session(client, b"still") as session:
        choose = engine._choose

        def choose_late(operation: ClientOperation) -> BlockingLink | None:
            released.wait()
            return choose(operation)

        monkeypatch.setattr(engine_module, "LATE_S", 0.05)
        monkeypatch.setattr(engine, "_choose", choose_late)

        def put() -> StoreError:
            with pytest.raises(StoreError) as error:
                session.put(b"k", b"v", timeout_s=0.1)
            return error.value

        try:
            assert isinstance(in_time(put), StoreError)
        finally:
            released.set()


def test_overdue_operation_with_another_id_holds_no_slot() -> None:
    """The id stayed open forever, and after 1,024 further writes the partition had no free slot."""
    numbering, overdue = Numbering(b"c" * CLIENT_BYTES), operations.put(b"k", b"v")
    numbering.begin(overdue)
    assert numbering.end_overdue(OVERDUE_S + 1)
    numbering.renumber(overdue)
    numbering.end(overdue)
    for _ in range(2 * IN_FLIGHT_MAX):
        later = operations.put(b"k", b"v")
        assert numbering.begin(later)
        numbering.end(later)


# ── real signals ──

STORM = """
import os, random, signal, sys, threading
from kvstore.client import Client
from kvstore.errors import StoreError

class SoftTimeLimit(Exception):
    pass

def strike(*_):
    raise SoftTimeLimit

signal.signal(signal.SIGALRM, strike)
client = Client(sys.argv[1]).__enter__()
client.put(b"k", b"v")
done, progress = [0] * 4, [threading.Event() for _ in range(4)]

def work(number):
    while True:
        client.get(b"k")
        done[number] += 1
        progress[number].set()

for number in range(4):
    threading.Thread(target=work, args=(number,), daemon=True).start()
interrupted = 0
while interrupted < int(sys.argv[2]):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.004))
        try:
            client.get(b"k")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except SoftTimeLimit:
        interrupted += 1
signal.setitimer(signal.ITIMER_REAL, 0)
for each in progress:
    each.clear()
is_alive = all([each.wait(float(sys.argv[3])) for each in progress])
print(sum(done), is_alive, client.get(b"k").value, flush=True)
os._exit(0)
"""
INTERRUPTIONS = 500
"""The gRPC channel that callers' threads used died of fewer."""


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="signals of POSIX")
def test_client_of_several_threads_survives_a_storm_of_signals(servers: Servers) -> None:
    command = [sys.executable, "-c", STORM, servers.patient_url, str(INTERRUPTIONS), str(PATIENCE_S)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=8 * PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    calls, is_alive, value = done.stdout.split()
    assert (is_alive, value) == ("True", "b'v'")
    assert int(calls) >= 4
