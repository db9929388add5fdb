"""The ZooKeeper driver when ZooKeeper is killed, silent, restarted without data, or away for long. Real servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from kazoo.protocol.states import KeeperState

from kvstore.devcluster.zookeeper import ZooKeeperProcess, free_port, restart, start_ensemble
from kvstore.errors import MetadataError, MetadataUnavailable, MetadataUnknown, NoSuchNode
from kvstore.meta.store import SessionState
from kvstore.meta.zookeeper import session as zookeeper_session
from kvstore.meta.zookeeper import store as module
from kvstore.meta.zookeeper.store import ZooKeeperStore
from tests.meta.drivers import SESSION_S, Hint, States, wait_until_gone
from tests.waiting import wait_until, wait_until_blocking

pytestmark = [
    pytest.mark.needs_zookeeper,
    pytest.mark.filterwarnings("ignore:unclosed <:ResourceWarning"),  # kazoo's: see conftest.py
]

Connect = Callable[..., Awaitable[ZooKeeperStore]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    stores: list[ZooKeeperStore] = []

    async def connect(address: str, **options: float) -> ZooKeeperStore:
        """The session outlives a start of ZooKeeper and a process that pauses, unless the test wants a
        short one."""
        stores.append(await ZooKeeperStore.connect(address, **({"session_timeout_s": SESSION_S} | options)))
        return stores[-1]

    yield connect
    for store in stores:
        await store.close()


async def test_chroot_is_created_and_separates_trees(zookeeper_chroot: str, connect: Connect) -> None:
    inner = await connect(f"{zookeeper_chroot}/a/b")
    outer = await connect(zookeeper_chroot)
    assert await inner.create("/x", sequential=True) == "/x0000000000"
    assert await inner.children("/") == ["x0000000000"]
    await outer.sync("/")
    assert await outer.children("/a/b") == ["x0000000000"]
    await inner.set("/", b"top", 0)
    assert (await inner.get("/"))[0] == b"top"


async def test_whole_tree_is_seen_without_a_chroot(zookeeper: str, connect: Connect) -> None:
    store = await connect(zookeeper)
    assert "zookeeper" in await store.children("/")
    assert await store.children("/zookeeper") == ["config", "quota"]


async def test_missing_server_is_reported_in_time(connect: Connect) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(MetadataUnavailable, match=address):
        await connect(address, connect_timeout_s=0.5)


async def test_abandoned_attempt_to_connect_leaves_no_task(connect: Connect) -> None:
    """A node that waits for its ZooKeeper logged an error for each attempt: a task that was destroyed while pending."""
    before = asyncio.all_tasks()
    with pytest.raises(MetadataUnavailable):
        await connect(f"127.0.0.1:{free_port()}/x", connect_timeout_s=0.1)
    assert [task.get_name() for task in asyncio.all_tasks() - before] == []


async def test_cancelled_zookeeper_call_disturbs_no_other(zookeeper_chroot: str, connect: Connect) -> None:
    store = await connect(zookeeper_chroot)
    call = asyncio.ensure_future(store.create("/a"))
    await asyncio.sleep(0)
    call.cancel()
    await store.create("/b")
    assert "b" in await store.children("/")
    assert store.state is SessionState.CONNECTED


async def test_zookeeper_calls_in_flight_are_bounded(
    zookeeper_chroot: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CALLS_MAX", 10)
    store = await connect(zookeeper_chroot)
    results = await asyncio.gather(*(store.children("/") for _ in range(20)), return_exceptions=True)
    assert [type(result) for result in results] == [list] * 10 + [MetadataUnavailable] * 10
    assert await store.children("/") == []


async def test_zookeeper_session_survives_a_killed_and_restarted_server(
    own_zookeeper: ZooKeeperProcess, connect: Connect
) -> None:
    store = await connect(f"{own_zookeeper.address}/kv")
    await store.create("/e", b"1", ephemeral=True)
    hint, states, session = Hint(), States(store), store.session
    store.watch("/e", hint)
    await store.sync("/e")
    own_zookeeper.kill()
    await states.wait_for(SessionState.SUSPENDED)
    with pytest.raises(MetadataUnavailable):
        await store.set("/e", b"2", 0)
    again = restart(own_zookeeper)
    try:
        await states.wait_for(SessionState.CONNECTED)
        assert (store.session, states.seen) == (session, [SessionState.SUSPENDED, SessionState.CONNECTED])
        await hint.wait()
        data, stat = await store.get("/e")
        assert (data, stat.version, stat.owner) == (b"1", 0, session)
    finally:
        again.kill()


async def test_zookeeper_calls_at_a_server_death_are_unknown_and_not_sent_late(
    own_zookeeper: ZooKeeperProcess, connect: Connect
) -> None:
    store = await connect(f"{own_zookeeper.address}/kv")
    await store.create("/a")
    own_zookeeper.pause()
    calls = [asyncio.ensure_future(store.create(f"/late{number}")) for number in range(50)]
    await asyncio.sleep(0)
    own_zookeeper.kill()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(result) for result in results} == {MetadataUnknown}
    states = States(store)
    refused = await asyncio.gather(*(store.create(f"/refused{n}") for n in range(50)), return_exceptions=True)
    assert {type(result) for result in refused} <= {MetadataUnknown, MetadataUnavailable}
    again = restart(own_zookeeper)
    try:
        await states.wait_for(SessionState.CONNECTED)
        assert await store.children("/") == ["a"]
    finally:
        again.kill()


async def test_call_between_a_break_and_its_report_is_refused_and_never_sent(
    own_zookeeper: ZooKeeperProcess, connect: Connect
) -> None:
    store = await connect(f"{own_zookeeper.address}/kv")
    client = store._session.client
    own_zookeeper.kill()
    wait_until_blocking(lambda: client.client_state == KeeperState.CONNECTING)
    assert store.state is SessionState.CONNECTED, "the event loop has not run since"
    with pytest.raises(MetadataUnavailable):
        await store.create("/late")
    states = States(store)
    again = restart(own_zookeeper)
    try:
        await states.wait_for(SessionState.CONNECTED)
        await store.sync("/")
        assert await store.children("/") == []
    finally:
        again.kill()


async def test_zookeeper_session_that_expired_unnoticed_is_lost(
    zookeeper: str, zookeeper_chroot: str, connect: Connect
) -> None:
    async with Proxy(zookeeper) as proxy:
        store = await connect(f"{proxy.address}/{zookeeper_chroot.partition('/')[2]}", session_timeout_s=6.0)
        witness = await connect(zookeeper_chroot)
        await store.create("/e", ephemeral=True)
        hint, states, session = Hint(), States(store), store.session
        store.watch("/e", hint)
        await store.sync("/e")
        proxy.cut()
        await wait_until_gone(witness, "/e")
        assert (store.state, store.session) == (SessionState.SUSPENDED, session)
        await proxy.mend()
        await states.wait_for(SessionState.CONNECTED)
        assert states.seen == [SessionState.SUSPENDED, SessionState.LOST, SessionState.CONNECTED]
        assert store.session not in (0, session)
        await hint.wait()
        with pytest.raises(NoSuchNode):
            await store.get("/e")


class Proxy:
    """A proxy between a client and its server that can be cut: connections break, and new ones are refused."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Proxy:
        await self.mend()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)

    def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.partition(":")
        target_reader, target_writer = await asyncio.open_connection(host, int(port))
        self._writers += [writer, target_writer]
        await asyncio.gather(_copy(reader, target_writer), _copy(target_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.transport.abort()


async def recovers_from_silence(store: ZooKeeperStore, server: ZooKeeperProcess, *, silent_s: float) -> None:
    """Pause the server, and see SUSPENDED although nothing breaks, and CONNECTED after it continues."""
    states, loop = States(store), asyncio.get_running_loop()
    server.pause()
    paused_at = loop.time()
    try:
        await states.wait_for(SessionState.SUSPENDED)

        async def is_over() -> bool:
            return loop.time() - paused_at > silent_s

        await wait_until(is_over, timeout_s=silent_s + 30)
        assert store.state is SessionState.SUSPENDED
    finally:
        server.resume()
    await states.wait_for(SessionState.CONNECTED)

    async def answers() -> bool:
        try:
            await store.sync("/")
        except MetadataError:
            return False
        return True

    await wait_until(answers)
    assert store.session != 0


@pytest.mark.slow
async def test_idle_session_notices_a_silent_server_and_recovers(
    own_zookeeper: ZooKeeperProcess, connect: Connect
) -> None:
    store = await connect(f"{own_zookeeper.address}/kv", session_timeout_s=6.0)
    await recovers_from_silence(store, own_zookeeper, silent_s=30)


@pytest.mark.slow
async def test_busy_session_notices_a_silent_server_and_recovers(
    own_zookeeper: ZooKeeperProcess, connect: Connect
) -> None:
    """Each request counts as a ping, so pings alone would never find out."""
    store = await connect(f"{own_zookeeper.address}/kv", session_timeout_s=6.0)
    outcomes: set[type[BaseException] | None] = set()

    async def ask() -> None:
        try:
            await store.children("/")
            outcomes.add(None)
        except MetadataError as error:
            outcomes.add(type(error))

    async def keep_asking() -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(ask())
                await a_moment()

    async def a_moment() -> None:
        looks = iter((False, False, True))

        async def third_look() -> bool:
            return next(looks)

        await wait_until(third_look)

    asking = asyncio.ensure_future(keep_asking())
    await recovers_from_silence(store, own_zookeeper, silent_s=10)
    asking.cancel()
    assert outcomes >= {MetadataUnknown, MetadataUnavailable}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_dead_client_thread_is_replaced(
    zookeeper_chroot: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kazoo's connection thread ends for good at an answer that it does not understand. The session must continue: its
    ephemerals would block the next one for as long as a session lasts."""
    monkeypatch.setattr(zookeeper_session, "RESTART_DELAY_S", 0.05)
    store = await connect(zookeeper_chroot)
    await store.create("/e", ephemeral=True)
    hint, states, session = Hint(), States(store), store.session
    store.watch("/e", hint)
    await store.sync("/e")

    def choke(*_: object) -> None:
        raise RuntimeError("xids do not match")

    monkeypatch.setattr(store._session.client._connection, "_read_response", choke)
    with pytest.raises(MetadataUnknown):
        await store.sync("/")
    await states.wait_for(SessionState.CONNECTED)
    assert (store.session, states.seen) == (session, [SessionState.SUSPENDED, SessionState.CONNECTED])
    await hint.wait()
    assert (await store.get("/e"))[1].owner == session
    await store.create("/p")
    await hint_after(store, "/p")


async def hint_after(store: ZooKeeperStore, path: str) -> None:
    """Watches work on this session."""
    hint = Hint()
    store.watch(path, hint)
    await store.sync(path)
    await store.set(path, b"1", 0)
    await hint.wait()


async def test_close_does_not_wait_for_an_absent_server(
    own_zookeeper: ZooKeeperProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that waits would wait two thirds of the session's time."""
    monkeypatch.setattr(zookeeper_session, "CLOSE_TIMEOUT_S", 0.1)
    store = await ZooKeeperStore.connect(f"{own_zookeeper.address}/kv", session_timeout_s=60)
    own_zookeeper.pause()
    started = asyncio.get_running_loop().time()
    await store.close()
    assert asyncio.get_running_loop().time() - started < 30
    with pytest.raises(MetadataUnavailable):
        await store.get("/")


@pytest.mark.slow
async def test_dead_member_of_a_zookeeper_ensemble_costs_no_session(tmp_path: Path, connect: Connect) -> None:
    members = start_ensemble(tmp_path)
    try:
        store = await connect(",".join(member.address for member in members) + "/kv")
        await store.create("/e", ephemeral=True)
        session = store.session
        for member in members:
            states = States(store)
            member.kill()

            async def works() -> bool:
                try:
                    _, stat = await store.get("/e")
                    await store.set("/e", b"x", stat.version)
                except (MetadataUnavailable, MetadataUnknown):
                    return False
                return True

            await wait_until(works, what="a write after a member died")
            assert SessionState.LOST not in states.seen
            restart(member).wait_ready()
            await wait_until(works, what="a write after it came back")
        assert (await store.get("/e"))[1].owner == store.session == session
    finally:
        from kvstore.devcluster.zookeeper import find_running

        for member in members:
            running = find_running(member.directory)
            if running is not None:
                running.kill()
