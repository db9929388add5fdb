"""Transactions over several partitions at every endpoint of real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random
from typing import Any

import aiohttp
import grpc
import pytest

from kvstore.client import AsyncClient, AsyncTransaction, Client, Level, Transaction
from kvstore.errors import ConditionFailed, InvalidRequest
from kvstore.partition.state.commands import Flag
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc.channels import channel_options
from kvstore.rpc.status import from_rpc_error
from tests.client.serving import PATIENT
from tests.cluster.harness import Cluster, running_cluster
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        running.wait_log_version()
        yield running


async def keys_of(client: AsyncClient, prefix: bytes, count: int = 1) -> list[bytes]:
    """Return `count` keys of each partition, in turn."""
    found: dict[str, list[bytes]] = {each: [] for each in client.cluster.partitions()}
    for number in range(10_000):
        key = b"%b/%d" % (prefix, number)
        of_one = found[client.cluster.partition_of(key)]
        if len(of_one) < count:
            of_one.append(key)
        if all(len(each) == count for each in found.values()):
            break
    assert len(found) > 1
    return [each[place] for place in range(count) for each in found.values()]


async def total(client: AsyncClient, accounts: list[bytes]) -> int:
    async with client.transaction() as txn:
        found = await txn.get_many(accounts)
    return sum(int(item.value) for item in found.values())


# docs/protocol.md Tx5, Tx11
async def test_transfers_of_both_clients_keep_the_sum(cluster: Cluster) -> None:
    async with AsyncClient(cluster.url + PATIENT) as client, AsyncClient(cluster.url + PATIENT) as reader:
        accounts = await keys_of(client, b"account", 2)
        await client.put_many(dict.fromkeys(accounts, b"100"))
        whole = 100 * len(accounts)
        is_over, sums = asyncio.Event(), list[int]()

        async def pay(rng: Random) -> None:
            source, target = rng.sample(accounts, 2)

            async def work(txn: AsyncTransaction) -> None:
                found = await txn.get_many([source, target])
                txn.put(source, b"%d" % (int(found[source].value) - 1))
                txn.put(target, b"%d" % (int(found[target].value) + 1))

            await client.transact(work, attempts=100)

        def pay_blocking(seed: int) -> None:
            rng = Random(seed)
            with Client(cluster.url + PATIENT) as blocking:
                for _ in range(10):
                    source, target = rng.sample(accounts, 2)

                    def work(txn: Transaction, source: bytes = source, target: bytes = target) -> None:
                        txn.increment(source, -1)
                        txn.put(target, b"%d" % (int(txn.get(target).value) + 1))  # type: ignore[union-attr]

                    blocking.transact(work, attempts=100)

        async def look() -> None:
            while not is_over.is_set():
                sums.append(await reader.transact(lambda txn: sum_of(txn, accounts), attempts=100))

        async def pay_often(seed: int) -> None:
            rng = Random(seed)
            for _ in range(10):
                await pay(rng)

        looking = asyncio.create_task(look())
        await asyncio.gather(*map(pay_often, range(4)), *(asyncio.to_thread(pay_blocking, seed) for seed in (4, 5)))
        is_over.set()
        await looking
        assert set(sums) == {whole}
        assert await total(client, accounts) == whole


async def sum_of(txn: AsyncTransaction, accounts: list[bytes]) -> int:
    return sum(int(item.value) for item in (await txn.get_many(accounts)).values())


# docs/protocol.md Tx12
async def test_session_reads_see_the_whole_transaction(cluster: Cluster) -> None:
    async with AsyncClient(cluster.url + PATIENT) as client, AsyncClient(cluster.url + PATIENT) as other:
        keys = await keys_of(client, b"session")
        for number in range(10):

            async def work(txn: AsyncTransaction, value: bytes = b"%d" % number) -> None:
                for key in keys:
                    txn.put(key, value)

            await client.transact(work)
            other.absorb(client.token)
            found = await other.get_many(keys, level=Level.SESSION)
            assert {item.value for item in found.values()} == {b"%d" % number}
            assert len(found) == len(keys)


# docs/protocol.md Tx11
async def test_read_transaction_logs_nothing_and_finds_absent_keys(cluster: Cluster) -> None:
    async with AsyncClient(cluster.url + PATIENT) as client:
        present, absent = await keys_of(client, b"present"), await keys_of(client, b"absent")
        await client.put_many(dict.fromkeys(present, b"1"))
        with_one, with_all = [*present, absent[0]], [*present, *absent]

        async def logs_nothing() -> bool:  # once the ends of earlier transactions are logged
            return await positions_of(cluster, with_one) == await positions_of(cluster, with_one)

        await wait_until(logs_nothing)
        async with client.transaction() as txn:
            found = await txn.get_many(with_all)
        assert sorted(found) == sorted(present)


async def positions_of(cluster: Cluster, keys: list[bytes]) -> dict[str, int]:
    """Return the positions of a transaction that reads the keys over gRPC."""
    operations = [kv_pb2.Operation(code=kv_pb2.GET, key=key) for key in keys]
    answer = await over_grpc(cluster, operations)
    return {each.partition: each.sequence for each in answer.positions}


async def over_grpc(cluster: Cluster, operations: list[kv_pb2.Operation]) -> Any:
    address = cluster.url.removeprefix("kv://").partition(",")[0]
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub: Any = kv_pb2_grpc.KVStub(channel)
        return await stub.Transact(kv_pb2.BatchRequest(operations=operations), timeout=PATIENCE_S)


async def test_grpc_carries_out_transactions_and_names_an_unmet_condition(cluster: Cluster) -> None:
    async with AsyncClient(cluster.url + PATIENT) as client:
        keys = await keys_of(client, b"grpc")
        absent = kv_pb2.Options(flags=Flag.IF_ABSENT)
        operations = [kv_pb2.Operation(code=kv_pb2.PUT, key=key, value=b"1", options=absent) for key in keys]
        answer = await over_grpc(cluster, operations)
        assert len(answer.results) == len(keys)
        assert {each.partition for each in answer.positions} == set(client.cluster.partitions())
        assert {item.value for item in (await client.get_many(keys)).values()} == {b"1"}
        for first in range(len(keys)):  # each partition is home once
            order = [*keys[first:], *keys[:first]]
            operations = [kv_pb2.Operation(code=kv_pb2.DELETE, key=key) for key in order[:-1]]
            operations.append(kv_pb2.Operation(code=kv_pb2.CHECK, key=order[-1], options=absent))
            with pytest.raises(grpc.RpcError) as caught:
                await over_grpc(cluster, operations)
            error = from_rpc_error(caught.value)  # type: ignore[arg-type]
            assert isinstance(error, ConditionFailed)
            assert error.key == order[-1]
        assert len(await client.get_many(keys)) == len(keys)


async def test_http_carries_out_transactions(cluster: Cluster) -> None:
    async with AsyncClient(cluster.url + PATIENT) as client, aiohttp.ClientSession() as http:
        keys = await keys_of(client, b"http")
        url = "http://{}:{}/v1/transaction".format(*cluster.address("n1", "http"))
        puts = [{"operation": "put", "key": key.decode(), "value": "1", "if_absent": True} for key in keys]
        async with http.post(url, json={"operations": puts}) as answer:
            assert answer.status == 200, await answer.text()
            positions = (await answer.json())["positions"]
            assert positions.keys() == set(client.cluster.partitions())
            token = answer.headers["Kvstore-Token"]
        async with http.post(url, json={"operations": puts}, headers={"Kvstore-Token": token}) as answer:
            failure = await answer.json()
            assert (answer.status, failure["reason"]) == (412, "CONDITION_FAILED")
            assert failure["key"] in {key.decode() for key in keys}
        reads = [{"operation": "get", "key": key.decode()} for key in keys]
        async with http.post(url, json={"operations": reads}) as answer:
            assert [each["item"]["value"] for each in (await answer.json())["results"]] == ["1"] * len(keys)


async def test_limits_hold_at_the_client_and_at_the_server(cluster: Cluster) -> None:
    operations = [kv_pb2.Operation(code=kv_pb2.DELETE, key=b"limit/%d" % number) for number in range(101)]
    with pytest.raises(grpc.RpcError) as caught:
        await over_grpc(cluster, operations)
    assert isinstance(from_rpc_error(caught.value), InvalidRequest)  # type: ignore[arg-type]
    async with AsyncClient(cluster.url + PATIENT) as client:

        async def work(txn: AsyncTransaction) -> None:
            for each in operations:
                txn.delete(each.key)

        with pytest.raises(InvalidRequest, match="at most 100 keys"):
            await client.transact(work)
