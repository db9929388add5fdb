"""Samples of operations: occasional bursts, and no such burst in what is reported."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstore.env import Env
from kvstore.errors import Unavailable
from kvstore.partition.state.commands import NOT_NOW, Get, NotNow
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.load import sampler as module
from kvstore.server.load.load import PartitionLoad, encode
from kvstore.server.load.sampler import BURST, LoadSampler, Tap, loads_of_cluster
from kvstore.server.routing.ports import LocalReplica
from kvstore.types import PartitionId, ServerId
from tests.ring.rings import new_ring
from tests.waiting import wait_until

P1, P2 = PartitionId("p1"), PartitionId("p2")


class Replica(LocalReplica):
    serving = True

    def __init__(self) -> None:
        self.got: list[Any] = []

    def submit(self, ops: Any, sink: Any, tokens: Any) -> None:
        self.got += zip(ops, tokens, strict=True)

    def read_now(
        self, keys: list[bytes], tokens: list[int], now: float, *, in_turn: bool = False
    ) -> list[bytes | None] | NotNow:
        return [b"a row"] * len(keys) if set(keys) == {b"at hand"} else NOT_NOW

    def redirect_moved(self) -> None:
        """Do nothing: no operations wait here."""

    def counts(self) -> tuple[int, int]:
        return len(self.got), 0


class Here:
    """The hosted replicas, and the destinations of operations."""

    def __init__(self) -> None:
        self.replica = Replica()
        self.local: dict[PartitionId, Any] = {P1: self.replica}
        self.led = True
        self.topology = ClusterTopology(ring=new_ring([P1], {ServerId("n1"): ""}, 1))

    def leading(self) -> dict[PartitionId, Any]:
        return {P1: self.replica} if self.led else {}

    def swap(self, partition: PartitionId, old: Any, new: Any) -> bool:
        if self.local.get(partition) is not old:
            return False
        self.local[partition] = new
        return True


async def is_tapped(here: Here) -> bool:
    return isinstance(here.local[P1], Tap)


@pytest.fixture
async def tapped(env: Env, monkeypatch: pytest.MonkeyPatch) -> tuple[Here, LoadSampler]:
    """A replica with a tap in front of it, and the sampler that added the tap."""
    monkeypatch.setattr(module, "TICK_S", 0.01)
    here = Here()
    load_sampler = LoadSampler(env, here, here)
    load_sampler.start()
    await wait_until(lambda: is_tapped(here), what="a tap")
    return here, load_sampler


async def test_burst_passes_the_tap_and_then_operations_go_directly(
    tapped: tuple[Here, LoadSampler],
) -> None:
    here, load_sampler = tapped
    for number in range(BURST + 5):
        here.local[P1].submit((Get(b"k%d" % number, 0, 0),), None, (number,))
    assert here.local[P1] is here.replica, "the burst is over"
    assert [token for _, token in here.replica.got] == list(range(BURST + 5)), "all of them, in order"
    await load_sampler.close()
    assert here.local[P1] is here.replica
    assert [load.partition for load in load_sampler.loads()] == [P1]


async def test_immediate_reads_are_sampled_once(
    tapped: tuple[Here, LoadSampler],
) -> None:
    here, load_sampler = tapped
    tap = here.local[P1]
    assert tap.read_now([b"elsewhere"], [0], 0.0) is NOT_NOW
    assert tap.seen == [], "it is submitted, and seen then"
    for _ in range(BURST):
        assert here.local[P1].read_now([b"at hand"], [0], 0.0) == [b"a row"]
    assert tap.seen == [(b"at hand", 0)] * BURST
    assert here.local[P1] is here.replica
    tap.seen.clear()
    here.local[P1] = tap
    assert tap.read_now([b"at hand", b"elsewhere"], [0, 0], 0.0) is NOT_NOW
    assert tap.read_now([b"at hand"] * 30, [0] * 30, 0.0) == [b"a row"] * 30
    assert tap.seen == [(b"at hand", 0)] * 30
    tap.read_now([b"at hand"] * 30, [0] * 30, 0.0)
    assert tap.seen == [(b"at hand", 0)] * BURST, "a burst, however many come together"
    await load_sampler.close()


async def test_idle_tap_stays_and_samples_later_operations(
    tapped: tuple[Here, LoadSampler],
) -> None:
    here, load_sampler = tapped
    tap = here.local[P1]
    load_sampler.poll()
    assert here.local[P1] is tap
    tap.submit((Get(b"k", 0, 0),), None, (0,))
    load_sampler.poll()
    assert here.local[P1] is not tap
    assert isinstance(here.local[P1], Tap)
    await load_sampler.close()


async def test_replica_that_stops_leading_has_no_tap(tapped: tuple[Here, LoadSampler]) -> None:
    here, load_sampler = tapped
    here.led = False
    load_sampler.poll()
    assert here.local[P1] is here.replica
    await load_sampler.close()


async def test_replica_stopped_during_a_tap_does_not_come_back(
    tapped: tuple[Here, LoadSampler],
) -> None:
    here, load_sampler = tapped
    del here.local[P1]
    await load_sampler.close()
    assert P1 not in here.local


async def test_silent_server_is_left_out(env: Env) -> None:
    class Links:
        async def call(self, server: ServerId, *_: object) -> bytes:
            await asyncio.sleep(0)
            if server == "n2":
                return encode([PartitionLoad(P2, 5.0, 1.0, 10.0)])
            if server == "n3":
                return b"\xc1"
            raise Unavailable("it is down")

    servers = [ServerId(f"n{i}") for i in range(1, 5)]
    here = Here()
    found = await loads_of_cluster(Links(), LoadSampler(env, here, here), ServerId("n1"), servers)
    assert {partition: load.ops_per_s for partition, load in found.items()} == {P2: 5.0}
