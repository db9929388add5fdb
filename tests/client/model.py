"""A cluster in memory that keeps the store's promises, for tests of the gRPC servers and both clients.

Partitions are dicts, shared by the servers of the cluster; each server is a Backend. Tests request faults by name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import astuple
from sortedcontainers import SortedDict

from kvstore import versions
from kvstore.errors import ConditionFailed, InvalidRequest, Moved, NotLeader, RequestExpired, StoreError, Unavailable
from kvstore.partition.state.commands import NOT_NOW, Code, Flag, Get, NotNow, Op, Record, RequestId, Sink, Transact
from kvstore.partition.state.rows import encode_record
from kvstore.partition.transactions.limits import check_transaction
from kvstore.ring.ring import Ring
from kvstore.types import PartitionId, ServerId
from tests.ring.rings import new_ring

WINDOW_MS = 600_000
PAGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Endpoint:
    grpc: str
    resp: str = ""
    http: str = ""
    zone: str = ""
    bookie: str = ""
    draining: bool = False
    can: int = versions.LATEST


@dataclass(frozen=True)
class View:
    ring: Ring
    leaders: dict[PartitionId, tuple[ServerId, int]]
    servers: dict[ServerId, Endpoint]


@dataclass
class ModelPartition:
    """One partition's state and its retry table."""

    id: PartitionId
    now_ms: int = 1_000_000
    sequence: int = 0
    data: SortedDict[bytes, Record] = field(default_factory=SortedDict)
    done: dict[tuple[bytes, int], Any] = field(default_factory=dict)
    applied: list[tuple[bytes, int]] = field(default_factory=list)
    """Request ids in the order in which they were applied; none may occur twice."""

    def run(self, op: Op, evaluate: Callable[[Op], Any] | None = None) -> Any:
        """Return the result of an operation, which `evaluate` carries out if it is given."""
        evaluate = evaluate or self.evaluate
        request: RequestId | None = op.request if isinstance(op.request, RequestId) else None
        try:
            if request is None:
                return evaluate(op)
            name = (request.client, request.sequence)
            if name in self.done:
                return self.done[name]
            if request.seen_ms and request.seen_ms < self.now_ms - WINDOW_MS:
                raise RequestExpired("older than the window")
            result = self.done[name] = evaluate(op)
            self.applied.append(name)
            return result
        except StoreError as error:
            return error

    def evaluate(self, op: Op) -> Any:
        match (op.code, *astuple(op)):
            case (Code.GET, key, _, _):
                return self.data.get(key)
            case (Code.META, key, _, _):
                found = self.data.get(key)
                return None if found is None else (len(found.value), *found[1:])
            case (Code.PUT, key, value, expires_ms, flags, version, _):
                return self._put(key, value, expires_ms, flags, version)
            case (Code.DELETE, key, flags, version, _):
                return self._delete(key, flags, version)
            case (Code.INCREMENT, key, delta, _):
                return self._increment(key, delta)
            case (Code.APPEND, key, suffix, _):
                old = self.data.get(key)
                value = (old.value if old else b"") + suffix
                return len(value), self._write(key, value)
            case (Code.EXPIRE, key, expires_ms, flags, _):
                old = self.data.get(key)
                if old is None:
                    return False
                due = self.now_ms + expires_ms if flags & Flag.RELATIVE_TTL else expires_ms
                self._write(key, old.value, due)
                return True
            case (Code.CHECK, key, flags, version, _):
                self._check(key, flags, version)
                return self.data[key].version if key in self.data else 0
            case (Code.BATCH, _, ops, flags, _):
                return self._batch(ops, flags)
            case (Code.DELETE_RANGE, start, end, _):
                doomed = [key for key in self.data if key >= start and (not end or key < end)]
                for key in doomed:
                    self._delete(key, 0, 0)
                return len(doomed)
            case (Code.SCAN | Code.RANGE, start, end, limit, flags, _, _):
                return self._range(start, end, limit, flags)
            case (Code.COUNT, *_):
                return len(self.data)
        raise InvalidRequest(f"unknown operation {op.code}")

    def _increment(self, key: bytes, delta: int) -> Any:
        old = self.data.get(key)
        try:
            number = int(old.value if old else 0) + delta
        except ValueError:
            raise InvalidRequest("the value is not an integer") from None
        return number, self._write(key, b"%d" % number)

    def _check(self, key: bytes, flags: int, version: int) -> None:
        old = self.data.get(key)
        found = old.version if old else 0
        if (
            (flags & Flag.IF_ABSENT and old)
            or (flags & Flag.IF_PRESENT and not old)
            or (flags & Flag.IF_VERSION and found != version)
        ):
            raise ConditionFailed(found)

    def _put(self, key: bytes, value: bytes, expires_ms: int, flags: int, version: int) -> Any:
        old = self.data.get(key)
        due = self.now_ms + expires_ms if flags & Flag.RELATIVE_TTL else expires_ms
        try:
            self._check(key, flags, version)
        except ConditionFailed:
            if flags & Flag.RETURN_OLD:
                return False, old.version if old else 0, old
            raise
        new = self._write(key, value, due)
        return (True, new, old) if flags & Flag.RETURN_OLD else new

    def _delete(self, key: bytes, flags: int, version: int) -> Any:
        self._check(key, flags, version)
        old = self.data.pop(key, None)
        if old is not None:
            self.sequence += 1
        sequence = self.sequence if old is not None else 0
        return (sequence, old) if flags & Flag.RETURN_OLD else sequence

    def _write(self, key: bytes, value: bytes, expires_ms: int = 0) -> int:
        self.sequence += 1
        old = self.data.get(key)
        created = old.created if old else self.sequence
        self.data[key] = Record(value, self.sequence, created, self.now_ms, expires_ms)
        return self.sequence

    def _batch(self, ops: tuple[Op, ...], flags: int) -> list[Any]:
        before = (self.sequence, self.data.copy())
        results: list[Any] = []
        for op in ops:
            try:
                results.append(self.evaluate(op))
            except StoreError as error:
                if not flags & Flag.INDEPENDENT:
                    self.sequence, self.data = before
                    raise
                results.append(error)
        return results

    def _scan(self, start: bytes, end: bytes, limit: int, flags: int) -> Any:
        """Return up to `limit` keys or a page of bytes, and where to continue: a start, or an end when reading
        backwards."""
        items: list[tuple[bytes, Record]] = []
        size, back, last = 0, bool(flags & Flag.REVERSE), b""
        for key in self.data.irange(start, end or None, inclusive=(True, False), reverse=back):
            if len(items) >= limit or size >= PAGE_BYTES:
                return items, last if back else key
            items.append((key, self.data[key]._replace(value=b"") if flags & Flag.KEYS_ONLY else self.data[key]))
            size += len(key) + len(self.data[key].value)
            last = key
        return items, None

    def _range(self, start: bytes, end: bytes, limit: int, flags: int) -> Any:
        items, following = self._scan(start, end, limit, flags)
        if flags & Flag.COUNT_ONLY:
            return len(items), following
        return ([key for key, _ in items] if flags & Flag.BARE else items), following


class ModelCluster:
    """Partitions, their leaders, and the servers in front of them."""

    def __init__(self, servers: int = 3, partitions: int = 3, id: str = "c1") -> None:
        self.id = id
        self.ids = [ServerId(f"n{i + 1}") for i in range(servers)]
        names = [PartitionId(f"p{i + 1}") for i in range(partitions)]
        self.ring = new_ring(names, dict.fromkeys(self.ids, ""), servers)
        self.partitions = {name: ModelPartition(name) for name in names}
        self.epochs = dict.fromkeys(names, 1)
        self.endpoints: dict[ServerId, Endpoint] = {}
        self.leaders: dict[PartitionId, ServerId | None] = {
            name: self.ids[place % servers] for place, name in enumerate(names)
        }
        self.servers = [ModelServer(self, server) for server in self.ids]

    def lead(self, partition: PartitionId, server: ServerId | None) -> None:
        """Make `server` the leader."""
        self.leaders[partition] = server
        self.epochs[partition] += 1
        self.changed()

    def changed(self) -> None:
        for server in self.servers:
            server.refresh()

    def key_of(self, partition: PartitionId, number: int = 0) -> bytes:
        """Return the `number`th of many keys that the partition owns."""
        owned = (key for i in range(10_000) if self.ring.partition_of(key := b"key-%d" % i) == partition)
        return next(key for place, key in enumerate(owned) if place == number)

    def leaderless(self, op: Op) -> str:
        """Return a partition of a transaction that has no leader, or an empty string."""
        owners = {self.ring.partition_of(each.key) for each in op.ops}
        return next((each for each in sorted(owners) if self.leaders[each] is None), "")

    def transact(self, op: Op) -> Any:
        """Carry out a transaction over all partitions at this moment. Raises StoreError, and undoes it then."""
        owners = [self.partitions[self.ring.partition_of(each.key)] for each in op.ops]
        before = [(each, each.sequence, each.data.copy()) for each in owners]
        results: list[Any] = []
        for owner, each in zip(owners, op.ops, strict=True):
            try:
                results.append(owner.evaluate(each))
            except StoreError as error:
                if isinstance(op, Transact) and op.flags & Flag.INDEPENDENT and each.code != Code.CHECK:
                    results.append(error)
                    continue
                for changed, sequence, data in before:
                    changed.sequence, changed.data = sequence, data
                if isinstance(error, ConditionFailed):
                    raise ConditionFailed(error.version, each.key) from None
                raise
        return results, sorted({(each.id, each.sequence) for each in owners})

    def doubly_applied(self) -> list[tuple[bytes, int]]:
        names = [name for partition in self.partitions.values() for name in partition.applied]
        return sorted({name for name in names if names.count(name) > 1})


def _let_pass(op: Op, answer: Callable[[Any], None]) -> bool:
    return False


class ModelServer:
    """A Backend over the cluster's partitions. It forwards to the leader in no time."""

    def __init__(self, cluster: ModelCluster, id: ServerId) -> None:
        self.cluster, self.id = cluster, id
        self.topology = View(cluster.ring, {}, {})
        self.forwards = True
        self.intercept: Callable[[Op, Callable[[Any], None]], bool] = _let_pass
        """May answer, keep or drop an operation; returns True if it has done so."""
        self.seen: list[Op] = []
        self._listeners: list[Callable[[], None]] = []

    def refresh(self) -> None:
        leaders = {
            partition: (leader, self.cluster.epochs[partition])
            for partition, leader in self.cluster.leaders.items()
            if leader is not None
        }
        self.topology = View(self.cluster.ring, leaders, dict(self.cluster.endpoints))
        for listener in list(self._listeners):
            listener()

    def on_topology(self, changed: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(changed)
        return lambda: self._listeners.remove(changed)

    def progress(self, partition: PartitionId) -> tuple[int, int]:
        found = self.cluster.partitions.get(partition)
        return (found.sequence, found.now_ms) if found else (0, 0)

    def submit(
        self,
        ops: Sequence[Op],
        sink: Sink,
        tokens: Sequence[int],
        ring_version: int = 0,
        partition: PartitionId | None = None,
    ) -> None:
        self.seen += ops
        loop = asyncio.get_running_loop()

        def answer(token: int, result: Any) -> None:
            sink.complete(token, result)
            sink.flush()

        for op, token in zip(ops, tokens, strict=True):
            if not self.intercept(op, partial(answer, token)):
                loop.call_soon(lambda op=op, token=token: answer(token, self._result(op, partition, ring_version)))

    def read_now(self, keys: list[bytes]) -> list[bytes | None] | NotNow:
        ring, ops = self.cluster.ring, [Get(key, 0, 0) for key in keys]
        if self.intercept is not _let_pass or any(
            self.cluster.leaders[ring.partition_of(key)] != self.id for key in keys
        ):
            return NOT_NOW
        found = [self._result(op, None) for op in ops]
        if not all(each is None or isinstance(each, Record) for each in found):
            return NOT_NOW
        self.seen += ops
        return [None if each is None else encode_record(*each) for each in found]

    def _result(self, op: Op, partition: PartitionId | None, ring_version: int = 0) -> Any:
        keyless = op.code in (Code.SCAN, Code.RANGE, Code.SCAN_TOKENS, Code.COUNT, Code.DELETE_RANGE)
        if keyless and ring_version and ring_version != self.cluster.ring.version:
            return Moved("", self.cluster.ring.version)
        owner = partition if keyless else self.cluster.ring.partition_of(op.key)
        if owner is None:
            return InvalidRequest("want a partition")
        if isinstance(op, Transact):
            try:
                check_transaction(op, self.cluster.ring.partition_of)
            except InvalidRequest as error:
                return error
        if op.code == Code.TRANSACT and (without := self.cluster.leaderless(op)):
            return Unavailable(f"{without} has no leader")
        leader = self.cluster.leaders[owner]
        if leader is None or (leader != self.id and not self.forwards):
            endpoint = self.cluster.endpoints.get(leader) if leader else None
            return NotLeader(owner, leader or "", endpoint.grpc if endpoint else "")
        if op.code == Code.TRANSACT:
            return self.cluster.partitions[owner].run(op, self.cluster.transact)
        return self.cluster.partitions[owner].run(op)
