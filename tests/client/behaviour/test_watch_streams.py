"""Watches at their own server: how they end, and how they continue after a reader that stopped waiting."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import grpc
import pytest

from kvstore.client.aio.watch import AsyncWatch
from kvstore.client.blocking import stream as stream_module
from kvstore.client.blocking.stream import end_in
from kvstore.client.blocking.watch import Watch
from kvstore.client.core import first_state
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.first_state import FirstState
from kvstore.client.core.operation import ClientOperation
from kvstore.client.core.operations import Part
from kvstore.client.core.routing import PartitionRoute, Routing
from kvstore.client.core.session import ClientState
from kvstore.client.core.values import Item
from kvstore.client.core.watching import WatchCursor, WatchedKeys
from kvstore.env.clock import Unjudged
from kvstore.env.events import wait_within
from kvstore.env.library_env import library_env
from kvstore.errors import NotAuthenticated, Overloaded
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc import workers
from kvstore.rpc.status import abort
from tests.client.interruptions import interruptions
from tests.waiting import PATIENCE_S

EVERYTHING = WatchedKeys(b"", b"", heartbeat_s=PATIENCE_S)
NOBODY = "127.0.0.1:1"


class Server(kv_pb2_grpc.KVServicer):
    """One partition, whose changes are numbered from 1."""

    def __init__(self, cluster: str) -> None:
        self.address, self.cluster = "", cluster
        self.watches, self.stream_s = 0, 0.0
        self.finds_its_place_s = 0.0
        self.knows_users, self.refuses_logins = True, False
        self.was_asked, self.may_tell = asyncio.Event(), asyncio.Event()
        """The server's identity."""
        self.may_watch = asyncio.Event()
        for each in (self.may_tell, self.may_watch):
            each.set()
        self._last = self._ended = self._beats = 0
        self._news = asyncio.Condition()

    @property
    def changes(self) -> int:
        return self._last

    async def put(self) -> None:
        async with self._news:
            self._last += 1
            self._news.notify_all()

    async def beat(self) -> None:
        """Send a heartbeat."""
        async with self._news:
            self._beats += 1
            self._news.notify_all()

    async def end_all(self) -> None:
        """End the stream as a stopping server does."""
        async with self._news:
            self._ended += 1
            self._news.notify_all()

    async def Topology(self, request: kv_pb2.TopologyRequest, context: Any) -> kv_pb2.TopologyResponse:
        self.was_asked.set()
        await self.may_tell.wait()
        return kv_pb2.TopologyResponse(cluster=self.cluster)

    async def Watch(self, request: kv_pb2.WatchRequest, context: Any) -> AsyncIterator[kv_pb2.WatchResponse]:
        self.watches += 1
        left_s = context.time_remaining()
        self.stream_s = inf if left_s is None else left_s
        if not self.knows_users:
            await abort(context, NotAuthenticated("who?"))
        await self.may_watch.wait()
        if self.finds_its_place_s:
            await context.send_initial_metadata(())
            await wait_within(asyncio.Event(), self.finds_its_place_s)
        shown, ended, beats = request.after.get("p1", self._last), self._ended, self._beats
        yield kv_pb2.WatchResponse(positions={"p1": shown})
        while True:
            async with self._news:
                while self._last == shown and self._ended == ended and self._beats == beats:
                    await self._news.wait()
            if self._beats != beats:
                beats = self._beats
                yield kv_pb2.WatchResponse(positions={"p1": shown})
                continue
            if self._ended != ended:
                if self.refuses_logins:
                    await abort(context, NotAuthenticated("the token has expired"))
                return
            shown += 1
            change = kv_pb2.Change(key=b"k", sequence=shown)
            yield kv_pb2.WatchResponse(partition="p1", sequence=shown, changes=[change])


class Leaping(Unjudged):
    """A clock that jumps far ahead at each reading."""

    def __init__(self) -> None:
        self._looks = itertools.count()

    def now(self) -> float:
        return 2 * PATIENCE_S * next(self._looks)

    def wall_ms(self) -> int:
        return int(self.now() * 1000)


class Standing(Unjudged):
    """A clock that stops."""

    def now(self) -> float:
        return 0.0

    def wall_ms(self) -> int:
        return 0


@asynccontextmanager
async def serving(cluster: str = "c1") -> AsyncIterator[Server]:
    service, server = Server(cluster), grpc.aio.server()
    kv_pb2_grpc.add_KVServicer_to_server(service, server)
    service.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield service
    finally:
        await server.stop(0)


def watching(address: str) -> AsyncWatch:
    config = ClientConfig(endpoints=(address,), timeout_s=PATIENCE_S)
    return AsyncWatch(library_env("watch"), config, WatchCursor(EVERYTHING, None, {}), lambda: [address])


async def test_watch_continues_after_its_reader_stopped_waiting() -> None:
    """gRPC ends a call together with the wait for it."""
    async with serving() as server, watching(server.address) as watch:
        await server.put()
        assert (await anext(watch)).version == 1
        waits = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        await server.put()
        await server.put()
        async with asyncio.timeout(PATIENCE_S):
            assert [(await anext(watch)).version for _ in range(2)] == [2, 3]


async def test_watch_continues_elsewhere_when_its_server_ends_after_a_calm() -> None:
    """The time to find a server starts when the watch has none, not with the calm before."""
    async with serving() as server:
        config = ClientConfig(endpoints=(server.address,), timeout_s=PATIENCE_S)
        ports = replace(library_env("watch"), clock=Leaping())
        async with AsyncWatch(ports, config, WatchCursor(EVERYTHING, None, {}), lambda: [server.address]) as watch:
            await server.end_all()
            await server.put()
            assert (await anext(watch)).version == 1
            assert watch.connections == 2


async def test_blocking_watch_continues_elsewhere() -> None:
    async with serving() as server:
        config = ClientConfig(endpoints=(server.address,), timeout_s=PATIENCE_S)
        ports = replace(library_env("watch"), clock=Leaping())
        watch = Watch(ports, config, WatchCursor(EVERYTHING, None, {}), lambda: [server.address])
        await asyncio.to_thread(watch.ready)
        await server.end_all()
        await server.put()
        assert (await asyncio.to_thread(next, watch)).version == 1
        assert watch.connections == 2
        watch.close()


async def test_blocking_watch_returns_each_change_once_wherever_interrupted() -> None:
    """For example by a signal handler. The position must never be behind changes that the reader has not received."""
    given: list[int] = []
    async with serving() as server:
        config = ClientConfig(endpoints=(server.address,), timeout_s=PATIENCE_S)
        watch = Watch(library_env("watch"), config, WatchCursor(EVERYTHING, None, {}), lambda: [server.address])
        loop = asyncio.get_running_loop()

        def take() -> None:
            change = next(watch)
            given.append(change.version)

        def take_all() -> None:
            watch.ready()
            asyncio.run_coroutine_threadsafe(server.put(), loop).result(PATIENCE_S)
            for _ in interruptions(take):
                assert watch.position == {"p1": len(given)}
                if len(given) == server.changes:
                    asyncio.run_coroutine_threadsafe(server.put(), loop).result(PATIENCE_S)

        await asyncio.to_thread(take_all)
        await asyncio.to_thread(watch.close)
        assert given == list(range(1, server.changes + 1))


async def test_worker_of_an_interrupted_watch_ends_at_the_next_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each watch that was interrupted and dropped, for example by a soft time limit, kept a thread and a stream
    forever."""

    def struck(job: workers.Job[Any], wait_s: float = 0.0) -> None:
        raise KeyboardInterrupt

    def interrupt() -> workers.Job[None]:
        with monkeypatch.context() as patched:
            patched.setattr(workers.Job, "wait", struck)
            with pytest.raises(KeyboardInterrupt):
                next(watch)
        assert watch._job is not None
        return watch._job

    async with serving() as server:
        config = ClientConfig(endpoints=(server.address,), timeout_s=PATIENCE_S)
        watch = Watch(library_env("watch"), config, WatchCursor(EVERYTHING, None, {}), lambda: [server.address])
        await asyncio.to_thread(watch.ready)
        left = await asyncio.to_thread(interrupt)
        await server.beat()
        assert await asyncio.to_thread(left.join, PATIENCE_S)
        await server.put()
        assert (await asyncio.to_thread(next, watch)).version == 1, "a caller that returns gets the next change"
        assert server.watches == 1
        await asyncio.to_thread(watch.close)


async def test_closed_watch_blocks_nobody() -> None:
    watch = watching(NOBODY)
    await watch.close()
    assert await watch.ready() is watch
    assert [change async for change in watch] == []


async def test_blocking_watch_closed_while_connecting_keeps_no_connection() -> None:
    def addresses() -> list[str]:
        watch.close()  # as another thread may at any time
        return [server.address]

    async with serving() as server:
        config = ClientConfig(endpoints=(server.address,), timeout_s=PATIENCE_S)
        watch = Watch(library_env("watch"), config, WatchCursor(EVERYTHING, None, {}), addresses)
        assert await asyncio.to_thread(list, watch) == []
        assert watch._channel is None


class OnePartition(Routing):
    def partition_of(self, key: bytes) -> str:
        return "p1"


def idle_client(
    reads: list[Sequence[ClientOperation]],
) -> tuple[FirstState, Callable[[Sequence[ClientOperation]], list[Part]]]:
    """A client that learns the ring from its first read."""
    seen = ClientState(Random(1))
    seen.routing = OnePartition(ring_version=1, partitions={"p1": PartitionRoute()}, owners=["p1"])

    def read(wanted: Sequence[ClientOperation]) -> list[Part]:
        reads.append(wanted)
        seen.routing.ring_version = 2
        return [Part([(b"k", Item(b"", 1, 1, 0, 0))], None, 0)]

    return FirstState(EVERYTHING, seen, seen.absorb), read


# docs/protocol.md F8
async def test_watch_with_state_restarts_at_the_ring_of_its_first_read() -> None:
    async with serving() as server:
        await server.put()
        config, reads = (
            ClientConfig(endpoints=(server.address,), timeout_s=PATIENCE_S),
            list[Sequence[ClientOperation]](),
        )
        state, read = idle_client(reads)

        async def read_later(wanted: Sequence[ClientOperation]) -> list[Part]:
            return read(wanted)

        ports, reading = library_env("watch"), WatchCursor(EVERYTHING, None, {})
        async with AsyncWatch(ports, config, reading, lambda: [server.address], state, read_later) as watch:
            assert (await anext(watch)).key == b"k"
            assert (watch.connections, len(reads)) == (2, 2)
            assert not state._versions, "it was written before the watch began"
            await server.put()
            assert (await anext(watch)).version == 2


# docs/protocol.md F8
async def test_watch_restarts_when_its_reader_stops_waiting_meanwhile() -> None:
    """With the newer ring, the former positions would make old changes of what the state already has."""
    async with serving() as server:
        config, reads = (
            ClientConfig(endpoints=(server.address,), timeout_s=PATIENCE_S),
            list[Sequence[ClientOperation]](),
        )
        state, read = idle_client(reads)

        async def read_later(wanted: Sequence[ClientOperation]) -> list[Part]:
            return read(wanted)

        ports, reading = library_env("watch"), WatchCursor(EVERYTHING, None, {})
        watch = AsyncWatch(ports, config, reading, lambda: [server.address], state, read_later)
        hang_up, is_closing = watch._disconnect, asyncio.Event()

        async def hang_up_slowly() -> None:
            is_closing.set()
            await asyncio.Event().wait()

        watch._disconnect = hang_up_slowly  # type: ignore[method-assign]
        waits = asyncio.ensure_future(anext(watch))
        async with asyncio.timeout(PATIENCE_S):
            await is_closing.wait()
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        await hang_up()
        watch._disconnect = hang_up  # type: ignore[method-assign]
        await server.put()
        assert (await anext(watch)).key == b"k"
        assert state._begin == {"p1": 1}, "told after the newer ring was known"
        await watch.close()


async def test_blocking_watch_with_state_restarts() -> None:
    async with serving() as server:
        await server.put()
        config, reads = (
            ClientConfig(endpoints=(server.address,), timeout_s=PATIENCE_S),
            list[Sequence[ClientOperation]](),
        )
        state, read = idle_client(reads)
        ports, reading = library_env("watch"), WatchCursor(EVERYTHING, None, {})
        watch = Watch(ports, config, reading, lambda: [server.address], state, read)
        assert (await asyncio.to_thread(next, watch)).key == b"k"
        assert (watch.connections, len(reads)) == (2, 2)
        assert not state._versions
        watch.close()


async def test_blocking_watch_ends_itself_while_its_thread_waits() -> None:
    async with serving() as server:
        config = ClientConfig(endpoints=(server.address,), timeout_s=PATIENCE_S)
        watch = Watch(library_env("watch"), config, WatchCursor(EVERYTHING, None, {}), lambda: [server.address])
        end_in(watch, 0.2)
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.to_thread(next, watch, None) is None
            assert await asyncio.to_thread(next, watch, None) is None


async def test_server_that_accepts_a_watch_and_stays_silent_is_left() -> None:
    async with serving() as silent, serving() as server:
        silent.may_watch.clear()
        config = ClientConfig(endpoints=(server.address,), timeout_s=2.0, connect_timeout_s=0.2, silence_s=PATIENCE_S)
        addresses = [silent.address, *[server.address] * 9]
        ports = replace(library_env("watch"), clock=Standing())  # the test may take longer than the two seconds
        async with asyncio.timeout(PATIENCE_S):
            async with AsyncWatch(ports, config, WatchCursor(EVERYTHING, None, {}), lambda: addresses) as watch:
                await server.put()
                assert (await anext(watch)).version == 1


async def test_server_that_accepted_a_watch_has_time_to_find_its_place() -> None:
    """The server reports at once that it has accepted: finding the place in the logs of many partitions takes
    longer."""
    async with serving() as server:
        server.finds_its_place_s = 0.5
        config = ClientConfig(endpoints=(server.address,), timeout_s=0.4, connect_timeout_s=0.2, silence_s=PATIENCE_S)
        ports = replace(library_env("watch"), clock=Standing())
        async with asyncio.timeout(PATIENCE_S):
            async with AsyncWatch(ports, config, WatchCursor(EVERYTHING, None, {}), lambda: [server.address]) as watch:
                await server.put()
                assert (await anext(watch)).version == 1


async def test_blocking_watch_gives_its_server_time_despite_a_short_heartbeat() -> None:
    async with serving() as server:
        server.finds_its_place_s = 1.0
        config = ClientConfig(endpoints=(server.address,), timeout_s=0.4)
        reading = WatchCursor(EVERYTHING._replace(heartbeat_s=0.01), None, {})
        watch = Watch(library_env("watch"), config, reading, lambda: [server.address])
        await asyncio.to_thread(watch.ready)
        watch.close()
        assert server.watches == 1


async def test_blocking_watch_leaves_a_server_that_only_answers_pings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread cannot stop waiting for a message: it waits until the time of the stream is over."""
    monkeypatch.setattr(stream_module, "STREAM_S_MIN", 0.6)
    async with serving() as silent, serving() as server:
        config = ClientConfig(endpoints=(server.address,), timeout_s=PATIENCE_S)
        addresses = [silent.address, *[server.address] * 9]
        reading = WatchCursor(EVERYTHING._replace(heartbeat_s=0.01), None, {})
        watch = Watch(library_env("watch"), config, reading, lambda: addresses)
        await asyncio.to_thread(watch.ready)
        await server.put()
        try:
            async with asyncio.timeout(PATIENCE_S):
                assert (await asyncio.to_thread(next, watch)).version == 1
        finally:
            await silent.end_all()  # the thread would wait forever
            watch.close()
        assert silent.stream_s <= 60 * 0.01


# docs/protocol.md F8
@pytest.mark.parametrize("is_done", [False, True], ids=["more follows", "the last page"])
async def test_state_that_was_too_large_has_no_rest(monkeypatch: pytest.MonkeyPatch, *, is_done: bool) -> None:
    """The state lacks keys of the page at which the limit was reached."""
    seen = ClientState(Random(1))
    seen.routing = OnePartition(ring_version=1, partitions={"p1": PartitionRoute()}, owners=["p1"])
    page = [(b"k%d" % number, Item(b"", number, number, 0, 0)) for number in range(1, 6)]

    def read(wanted: Sequence[ClientOperation]) -> list[Part]:
        return [Part(page, None if is_done else b"l", 0)]

    monkeypatch.setattr(first_state, "REMEMBERED_MAX", 2)
    async with serving() as server:
        config = ClientConfig(endpoints=(server.address,), timeout_s=PATIENCE_S)
        given = (library_env("watch"), config, WatchCursor(EVERYTHING, None, {}), lambda: [server.address])
        watch = Watch(*given, FirstState(EVERYTHING, seen, seen.absorb), read)
        for _ in range(3):
            with pytest.raises(Overloaded, match="more than 2 keys were written while the state was read"):
                await asyncio.to_thread(next, watch)
        assert not watch.has_state
        watch.close()


@pytest.mark.parametrize("is_blocking", [False, True])
async def test_watch_is_not_requested_from_another_cluster(*, is_blocking: bool) -> None:
    """After its first message, a watch of another cluster looks like one without changes."""
    async with serving("theirs") as theirs, serving("ours") as ours:
        config = ClientConfig(endpoints=(ours.address,), timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S)
        routing = Routing(cluster="ours")
        given = (
            library_env("watch"),
            config,
            WatchCursor(EVERYTHING, None, {}),
            lambda: [theirs.address, ours.address],
        )
        if is_blocking:
            blocking = Watch(*given, check=routing.check)
            await asyncio.to_thread(blocking.ready)
            await ours.put()
            assert (await asyncio.to_thread(next, blocking)).version == 1
            blocking.close()
        else:
            async with AsyncWatch(*given, check=routing.check) as watch:
                await ours.put()
                assert (await anext(watch)).version == 1
        assert (theirs.watches, ours.watches) == (0, 1)
        assert routing.foreign == {theirs.address}


@pytest.mark.parametrize("is_blocking", [False, True])
async def test_rejected_login_ends_a_watch_only_when_all_servers_reject_it(*, is_blocking: bool) -> None:
    async def next_change() -> int:
        if isinstance(watch, Watch):
            return (await asyncio.to_thread(next, watch)).version
        return (await anext(watch)).version

    async with serving() as stranger, serving() as server:
        stranger.knows_users = False
        config = ClientConfig(endpoints=(server.address,), timeout_s=PATIENCE_S)
        addresses = [stranger.address, server.address]
        given = (library_env("watch"), config, WatchCursor(EVERYTHING, {"p1": 0}, {}), lambda: addresses)
        watch = Watch(*given) if is_blocking else AsyncWatch(*given)
        await server.put()
        assert await next_change() == 1
        await server.end_all()
        await server.put()
        assert await next_change() == 2
        assert stranger.watches == 2
        server.knows_users = False
        await server.end_all()
        with pytest.raises(NotAuthenticated, match="who"):
            await next_change()
        closing = watch.close()
        if closing is not None:
            await closing


@pytest.mark.parametrize("is_blocking", [False, True])
async def test_watch_with_an_ended_login_continues_with_the_present_one(*, is_blocking: bool) -> None:
    """The only server ends the watch, and accepts the next one."""
    async with serving() as server:
        server.refuses_logins = True
        config = ClientConfig(endpoints=(server.address,), timeout_s=PATIENCE_S)
        given = (library_env("watch"), config, WatchCursor(EVERYTHING, None, {}), lambda: [server.address])
        if is_blocking:
            with await asyncio.to_thread(Watch(*given).ready) as watch:
                await server.end_all()
                await server.put()
                assert (await asyncio.to_thread(next, watch)).version == 1
                server.knows_users = False
                await server.end_all()
                with pytest.raises(NotAuthenticated, match="the token has expired"):
                    await asyncio.to_thread(next, watch)
            return
        async with AsyncWatch(*given) as watch:
            await server.end_all()
            await server.put()
            assert (await anext(watch)).version == 1
            server.knows_users = False
            await server.end_all()
            with pytest.raises(NotAuthenticated, match="the token has expired"):
                await anext(watch)


async def test_watch_closed_during_its_cluster_check_ends() -> None:
    async with serving("ours") as ours:
        config = ClientConfig(endpoints=(ours.address,), timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S)
        ours.may_tell.clear()
        reading = WatchCursor(EVERYTHING, None, {})
        watch = AsyncWatch(library_env("watch"), config, reading, lambda: [ours.address], check=Routing().check)
        waits = asyncio.ensure_future(watch.ready())
        await ours.was_asked.wait()
        await watch.close()
        assert await asyncio.wait_for(waits, PATIENCE_S) is watch
        assert watch._channel is None
