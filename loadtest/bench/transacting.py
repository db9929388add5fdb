"""The two stores whose transactions are measured: ours and etcd's, each over gRPC without a client library, because the
time of a library would be part of the figures.

A key belongs to a group. Our groups are partitions; etcd has one range, so that groups differ in name only there.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, Protocol

import grpc

from kvstore import backoff
from kvstore.client import AsyncClient, ClientConfig
from kvstore.errors import ConditionFailed, Conflict, NotLeader, StoreError, Unavailable
from kvstore.proto import etcd_pb2, kv_pb2, kv_pb2_grpc
from kvstore.proto.etcd_pb2_grpc import KVStub as EtcdStub
from kvstore.rpc.channels import channel_options
from kvstore.rpc.status import from_rpc_error

FIRST_PAUSE_S, PAUSE_MAX_S = 0.002, 0.25
"""Bounds of the random pause after the first conflict of a transaction, and after later ones."""
TIMEOUT_S = 30.0
CHANNELS = 8
"""Number of connections to etcd. etcd's own clients use several, because a single one is a bottleneck."""


class Lost(Exception):
    """A transaction met a change or an intent of another one, or a participant did not answer. Nothing was done."""


class Transacting(Protocol):
    """A store with transactions on several keys."""

    groups: int

    def key(self, group: int, number: int) -> bytes:
        """Return a key of a group."""

    async def put(self, keys: Sequence[bytes], value: bytes) -> None:
        """Write all keys in one transaction, whatever they hold. Raises Lost."""

    async def read(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Return the value and the version of each key, each by itself; b"" and 0 for an absent key."""

    async def put_if(self, versions: dict[bytes, int], value: bytes) -> None:
        """Write all keys in one transaction if each has its version. Raises Lost."""

    async def add(self, keys: Sequence[bytes]) -> None:
        """Add 1 to the number in each key in one transaction. Raises Lost."""

    async def close(self) -> None: ...


async def rewrite(store: Transacting, keys: Sequence[bytes], value: bytes, pauses: Iterator[float], sleep: Any) -> int:
    """Read the keys and write them if none has changed, until that succeeds. Return the number of attempts."""
    for attempt in itertools.count(1):
        found = await store.read(keys)
        try:
            await store.put_if({key: version for key, (_, version) in zip(keys, found, strict=True)}, value)
        except Lost:
            await sleep(next(pauses))
        else:
            return attempt
    raise AssertionError


def pauses(random: Random) -> Iterator[float]:
    """Return the pauses between the attempts of one transaction."""
    return backoff.delays(random, first_s=FIRST_PAUSE_S, cap_s=PAUSE_MAX_S)


class Ours:
    """A cluster of this store. Transactions go to the leader of their first key."""

    def __init__(self, client: AsyncClient, tags: Sequence[bytes]) -> None:
        self._client, self._tags = client, tags
        self.groups = len(tags)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, Any] = {}
        self._id, self._sequences = uuid.uuid4().bytes, itertools.count(1)

    @classmethod
    async def open(cls, endpoints: Sequence[str]) -> Ours:
        """Connect, and find a tag for each partition."""
        client = await AsyncClient(ClientConfig(endpoints=tuple(endpoints), timeout_s=TIMEOUT_S)).open()
        wanted, tags = len(client.cluster.partitions()), dict[str, bytes]()
        for number in itertools.count():
            if len(tags) == wanted:
                break
            tags.setdefault(client.cluster.partition_of(b"{t%d}" % number), b"t%d" % number)
        return cls(client, [tag for _, tag in sorted(tags.items())])

    def key(self, group: int, number: int) -> bytes:
        return b"{%b}%09d" % (self._tags[group], number)

    async def put(self, keys: Sequence[bytes], value: bytes) -> None:
        await self._send(keys, [kv_pb2.Operation(code=kv_pb2.PUT, key=key, value=value) for key in keys])

    async def read(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        found = await self._client.get_many(keys)
        return [(found[key].value, found[key].version) if key in found else (b"", 0) for key in keys]

    async def put_if(self, versions: dict[bytes, int], value: bytes) -> None:
        conditions = {
            key: kv_pb2.Options(flags=kv_pb2.IF_VERSION, version=version)
            if version
            else kv_pb2.Options(flags=kv_pb2.IF_ABSENT)
            for key, version in versions.items()
        }
        await self._send(
            list(versions),
            [
                kv_pb2.Operation(code=kv_pb2.PUT, key=key, value=value, options=options)
                for key, options in conditions.items()
            ],
        )

    async def add(self, keys: Sequence[bytes]) -> None:
        one = kv_pb2.Options(delta=1)
        await self._send(keys, [kv_pb2.Operation(code=kv_pb2.INCREMENT, key=key, options=one) for key in keys])

    async def _send(self, keys: Sequence[bytes], operations: list[kv_pb2.Operation]) -> None:
        cluster = self._client.cluster
        partitions = [cluster.partition_of(key) for key in keys]
        address = cluster.leader_of(partitions[0])
        stub = self._stubs.get(address)
        if stub is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=channel_options())
            stub = self._stubs[address] = kv_pb2_grpc.KVStub(channel)
        sequence = next(self._sequences)
        request = kv_pb2.RequestId(
            client=self._id,
            sequence=sequence,
            first_unacknowledged=max(1, sequence - 500),
            seen_ms=cluster.time_ms(),
        )
        call = stub.Batch if len(set(partitions)) == 1 else stub.Transact
        try:
            await call(kv_pb2.BatchRequest(operations=operations, request=request), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as failure:
            error: StoreError = from_rpc_error(failure)
            if isinstance(error, Conflict | ConditionFailed | NotLeader | Unavailable):
                raise Lost(str(error)) from None
            raise error from None

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        await self._client.close()


class Etcd:
    """An etcd cluster."""

    def __init__(self, addresses: Sequence[str], groups: int) -> None:
        self.groups = groups
        options = (("grpc.use_local_subchannel_pool", 1),)
        wanted = itertools.islice(itertools.cycle(addresses), CHANNELS)
        self._channels = [grpc.aio.insecure_channel(address, options=options) for address in wanted]
        self._stubs = itertools.cycle([EtcdStub(channel) for channel in self._channels])

    def key(self, group: int, number: int) -> bytes:
        return b"g%02d-%09d" % (group, number)

    async def put(self, keys: Sequence[bytes], value: bytes) -> None:
        await self._transact([], keys, [value] * len(keys))

    async def read(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        asked = [etcd_pb2.RequestOp(request_range=etcd_pb2.RangeRequest(key=key)) for key in keys]
        found = await next(self._stubs).Txn(etcd_pb2.TxnRequest(success=asked), timeout=TIMEOUT_S)
        rows = [each.response_range.kvs for each in found.responses]
        return [(row[0].value, row[0].mod_revision) if row else (b"", 0) for row in rows]

    @staticmethod
    def _is_at(key: bytes, version: int) -> Any:
        equal, revision = etcd_pb2.Compare.EQUAL, etcd_pb2.Compare.MOD
        return etcd_pb2.Compare(result=equal, target=revision, key=key, mod_revision=version)

    async def put_if(self, versions: dict[bytes, int], value: bytes) -> None:
        compares = [self._is_at(key, version) for key, version in versions.items()]
        await self._transact(compares, list(versions), [value] * len(versions))

    async def add(self, keys: Sequence[bytes]) -> None:
        found = await self.read(keys)
        compares = [self._is_at(key, version) for key, (_, version) in zip(keys, found, strict=True)]
        values = [b"%d" % (int(value or 0) + 1) for value, _ in found]
        await self._transact(compares, keys, values)

    async def _transact(self, compares: list[etcd_pb2.Compare], keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        puts = [
            etcd_pb2.RequestOp(request_put=etcd_pb2.PutRequest(key=key, value=value))
            for key, value in zip(keys, values, strict=True)
        ]
        asked = etcd_pb2.TxnRequest(compare=compares, success=puts)
        if not (await next(self._stubs).Txn(asked, timeout=TIMEOUT_S)).succeeded:
            raise Lost("a key has changed")

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
