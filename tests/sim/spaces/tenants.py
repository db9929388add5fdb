"""Namespaces in a simulated cluster: users whose keys have quotas, a rate and a default TTL, and judges of what
leaders count and admit. The judges read engines and entries in flight, and nothing that leaders have counted
themselves (docs/protocol.md, N1 to N3)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from kvstore.access.ranges import end_of_prefix
from kvstore.errors import QuotaExceeded, RateExceeded
from kvstore.meta.tables.namespaces import NamespaceStore
from kvstore.namespaces import Add, Book, Meter, Namespace
from kvstore.namespaces.book import Amount
from kvstore.partition.leading.leader import Leader
from kvstore.partition.leading.usage import Usage
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Flag
from kvstore.partition.state.rows import ALL_ORDER, ORDER, data_key, record_of
from kvstore.types import PartitionId
from tests.sim.clients import Identity, Worker
from tests.sim.cluster import Cluster
from tests.sim.judges.operations import Operation
from tests.sim.judges.probes import declare, probe
from tests.sim.nodes import Node
from tests.sim.world.loop import current_node

declare("tenant.counted", "tenant.judged", "tenant.quota", "tenant.rate")

KEYS = 14
PAUSE_S = 0.05
COUNTED_S_MAX = 60.0


def drawn(random: Random) -> tuple[Namespace, ...]:
    """Draw the namespaces of one run: over keys of tenants, some of which are refused, and over other keys, which
    must not be affected."""
    ttl_ms, rate = random.choice((0, 0, 1_500)), random.choice((0, 0, 15))
    return (
        Namespace(name="appends", prefix=b"ar", bytes_max=random.choice((300, 0))),
        Namespace(name="registers", prefix=b"r", keys_max=1_000),
        Namespace(
            name="tenants", prefix=b"n/", keys_max=random.randint(4, KEYS), bytes_max=random.randint(150, 900),
            ttl_ms=ttl_ms, ops_per_s=rate,
        ),
    )  # fmt: skip


class Tenants:
    """The users of one run, and its namespaces."""

    def __init__(self, cluster: Cluster, spaces: tuple[Namespace, ...]) -> None:
        self._cluster, self._spaces = cluster, spaces
        self._stopping = False
        self._numbers = 0

    async def define(self) -> None:
        if not self._spaces:
            return
        store = await self._cluster.metadata.connect()
        for each in self._spaces:
            await NamespaceStore(store).change(Add(each))
        await store.close()

    def users(self, count: int) -> list[Coroutine[Any, Any, None]]:
        random = self._cluster.world.fork("tenants")
        return [self._live(f"tenant{number}", Random(random.getrandbits(64))) for number in range(count)]

    def stop(self) -> None:
        self._stopping = True

    async def _live(self, name: str, random: Random) -> None:
        worker = Worker(self._cluster, name, random, Identity(random))
        worker.attempts_max = 2
        while not worker.identity.seen_ms and not self._stopping:
            await worker.do(commands.Get(random.randbytes(4)))
        while not self._stopping:
            note(await self._do_something(worker))
            await asyncio.sleep(random.expovariate(1 / PAUSE_S))

    async def _do_something(self, worker: Worker) -> Operation:
        random = worker.random
        key = b"n/%d" % random.randrange(KEYS)
        with_id = random.random() < 0.7
        kind = random.choices(("put", "create", "append", "delete", "get", "batch"), (35, 10, 15, 15, 10, 15))[0]
        match kind:
            case "put":
                return await worker.do(commands.Put(key, self._value(worker)), with_id=with_id)
            case "create":
                return await worker.do(commands.Put(key, self._value(worker), flags=Flag.IF_ABSENT), with_id=with_id)
            case "append":
                return await worker.do(commands.Append(key, bytes(random.randrange(1, 9))))
            case "delete":
                return await worker.do(commands.Delete(key))
            case "batch":
                keys = [b"n/{tag}%d" % number for number in random.sample(range(4), 3)]
                puts = (commands.Put(each, self._value(worker)) for each in keys[1:])
                # A put comes last: its version lets the judge find the batch in the log, even if the key had expired.
                return await worker.do(commands.Batch(keys[0], (commands.Delete(keys[0]), *puts)))
        return await worker.do(commands.Get(key))

    def _value(self, worker: Worker) -> bytes:
        """Return a value of any length that no operation has written before."""
        self._numbers += 1
        return b"%s-%d" % (worker.name.encode(), self._numbers) + b"." * worker.random.randrange(60)


def note(operation: Operation) -> None:
    """Count the refusals of a tenant."""
    if isinstance(operation.result, QuotaExceeded):
        probe("tenant.quota")
    elif isinstance(operation.result, RateExceeded):
        probe("tenant.rate")


# ── judging ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def scanned(leader: Leader, space: Namespace) -> Amount:
    """Return what a namespace has in a partition, with everything in flight, by a full scan."""
    state, end = leader.reads._state, end_of_prefix(space.prefix)
    last = ALL_ORDER[1] if end is None else ORDER + end
    sizes: dict[bytes, int] = {}
    for row_key, _ in state.engine.iterate(ORDER + space.prefix, last):
        key = row_key[1:]
        row = state.engine.get(data_key(state.hash, key))
        if state.ownership.owned.holds(state.hash.token_of(key)) and row is not None:
            sizes[key] = len(record_of(row).value)
    for layer in leader._evaluator._overlay.layers:
        for key, record in layer.rows.items():
            if key.startswith(space.prefix):
                sizes.pop(key, None)
                if record is not None:
                    sizes[key] = len(record[0])
    return Amount(len(sizes), sum(map(len, sizes)) + sum(sizes.values()))


def leaders_of(node: Node) -> dict[PartitionId, Leader]:
    """Return the leaders that serve on a node."""
    if not node.is_serving or node.served is None:
        return {}
    replicas = {partition: node.replica(partition) for partition in node.leads}
    found = {partition: replica._leading() for partition, replica in replicas.items() if replica is not None}
    return {partition: leader for partition, leader in found.items() if leader is not None}


def known(node: Node, space: Namespace) -> Amount:
    """Return what a server can know of a namespace: a fresh count of its leaders, and the reports of others."""
    assert node.served is not None
    book: Book = node.served.namespaces.book
    leaders, total = leaders_of(node), Amount()
    for partition in sorted({*leaders, *book.led, *book.reported}):
        leader = leaders.get(partition)
        if leader is not None and leader.usage.is_counted:
            amount = scanned(leader, space)
        else:
            own = book.led.get(partition)
            report = own.report() if own is not None else book.reported[partition]
            amount = report.amounts.get(space.name, Amount())
        total.keys += max(0, amount.keys)
        total.bytes += max(0, amount.bytes)
    return total


@contextmanager
def metering(cluster: Cluster) -> Iterator[None]:
    """After each entry that adds to a namespace, check that the namespace does not exceed its quota by all that its
    server can know."""
    admit = Usage.admit

    def admit_and_judge(self: Usage, meter: Meter) -> None:
        admit(self, meter)
        name = current_node.get()
        node = next((each for each in cluster.servers if name is not None and each.name == name.name), None)
        if node is None or node.served is None or not meter.steps:
            return
        for space in {step.namespace for step in meter.steps}:
            steps = [step for step in meter.steps if step.namespace == space]
            now, keys, more = known(node, space), sum(each.keys for each in steps), sum(each.bytes for each in steps)
            probe("tenant.judged")
            if space.keys_max and keys > 0 and now.keys > space.keys_max:
                cluster.broken(f"N1 {node.name} admits {keys} keys of {space.name}: {now} of {space}")
            if space.bytes_max and more > 0 and now.bytes > space.bytes_max:
                cluster.broken(f"N1 {node.name} admits {more} bytes of {space.name}: {now} of {space}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Usage, "admit", admit_and_judge)
        yield


async def check_counts(cluster: Cluster, spaces: tuple[Namespace, ...]) -> None:
    """Return when all leaders have counted what their engines have and every server knows the sums. Raises
    AssertionError."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + COUNTED_S_MAX
    while wrong := [line for space in spaces for line in _differing(cluster, space)]:
        assert loop.time() < deadline, f"N1 {wrong}"
        await asyncio.sleep(0.1)
    if spaces:
        probe("tenant.counted")


def _differing(cluster: Cluster, space: Namespace) -> list[str]:
    """Return the servers that do not know what a namespace has. A leader that has counted must know at any moment."""
    wrong, total, led = [], Amount(), set()
    for node in cluster.servers:
        for partition, leader in leaders_of(node).items():
            amount, counted = scanned(leader, space), leader.usage.amounts.get(space.name, Amount())
            if not leader.usage.is_counted:
                wrong.append(f"{node.name} {partition} has not counted")
            assert not leader.usage.is_counted or counted == amount, (
                f"N1 {node.name} {partition} {space.name}: counts {counted}, has {amount}"
            )
            led.add(partition)
            total.keys += amount.keys
            total.bytes += amount.bytes
    if missing := set(cluster.partitions) - led:
        wrong.append(f"nobody leads {sorted(missing)}")
    for node in cluster.servers:
        if node.served is None or (used := node.served.namespaces.book.used(space.name)) != total:
            wrong.append(f"{node.name} knows {used if node.served else None} of {space.name}, there are {total}")
    return wrong
