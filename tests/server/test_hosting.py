"""Hosting of the replicas that the ring assigns to this server. The simulation covers most of it."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from kvstore.partition.config import PartitionConfig
from kvstore.partition.state import rows
from kvstore.partition.state.engine_rocks import RocksEngine
from kvstore.partition.state.state import ReplicaState
from kvstore.ring import codec
from kvstore.server import hosting as module
from kvstore.server.hosting import Hosting
from kvstore.server.status.node_report import replica_report
from kvstore.types import PartitionId, ServerId
from kvstore.versions import LATEST
from tests.meta.drivers import LaggingStore
from tests.partition.effects import Writer
from tests.partition.state.engine_memory import MemoryEngine
from tests.ring import rings
from tests.ring.rings import new_ring
from tests.waiting import wait_until

P1, P2 = PartitionId("p1"), PartitionId("p2")
N1, N2 = ServerId("n1"), ServerId("n2")


# docs/protocol.md P35
async def test_second_damaged_copy_is_set_aside_too() -> None:
    """It retries no more, so it would be barred until the process ends."""
    hosting: Any = object.__new__(Hosting)
    aside: list[PartitionId] = []
    hosting._hosted = {each: SimpleNamespace(close_state=lambda: None) for each in (P1, P2)}
    hosting._damaged, hosting._engines = {P2}, SimpleNamespace(set_damaged_aside=aside.append)

    async def stop(partition: PartitionId, *, keep_pins: bool) -> bool:
        if partition == P2:
            hosting._damaged.add(P1)
        return True

    hosting._stop = stop
    await hosting._set_damaged_aside()
    assert (aside, hosting._damaged) == ([P2, P1], set())


# docs/protocol.md V4
async def test_replica_written_by_newer_release_is_blocked_alone() -> None:
    hosting: Any = object.__new__(Hosting)
    engines = {each: MemoryEngine() for each in (P1, P2)}
    ReplicaState(P1, engines[P1], PartitionConfig(), rings.key_hash).apply(Writer(1).put(a="1"))
    batch = engines[P1].batch()
    batch.put(rows.VERSION_KEY, rows.encode_version(LATEST + 7))
    engines[P1].write(batch)
    hosting._hosted, hosting._blocked, hosting._engines = {}, {}, SimpleNamespace(open=engines.__getitem__)
    hosting._rebuild, hosting._dispatcher = print, SimpleNamespace(host=lambda *_: None)

    def made(partition: PartitionId, engine: MemoryEngine) -> Any:
        state = ReplicaState(partition, engine, PartitionConfig(), rings.key_hash)

        async def start() -> None:
            """Start to serve."""

        return SimpleNamespace(state=state, start=start, on_outvoted=lambda _: None, statistics=dict)

    hosting._made = made
    await hosting._begin(P1)
    await hosting._begin(P2)
    assert list(hosting._hosted) == [P2]
    assert list(hosting.statistics()) == [P1, P2]
    report = replica_report(P1, hosting.statistics()[P1], None)
    assert (report.role, report.leader) == ("stopped", "")
    assert report.failure == (
        f"p1: its log is written by cluster version {LATEST + 7}, this server supports {LATEST}: "
        "install a later release of kvstore"
    )
    assert not engines[P1]._open, "its files are let go"


async def test_replica_starts_later_when_its_state_could_not_be_loaded(tmp_path: Path) -> None:
    """The first engine was left open: each later attempt found its files in use by this process."""
    hosting: Any = object.__new__(Hosting)
    hosting._hosted, hosting._blocked, hosting._changed = {}, {}, asyncio.Event()
    hosting._engines = SimpleNamespace(open=lambda _: RocksEngine(str(tmp_path)))
    hosting._rebuild, hosting._dispatcher = print, SimpleNamespace(host=lambda *_: None)
    failures = [OSError(errno.ENOMEM, "the kernel has no free memory")]
    opened: list[RocksEngine] = []

    def made(_: PartitionId, engine: RocksEngine) -> Any:
        opened.append(engine)  # as the memory budget does
        if failures:
            raise failures.pop()

        async def start() -> None:
            """Start to serve."""

        return SimpleNamespace(start=start, on_outvoted=lambda _: None)

    hosting._made = made
    for _ in range(2):
        await hosting._begin_or_retry(P1)
    assert list(hosting._hosted) == [P1]
    opened[-1].close()


# docs/protocol.md P23
async def test_undrain_withdraws_published_state_of_stopped_replicas() -> None:
    """A replica that had moved elsewhere used to keep its znode, and its partition was never removed."""
    hosting: Any = object.__new__(Hosting)
    taken_back: list[PartitionId] = []

    def drained(partition: PartitionId) -> Any:
        async def withdraw() -> None:
            taken_back.append(partition)

        return SimpleNamespace(withdraw=withdraw)

    async def begin(partition: PartitionId) -> None:
        hosting._hosted[partition] = SimpleNamespace(serving=False)

    async def nothing(*_: Any) -> None:
        """Do nothing."""

    nursery = SimpleNamespace(spawn=lambda work, name: work.close())
    hosting._env = SimpleNamespace(
        nursery=SimpleNamespace(child=lambda _: nursery), beat=SimpleNamespace(pause=nothing)
    )
    hosting._membership, hosting._changed = SimpleNamespace(on_topology=lambda _: None), asyncio.Event()
    hosting._after_drain = SimpleNamespace(close=nothing)
    hosting._server, hosting._blocked, hosting._taking_back = N1, {}, asyncio.Lock()
    hosting._hosted, hosting._leaving, hosting._drained = {}, {}, {each: drained(each) for each in (P1, P2)}
    hosting._set_damaged_aside = hosting._retire_left = nothing
    hosting._begin_or_retry = begin
    hosting._rings = SimpleNamespace(ring=new_ring([P1], {N1: ""}, 1))
    hosting._is_stopped = True
    await hosting.start()
    await hosting._take_back_drained()
    assert (list(hosting._hosted), taken_back) == ([P1], [P2])


# docs/protocol.md H10
async def test_state_is_kept_while_metadata_server_lags() -> None:
    """Meanwhile the partition has returned to this server."""
    hosting: Any = object.__new__(Hosting)
    hosting._store, hosting._server = store, _ = LaggingStore(), N1
    elsewhere, here = (new_ring([P1], dict.fromkeys(servers, ""), 1) for servers in ([N2], [N1]))
    await store.create(paths.RING, codec.encode(elsewhere))
    assert await hosting._has_left(P1)
    store.lag()
    await store.set(paths.RING, codec.encode(here), -1)
    assert not await hosting._has_left(P1)
    assert not await hosting._has_left(P2), "a ring that has never heard of it says nothing"


# docs/protocol.md H10
async def test_moved_state_is_set_aside_once_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It used to be searched only at process start. If the store was away then, its disk space stayed occupied."""
    monkeypatch.setattr(module, "AGE_S", 0.01)
    hosting: Any = object.__new__(Hosting)
    hosting._store, hosting._server, hosting._keep_s = store, _, _ = MemoryStore(), N1, 60.0
    engines, aside = [P1, P2], list[PartitionId]()
    hosting._rings = SimpleNamespace(ring=new_ring([P1, P2], {N2: ""}, 1))
    await store.create(paths.RING, codec.encode(hosting._rings.ring))
    hosting._hosted, hosting._leaving, hosting._held = {}, {}, {P2}

    def retire(partition: PartitionId) -> None:
        engines.remove(partition)
        aside.append(partition)

    hosting._engines = SimpleNamespace(find=lambda: list(engines), age_retired=lambda *_: None, retire=retire)
    store.suspend()
    await hosting._retire_unassigned()
    assert aside == []
    aging = asyncio.create_task(hosting._age())
    store.resume()

    async def is_aside() -> bool:
        return bool(aside)

    await wait_until(is_aside)
    await hosting._retire_unassigned()
    aging.cancel()
    assert (aside, engines) == ([P1], [P2]), "one whose files may be open stays"
    hosting._rings.ring = new_ring([P1, P2], {N1: ""}, 1)
    engines.append(P1)
    await hosting._retire_unassigned()
    assert aside == [P1], "one that is about to begin here stays, whatever a former ring says"
