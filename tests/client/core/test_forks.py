"""A process that is forked while a client is open: two processes with one client's request ids and connections. Nothing
here calls gRPC, because with servers in this process it ends some children by itself."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.client import Client, FeedReader
from kvstore.client.aio.engine import AsyncEngine
from kvstore.client.aio.watch import AsyncWatch
from kvstore.client.blocking.engine import BlockingEngine
from kvstore.client.blocking.watch import Watch
from kvstore.client.coordination import AsyncLock, AsyncSession, Lock, Session
from kvstore.client.core import operations
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.forks import FORKED
from kvstore.client.core.watching import WatchCursor, WatchedKeys
from kvstore.env.library_env import library_env
from kvstore.errors import InvalidRequest
from kvstore.proto import kv_pb2
from kvstore.server.grpc.topology import topology_message
from tests.client.behaviour import test_coordination as driving
from tests.client.model import ModelCluster
from tests.waiting import PATIENCE_S

CONFIG = ClientConfig(endpoints=("127.0.0.1:1",))
KEY = b"counter"


class Parents:
    """Replaces a link of the parent's. Nobody may use or end it in the child."""

    is_broken = False

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the parent's link is asked for {name}")


def in_a_child(work: Callable[[], str]) -> str:
    """Return or raise the result of `work` in a child that ends afterwards."""
    gc.collect()  # gRPC's hook of other tests, which joins a thread of the parent's: in the child it would wait forever
    told, tells = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of the parent stay behind on purpose
        child = os.fork()
    if not child:
        signal.alarm(int(PATIENCE_S))  # a child that waits for a lock forever
        try:
            found = work()
        except BaseException as error:  # noqa: BLE001  # the parent reports any error
            found = repr(error)
        os.write(tells, found.encode())
        os._exit(0)
    os.close(tells)
    with os.fdopen(told, "rb") as pipe:
        found = pipe.read().decode()
    os.waitpid(child, 0)
    return found


def refusal_of(call: Callable[[], object]) -> str:
    try:
        return f"done: {call()}"
    except InvalidRequest as error:
        return str(error)


def test_client_refuses_calls_in_a_child_when_the_parent_held_its_locks() -> None:
    engine = BlockingEngine(library_env("test"), CONFIG)
    engine.seen.learn(topology_message(ModelCluster().servers[0].topology))
    engine._links = dict.fromkeys(engine.routing.everybody(CONFIG.endpoints), Parents())  # type: ignore[arg-type]

    def tries() -> str:
        one = refusal_of(lambda: engine.run(operations.increment(KEY, 1), None))
        many = refusal_of(lambda: engine.run_all([operations.get(KEY, 0)], None))
        engine.close()
        return one if one == many else f"{one}; {many}"

    with engine._lock:
        said = in_a_child(tries)
    assert said == FORKED
    assert engine._links, "the parent goes on"
    assert not engine.is_closed


async def test_async_client_refuses_calls_in_a_child_and_sends_nothing() -> None:
    engine = AsyncEngine(library_env("test"), CONFIG)
    engine.seen.learn(topology_message(ModelCluster().servers[0].topology))
    engine.links.direct = dict.fromkeys(engine.routing.partitions, Parents())  # type: ignore[arg-type]
    engine.links._links = dict.fromkeys(engine.routing.everybody(CONFIG.endpoints), Parents())  # type: ignore[arg-type]

    def tries() -> str:
        async def try_all() -> str:
            said = []
            for call in (engine.run(operations.increment(KEY, 1), None), engine.run(operations.get(KEY, 0), None)):
                try:
                    said.append(f"done: {await call}")
                except InvalidRequest as error:
                    said.append(str(error))
            await engine.close()
            return "; ".join(dict.fromkeys(said))

        asyncio._set_running_loop(None)
        return asyncio.new_event_loop().run_until_complete(asyncio.wait_for(try_all(), PATIENCE_S))

    assert in_a_child(tries) == FORKED
    assert engine.links.direct, "the parent goes on"
    engine.links._links.clear()
    await engine.close()


@pytest.mark.parametrize("kind", [BlockingEngine, AsyncEngine])
async def test_parents_connections_stay_referenced_in_all_descendants(
    kind: type[Any],
) -> None:
    """gRPC ends unreferenced objects, or waits for threads that do not exist in the child."""
    engine = kind(library_env("test"), CONFIG)
    links = engine if kind is BlockingEngine else engine.links
    links._links = {"127.0.0.1:1": Parents()}
    held = weakref.ref(links._links["127.0.0.1:1"])

    def tries() -> str:
        nonlocal engine, links
        engine = links = None
        gc.collect()
        return "held" if held() else "let go"

    assert in_a_child(tries) == "held"
    assert in_a_child(lambda: in_a_child(tries)) == "held"
    links._links.clear()


def watch_of(kind: type[Any], **more: Any) -> Any:
    """A watch that has received a change."""
    reading = WatchCursor(WatchedKeys(b"", b""), None, {})
    reading.take(kv_pb2.WatchResponse(partition="p1", sequence=1, changes=[kv_pb2.Change(key=b"k", sequence=1)]))
    watch = kind(library_env("test"), CONFIG, reading, lambda: ["127.0.0.1:1"], **more)
    watch._channel, watch._call = Parents(), Parents()
    return watch


def test_parents_watch_is_refused_in_a_child_and_collected_there() -> None:
    watch = watch_of(Watch)

    def tries() -> str:
        said = {refusal_of(call) for call in (lambda: next(watch), watch.ready)}
        watch.close()
        return "; ".join({*said, refusal_of(lambda: next(watch))})

    with watch._closing._cond:  # a thread of the parent's waits
        assert in_a_child(tries) == FORKED
    assert next(watch).key == b"k", "the parent goes on"


async def test_parents_asyncio_watch_is_refused_in_a_child() -> None:
    watch = watch_of(AsyncWatch)

    def tries() -> str:
        async def try_all() -> str:
            said = set()
            for call in (watch.__anext__(), watch.ready()):
                with pytest.raises(InvalidRequest) as refused:
                    await call
                said.add(str(refused.value))
            await watch.close()
            return "; ".join(said)

        asyncio._set_running_loop(None)
        return asyncio.new_event_loop().run_until_complete(asyncio.wait_for(try_all(), PATIENCE_S))

    assert in_a_child(tries) == FORKED
    assert (await anext(watch)).key == b"k"


def test_parents_client_and_feed_reader_are_refused_in_a_child() -> None:
    client = Client(CONFIG)
    client._engine = BlockingEngine(library_env("test"), CONFIG)
    feed = FeedReader(CONFIG)
    parents = Parents(), Parents()
    feed._open["127.0.0.1:1"] = parents  # type: ignore[assignment]

    def tries() -> str:
        said = {refusal_of(call) for call in (client.open, lambda: client.watch(b"k"), feed.positions)}
        feed.close()
        return "; ".join(said)

    with feed._lock:
        assert in_a_child(tries) == FORKED
    assert list(feed._open.values()) == [parents]


def test_child_holds_no_lock_and_no_session_of_the_parent() -> None:
    """Only the parent learns that the lock is released. The child must not wait for locks of the parent's threads."""
    store = driving.BlockingClient()
    store.created.clear()
    with Session(store, b"t") as session:  # type: ignore[arg-type]
        lock = Lock(session, b"l")
        lock.acquire()

        def looks() -> str:
            seen = f"{lock.is_held} {session.is_alive} {session.lost.is_set()}"
            session.close()
            return seen

        with session._mutex, session._guard:
            assert in_a_child(looks) == "False False True"
        assert lock.is_held
        assert not session.lost.is_set()


async def test_asyncio_child_holds_no_lock_and_no_session_of_the_parent() -> None:
    store = driving.Store()
    store.created.clear()
    async with AsyncSession(driving.AsyncClient(store), b"t") as session:  # type: ignore[arg-type]
        lock = AsyncLock(session, b"l")
        await lock.acquire()

        def looks() -> str:
            seen = f"{lock.is_held} {session.is_alive} {session.lost.is_set()}"
            asyncio._set_running_loop(None)
            asyncio.new_event_loop().run_until_complete(asyncio.wait_for(session.close(), PATIENCE_S))
            return seen

        assert in_a_child(looks) == "False False True"
        assert lock.is_held
        assert not session.lost.is_set()
