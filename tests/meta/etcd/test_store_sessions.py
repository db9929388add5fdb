"""The etcd driver when etcd is killed, silent, compacted, or away for long; and two concurrent writers. Real
servers."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest

from kvstore.devcluster.etcd import EtcdProcess, find_running, restart, start_ensemble
from kvstore.devcluster.zookeeper import free_port
from kvstore.env.events import wait_within
from kvstore.errors import (
    MetadataDenied,
    MetadataError,
    MetadataUnavailable,
    MetadataUnknown,
    NodeExists,
    NoSuchNode,
    NotEmpty,
    VersionConflict,
)
from kvstore.meta.etcd import EtcdStore, listing
from kvstore.meta.etcd import session as session_module
from kvstore.meta.etcd import store as module
from kvstore.meta.etcd.link import EtcdLink
from kvstore.meta.store import Create, Delete, SessionState, ensure_path
from kvstore.proto.etcd_pb2 import CompactionRequest, RangeRequest, RangeResponse, TxnRequest, TxnResponse
from tests.meta.drivers import Hint, States, wait_until_gone
from tests.meta.zookeeper.test_store_sessions import Proxy
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.needs_etcd

Connect = Callable[..., Awaitable[EtcdStore]]
Action = Callable[[], Awaitable[object]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    stores: list[EtcdStore] = []

    async def connect(address: str, **options: Any) -> EtcdStore:
        options = {"session_timeout_s": 60, **options}  # it outlives a process that pauses
        stores.append(await EtcdStore.connect(address, **options))
        return stores[-1]

    yield connect
    for store in stores:
        await store.close()


def before_its_next_commit(store: EtcdStore, action: Action) -> None:
    """Let another writer be first: between the reads of the store's next write and its commit."""
    link = store._session.link
    assert link is not None
    txn, waiting = link.txn, [action]

    async def delayed(request: TxnRequest) -> TxnResponse:
        if request.compare and waiting:
            await waiting.pop()()
        return await txn(request)

    link.txn = delayed  # type: ignore[method-assign]


# ── two who write at once ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_write_of_a_version_changed_meanwhile_is_a_conflict(etcd_prefix: str, connect: Connect) -> None:
    store, other = await connect(etcd_prefix), await connect(etcd_prefix)
    await store.create("/a", b"0")
    before_its_next_commit(store, lambda: other.set("/a", b"other", 0))
    with pytest.raises(VersionConflict):
        await store.set("/a", b"late", 0)
    before_its_next_commit(store, lambda: other.set("/a", b"again", 1))
    assert await store.set("/a", b"whatever", -1) == 3


async def test_parent_that_gets_a_child_meanwhile_is_not_deleted(etcd_prefix: str, connect: Connect) -> None:
    store, other = await connect(etcd_prefix), await connect(etcd_prefix)
    await store.create("/d")
    before_its_next_commit(store, lambda: other.create("/d/child"))
    with pytest.raises(NotEmpty):
        await store.delete("/d", 0)
    assert await store.children("/d") == ["child"]


async def test_child_whose_parent_is_deleted_meanwhile_is_not_created(etcd_prefix: str, connect: Connect) -> None:
    store, other = await connect(etcd_prefix), await connect(etcd_prefix)
    await store.create("/d")
    before_its_next_commit(store, lambda: other.delete("/d", 0))
    with pytest.raises(NoSuchNode):
        await store.create("/d/child")
    await store.create("/d")
    before_its_next_commit(store, lambda: other.multi([Delete("/d", 0), Create("/d", ephemeral=True)]))
    with pytest.raises(MetadataError, match="is ephemeral and has no children"):
        await store.create("/d/child")


async def test_path_that_another_creates_meanwhile_exists(etcd_prefix: str, connect: Connect) -> None:
    store, other = await connect(etcd_prefix), await connect(etcd_prefix)
    before_its_next_commit(store, lambda: other.create("/a", b"other"))
    with pytest.raises(NodeExists):
        await store.create("/a", b"late")
    assert (await store.get("/a"))[0] == b"other"


async def test_node_replaced_in_one_step_is_a_new_one(etcd_prefix: str, connect: Connect) -> None:
    """For etcd it is one key that is put again."""
    store = await connect(etcd_prefix)
    await store.create("/a")
    await store.set("/a", b"1", 0)
    _, before = await store.get("/a")
    await store.multi([Delete("/a", 1), Create("/a", b"new")])
    _, after = await store.get("/a")
    assert (after.version, after.created > before.created) == (0, True)
    assert await store.set("/a", b"newer", 0) == 1
    assert (await store.get("/a"))[1].created == after.created


async def test_children_are_found_over_pages_without_their_descendants(
    etcd_prefix: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "PAGE", 3)
    store = await connect(etcd_prefix)
    names = ["a", "a-", "a.b", "a0", "b", "c", "~"]
    await store.create("/d")
    for name in names:
        await store.create(f"/d/{name}")
    for path in ("/d/a/1", "/d/a/2", "/d/a/2/x", "/d/a/3", "/d/a/4", "/d/b/1", "/e", "/d-"):
        await store.create(path)
    assert await store.children("/d") == sorted(names)
    assert await store.children("/d/a") == ["1", "2", "3", "4"]
    assert await store.children("/") == ["d", "d-", "e"]


async def listed_by_pages(store: EtcdStore, before_page: Callable[[int], Awaitable[object]]) -> list[str]:
    """The children of /d, with an action before each page but the first."""
    link = store._session.link
    assert link is not None
    pages, read = 0, link.range

    async def range_later(request: RangeRequest) -> RangeResponse:
        nonlocal pages
        pages += 1
        await before_page(pages)
        return await read(request)

    link.range = range_later  # type: ignore[method-assign]
    try:
        return await store.children("/d")
    finally:
        link.range = read  # type: ignore[method-assign]


async def test_long_list_may_take_longer_than_a_call(
    etcd_prefix: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "PAGE", 1)
    store = await connect(etcd_prefix)
    names = [f"n{number:02}" for number in range(20)]
    await store.multi([Create("/d"), *(Create(f"/d/{name}") for name in names)])
    store._call_timeout_s, never = 4.0, asyncio.Event()
    assert await listed_by_pages(store, lambda _: wait_within(never, 0.25)) == names
    with pytest.raises(MetadataUnknown, match="no answer"):
        await listed_by_pages(store, lambda page: wait_within(never, 0.25 if page < 5 else 9.0))


async def test_list_whose_revision_is_compacted_is_read_again(
    etcd_prefix: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "PAGE", 2)
    store, other = await connect(etcd_prefix), await connect(etcd_prefix)
    raw = EtcdLink(etcd_prefix.partition("/")[0], None)
    await store.multi([Create("/d"), *(Create(f"/d/n{number}") for number in range(6))])

    async def compact(page: int) -> None:
        if page == 2:
            await other.delete("/d/n0", 0)
            await other.create("/d/late")
            now = (await raw.txn(TxnRequest())).header.revision
            await raw._kv.Compact(CompactionRequest(revision=now, physical=True))

    assert await listed_by_pages(store, compact) == ["late", "n1", "n2", "n3", "n4", "n5"]
    await raw.close()


# ── sessions ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_late_request_of_an_earlier_connection_is_not_done(etcd_prefix: str, connect: Connect) -> None:
    """The caller got an unknown outcome, has read since, and acts on what it saw."""
    store = await connect(etcd_prefix)
    assert store._session.link is not None
    earlier = store._session.link.guard
    raw = EtcdLink(etcd_prefix.partition("/")[0], None)
    assert (await raw.txn(TxnRequest(compare=[earlier]))).succeeded
    states = States(store)
    store.break_connection()
    await states.wait_for(SessionState.CONNECTED)
    assert not (await raw.txn(TxnRequest(compare=[earlier]))).succeeded
    assert (await raw.txn(TxnRequest(compare=[store._session.link.guard]))).succeeded
    await raw.close()


async def test_expired_session_writes_nothing(etcd_prefix: str, connect: Connect) -> None:
    store, other = await connect(etcd_prefix), await connect(etcd_prefix)
    await store.create("/a")
    raw = EtcdLink(etcd_prefix.partition("/")[0], None)
    lease = store.session
    before_its_next_commit(store, lambda: raw.revoke(lease))
    with pytest.raises(MetadataError):  # refused by etcd, or by the driver, which learns of it at the same time
        await store.set("/a", b"late", 0)
    assert (await other.get("/a"))[0] == b""
    await raw.close()


async def test_session_survives_a_killed_and_restarted_server(own_etcd: EtcdProcess, connect: Connect) -> None:
    store = await connect(f"{own_etcd.address}/kv")
    await store.create("/e", b"1", ephemeral=True)
    hint, states, session = Hint(), States(store), store.session
    store.watch("/e", hint)
    own_etcd.kill()
    await states.wait_for(SessionState.SUSPENDED)
    with pytest.raises(MetadataUnavailable):
        await store.set("/e", b"2", 0)
    restart(own_etcd)
    await states.wait_for(SessionState.CONNECTED)
    assert (store.session, states.seen) == (session, [SessionState.SUSPENDED, SessionState.CONNECTED])
    await hint.wait()
    data, stat = await store.get("/e")
    assert (data, stat.version, stat.owner) == (b"1", 0, session)
    await store.set("/e", b"2", 0)
    await hint.wait()


async def kill_and_replace(store: EtcdStore, etcd: EtcdProcess, replace: Callable[[Path], object]) -> EtcdProcess:
    """Restart the server on a directory that `replace` has changed."""
    states = States(store)
    etcd.kill()
    if store.state is SessionState.CONNECTED:
        await states.wait_for(SessionState.SUSPENDED)
    replace(etcd.directory / "data")
    return restart(etcd)


# docs/protocol.md B29
async def test_older_copy_of_etcd_is_not_used_and_the_later_one_is(
    own_etcd: EtcdProcess, connect: Connect, tmp_path: Path
) -> None:
    """Ids would be assigned again, and later ledgers would count as deleted."""
    store, older, later = await connect(f"{own_etcd.address}/kv"), tmp_path / "older", tmp_path / "later"
    process = await kill_and_replace(store, own_etcd, lambda data: shutil.copytree(data, older))

    async def is_connected() -> bool:
        return store.state is SessionState.CONNECTED

    await wait_until(is_connected, what="the same one is used")
    hint = Hint()
    store.watch("/c", hint)
    for name in ("/a", "/b", "/c"):
        await store.create(name)
    await hint.wait()
    process = await kill_and_replace(store, process, lambda data: (data.rename(later), older.rename(data)))

    async def is_refused() -> bool:
        return "an older copy of itself" in store._session.trouble

    await wait_until(is_refused, what="the older copy is refused")
    with pytest.raises(MetadataUnavailable):
        await store.create("/d")
    await kill_and_replace(store, process, lambda data: (data.rename(older), later.rename(data)))
    await wait_until(is_connected, what="the later one is used")
    assert sorted(await store.children("/")) == ["a", "b", "c"]


async def test_calls_in_flight_at_a_server_death_are_unknown_and_not_sent_late(
    own_etcd: EtcdProcess, connect: Connect
) -> None:
    store = await connect(f"{own_etcd.address}/kv")
    await store.create("/a")
    own_etcd.pause()
    reads = [asyncio.ensure_future(store.get("/a")) for _ in range(50)]
    writes = [asyncio.ensure_future(store.create(f"/late{number}")) for number in range(50)]
    await asyncio.sleep(0)
    own_etcd.kill()
    assert {type(each) for each in await asyncio.gather(*reads, return_exceptions=True)} == {MetadataUnknown}
    told = {type(each) for each in await asyncio.gather(*writes, return_exceptions=True)}
    assert told <= {MetadataUnknown, MetadataUnavailable}
    states = States(store)
    restart(own_etcd)
    await states.wait_for(SessionState.CONNECTED)
    assert await store.children("/") == ["a"]


async def test_silent_server_is_noticed_and_calls_end_in_time(own_etcd: EtcdProcess, connect: Connect) -> None:
    """For longer than the session lives. etcd decides whether the session has expired once it runs again."""
    store = await connect(f"{own_etcd.address}/kv", session_timeout_s=3)
    await store.create("/e", ephemeral=True)
    states, loop, store._call_timeout_s = States(store), asyncio.get_running_loop(), 0.2
    own_etcd.pause()
    paused_at = loop.time()
    with pytest.raises(MetadataUnknown, match=r"no answer in 0.2 s"):
        await store.get("/e")
    await states.wait_for(SessionState.SUSPENDED)

    async def is_over() -> bool:
        return loop.time() - paused_at > 5

    await wait_until(is_over)
    assert states.seen == [SessionState.SUSPENDED]
    own_etcd.resume()
    await states.wait_for(SessionState.CONNECTED)

    async def holds_it() -> bool:
        try:
            return (await store.get("/e"))[1].owner == store.session
        except NoSuchNode:
            await store.create("/e", ephemeral=True)
        except (MetadataUnavailable, MetadataUnknown):
            return False
        return False

    await wait_until(holds_it)


async def test_call_without_an_answer_ends_its_connection(own_etcd: EtcdProcess, connect: Connect) -> None:
    """Before a renewal of the lease finds out: the next one is due in minutes."""
    store = await connect(f"{own_etcd.address}/kv", session_timeout_s=1000, call_timeout_s=0.2)
    states = States(store)
    own_etcd.pause()
    with pytest.raises(MetadataUnknown):
        await store.get("/")
    await states.wait_for(SessionState.SUSPENDED)


async def test_idle_session_notices_a_silent_server(own_etcd: EtcdProcess, connect: Connect) -> None:
    store = await connect(f"{own_etcd.address}/kv", session_timeout_s=3)
    states = States(store)
    own_etcd.pause()
    await states.wait_for(SessionState.SUSPENDED)
    own_etcd.resume()
    await states.wait_for(SessionState.CONNECTED)


async def test_session_that_expired_unnoticed_is_lost_at_the_next_connection(
    etcd: str, etcd_prefix: str, connect: Connect
) -> None:
    async with Proxy(etcd) as proxy:
        store = await connect(f"{proxy.address}/{etcd_prefix.partition('/')[2]}", session_timeout_s=6)
        witness = await connect(etcd_prefix)
        await store.create("/e", ephemeral=True)
        hint, states, session = Hint(), States(store), store.session
        store.watch("/e", hint)
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


async def test_lost_endpoint_is_replaced_by_another_in_the_same_session(
    etcd: str, etcd_prefix: str, connect: Connect
) -> None:
    async with Proxy(etcd) as first, Proxy(etcd) as second:
        prefix = etcd_prefix.partition("/")[2]
        store = await connect(f"{first.address},{second.address}/{prefix}")
        await store.create("/e", ephemeral=True)
        session = store.session
        for here, other in ((first, second), (second, first)):
            states = States(store)
            assert store._session.link is not None
            if store._session.link.endpoint != here.address:
                continue
            here.cut()
            await states.wait_for(SessionState.CONNECTED)
            assert store._session.link.endpoint == other.address
            await here.mend()
        assert (await store.get("/e"))[1].owner == store.session == session


async def test_dead_endpoint_does_not_get_the_time_of_a_slow_one(
    etcd_prefix: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is down accepts no connection; after a long outage the others would be found too late for a lease."""
    monkeypatch.setattr(session_module, "ATTACH_FIRST_S", 1000.0)
    monkeypatch.setattr(session_module, "OPEN_MAX_S", 0.1)
    monkeypatch.setattr(Random, "randrange", lambda self, count: 0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        await connect(f"127.0.0.1:{silent.getsockname()[1]},{etcd_prefix}", connect_timeout_s=PATIENCE_S)


@pytest.mark.slow
async def test_dead_member_of_an_ensemble_costs_no_session(tmp_path: Path, connect: Connect) -> None:
    members = start_ensemble(tmp_path)
    try:
        store = await connect(",".join(member.address for member in members) + "/kv", connect_timeout_s=PATIENCE_S)
        await store.create("/e", ephemeral=True)
        session, states = store.session, States(store)
        for member in members:
            member.kill()

            async def works() -> bool:
                try:
                    _, stat = await store.get("/e")
                    await store.set("/e", b"x", stat.version)
                except (MetadataUnavailable, MetadataUnknown):
                    return False
                return True

            await wait_until(works, what="a write after a member died")
            restart(member)
            await wait_until(works, what="a write after it came back")
        assert SessionState.LOST not in states.seen
        assert (await store.get("/e"))[1].owner == store.session == session
    finally:
        for member in members:
            running = find_running(member.directory)
            if running is not None:
                running.kill()


# ── watches ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_watch_from_before_a_compaction_calls_everybody(etcd_prefix: str, connect: Connect) -> None:
    store, other = await connect(etcd_prefix), await connect(etcd_prefix)
    await store.create("/a")
    for version in range(5):
        await store.set("/a", b"", version)
    raw = EtcdLink(etcd_prefix.partition("/")[0], None)
    raw.guard.key = b"nobody's"
    now = (await raw.txn(TxnRequest())).header.revision
    await raw._kv.Compact(CompactionRequest(revision=now, physical=True))
    hint = Hint()
    store.watch("/never-changed", hint)
    following = asyncio.ensure_future(store._session._follow(raw, 1))
    await hint.wait()
    mine = Hint()
    store.watch("/b", mine)
    await other.create("/b")
    await mine.wait()
    await raw.close()
    await following


# ── bounds ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_missing_server_is_reported_in_time_with_the_reason(connect: Connect) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(MetadataUnavailable, match=rf"no etcd answers at {address} within 3 s: .*Connection refused"):
        await connect(address, connect_timeout_s=3)


async def test_error_quotes_a_server_that_refuses_this_client(own_etcd: EtcdProcess, connect: Connect) -> None:
    """The operator must not search for a server that is down when the problem is a permission."""
    channel = grpc.aio.insecure_channel(own_etcd.address)
    for method, request in (
        ("UserAdd", {1: "root", 2: "secret"}),
        ("UserGrantRole", {1: "root", 2: "root"}),
        ("AuthEnable", {}),
    ):
        body = b"".join(bytes([key << 3 | 2, len(text)]) + text.encode() for key, text in request.items())
        await channel.unary_unary(f"/etcdserverpb.Auth/{method}")(body)
    await channel.close()
    with pytest.raises(MetadataDenied, match="etcdserver: user name is empty"):
        await connect(own_etcd.address, connect_timeout_s=PATIENCE_S)


async def test_calls_in_flight_are_bounded(etcd_prefix: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALLS_MAX", 10)
    store = await connect(etcd_prefix)
    results = await asyncio.gather(*(store.children("/") for _ in range(20)), return_exceptions=True)
    assert [type(result) for result in results] == [list] * 10 + [MetadataUnavailable] * 10
    assert await store.children("/") == []


async def test_close_does_not_wait_for_a_silent_server(own_etcd: EtcdProcess) -> None:
    store = await EtcdStore.connect(f"{own_etcd.address}/kv")
    await ensure_path(store, "/a/b")
    own_etcd.pause()
    await store.close()
    with pytest.raises(MetadataUnavailable):
        await store.get("/")
