"""The order in which the etcd driver carries out concurrent and cancelled calls. Real servers."""

from __future__ import annotations

import asyncio
import gc

import pytest

from kvstore.devcluster.etcd import EtcdProcess
from kvstore.env.nursery import shielded
from kvstore.errors import MetadataUnknown
from kvstore.meta.store import SessionState
from kvstore.proto.etcd_pb2 import TxnRequest, TxnResponse
from tests.meta.drivers import States
from tests.meta.etcd.test_store_sessions import Connect, before_its_next_commit, connect

__all__ = ["connect"]

pytestmark = pytest.mark.needs_etcd


async def test_sequential_number_of_another_writer_is_not_used_twice(etcd_prefix: str, connect: Connect) -> None:
    store, other = await connect(etcd_prefix), await connect(etcd_prefix)
    await store.create("/d")
    before_its_next_commit(store, lambda: other.create("/d/x-", sequential=True))
    assert await store.create("/d/y-", sequential=True) == "/d/y-0000000001"
    created = await asyncio.gather(*(each.create("/d/z-", sequential=True) for each in [store, other] * 20))
    assert len(set(created)) == 40


async def test_sequential_numbers_of_a_process_are_assigned_one_by_one(etcd_prefix: str, connect: Connect) -> None:
    """Concurrent calls would each be the last of a hundred attempts, for example when all partitions begin a ledger."""
    store = await connect(etcd_prefix)
    await store.create("/d")
    link = store._session.link
    assert link is not None
    txn, commits = link.txn, 0

    async def counted(request: TxnRequest) -> TxnResponse:
        nonlocal commits
        commits += bool(request.compare)
        return await txn(request)

    link.txn = counted  # type: ignore[method-assign]
    created = await asyncio.gather(*(store.create("/d/z-", sequential=True) for _ in range(50)))
    assert (created, commits) == ([f"/d/z-{number:010d}" for number in range(50)], 50)


async def test_cancelled_call_disturbs_no_other(etcd_prefix: str, connect: Connect) -> None:
    store = await connect(etcd_prefix)
    call = asyncio.ensure_future(store.create("/a"))
    await asyncio.sleep(0)
    call.cancel()
    await store.create("/b")
    assert "b" in await store.children("/")
    assert store.state is SessionState.CONNECTED


async def test_cancelled_write_is_done_before_later_calls(etcd_prefix: str, connect: Connect) -> None:
    """As in ZooKeeper. A replica that is stopped while it claims looks for its claim, to withdraw it."""
    store, other = await connect(etcd_prefix), await connect(etcd_prefix)
    link = store._session.link
    assert link is not None
    txn, is_sent, may_go = link.txn, asyncio.Event(), asyncio.Event()
    at_etcd: list[asyncio.Task[TxnResponse]] = []

    async def slow(request: TxnRequest) -> TxnResponse:
        await may_go.wait()
        return await txn(request)

    async def sent(request: TxnRequest) -> TxnResponse:
        if not request.compare:
            return await txn(request)
        at_etcd.append(asyncio.create_task(slow(request)))
        is_sent.set()
        return await shielded(at_etcd[-1])  # etcd does not take back what it has proposed

    link.txn = sent  # type: ignore[method-assign]
    call = asyncio.ensure_future(store.create("/a", ephemeral=True))
    await is_sent.wait()
    call.cancel()
    await asyncio.wait([call])
    later = [asyncio.ensure_future(store.children("/")) for _ in range(2)]
    for _ in range(10):
        await other.children("/")
    assert not any(each.done() for each in later)
    may_go.set()
    assert await asyncio.gather(*later) == [["a"], ["a"]]
    await store.delete("/a", 0)


async def test_cancelled_call_without_an_answer_blocks_no_other_forever(
    own_etcd: EtcdProcess, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """Its outcome must not be reported as an exception that nobody retrieved, either."""
    store = await connect(f"{own_etcd.address}/kv", session_timeout_s=1000)
    is_sent = asyncio.Event()

    async def told() -> None:
        own_etcd.pause()
        is_sent.set()

    before_its_next_commit(store, told)
    call = asyncio.ensure_future(store.create("/a"))
    await is_sent.wait()
    call.cancel()
    states = States(store)
    in_time, store._call_timeout_s = store._call_timeout_s, 0.2
    with pytest.raises(MetadataUnknown, match=r"no answer in 0.2 s"):
        await store.get("/")
    await states.wait_for(SessionState.SUSPENDED)
    store._call_timeout_s = in_time
    own_etcd.resume()
    await states.wait_for(SessionState.CONNECTED)
    await store.get("/")
    del call
    gc.collect()
    assert "never retrieved" not in caplog.text
