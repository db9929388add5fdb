"""A model test of the router: with any change of leaders, links and ring, each operation ends once and in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from kvstore.errors import Moved, NotLeader, StoreError
from kvstore.partition.state import commands
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.peer.refusals import UnreceivedRefusals
from kvstore.server.routing import events, redirects, waiting_lines
from kvstore.server.routing import router as module
from kvstore.server.routing.flight import Flight
from kvstore.server.routing.large_reads import BYTES_AT_ONCE, LargeReads
from kvstore.server.routing.redirects import WAIT_S
from kvstore.server.routing.router import Router
from kvstore.server.routing.routes import ASK_AGAIN_S, Routes
from kvstore.types import PartitionId, ServerId
from tests.ring.rings import new_ring
from tests.server.routing.world import ClientSink, World

SEEDS = range(150)


def play(seeds: Iterable[int]) -> None:
    for seed in seeds:
        world = World(seed)
        world.run(600)
        world.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_writes_of_a_key_keep_order_and_end_once(seed: int) -> None:
    play([seed])


@pytest.mark.parametrize("seed", range(50))
def test_operations_during_a_full_link_queue_behind(seed: int) -> None:
    world = World(seed, room=6)
    world.run(600)
    world.check()


@pytest.mark.parametrize("seed", range(100))
def test_waiting_reads_end_once_and_writes_keep_order(seed: int) -> None:
    world = World(seed, reads=0.7, large=(0.1, 0.9)[seed % 2], room=(1000, 8)[seed // 2 % 2])
    world.run(900)
    world.check()


def test_reads_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the end of operations would prove nothing."""
    waited = 0
    wait = LargeReads.wait

    def counting(reads: LargeReads, *rest: Any) -> None:
        nonlocal waited
        waited += 1
        wait(reads, *rest)

    monkeypatch.setattr(LargeReads, "wait", counting)
    for seed in range(10):
        World(seed, reads=0.7, large=0.9).run(900)
    assert waited > 200


def test_read_refused_repeatedly_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its time used to restart whenever it waited for its client's turn: of a client with a hundred reads, the last one
    was refused only after minutes."""
    monkeypatch.setattr(module, "WAIT_S", WAIT_S)
    p1, n1, n2 = PartitionId("p1"), ServerId("n1"), ServerId("n2")
    ring = new_ring([p1], {n2: ""}, 1)
    router = Router(n1, ClusterTopology(ring, {p1: (n2, 1)}, {}), lambda _: False, waiting_max=100, bytes_max=1 << 20)
    flight, client, now = Flight(n2, 100), ClientSink(), 0.0
    router.handle(events.LinkOpened(flight), now)
    flight.reads.note_large(client.line, BYTES_AT_ONCE, now)
    for token in range(10):
        router.handle(events.Submitted(commands.Get(b"k"), client, token), now)
    while len(client.results) < 10:
        refused: list[tuple[int, NotLeader | Moved]] = [(number, NotLeader(p1)) for number in flight.pending]
        for command in router.handle(events.RefusedByPeer(flight, refused), now):
            if isinstance(command, events.Fail):
                client.complete(command.token, command.error)
        now += ASK_AGAIN_S
        for command in router.handle(events.Ticked(), now):
            if isinstance(command, events.Fail):
                client.complete(command.token, command.error)
        assert now < 2 * WAIT_S
    assert all(isinstance(each, StoreError) for each in client.results.values())


def test_waiting_scan_is_sent_when_leader_is_known() -> None:
    """Any change of the topology used to refuse it as Moved, although no key had moved."""
    p1, n1, n2 = PartitionId("p1"), ServerId("n1"), ServerId("n2")
    ring = new_ring([p1], {n2: ""}, 1)
    router = Router(n1, ClusterTopology(ring, {}, {}), lambda _: False, waiting_max=100, bytes_max=1 << 20)
    flight = Flight(n2, 100)
    router.handle(events.LinkOpened(flight), 0.0)
    assert not router.handle(events.Submitted(commands.Scan(b"", b"", 9), ClientSink(), 1, p1, ring.routed), 0.0)
    commands_ = router.handle(events.TopologyChanged(ClusterTopology(ring, {p1: (n2, 1)}, {})), 0.1)
    commands_ += router.handle(events.MovedRejected(), 0.1)
    assert [type(each) for each in commands_] == [events.Send]


def test_waiting_scan_is_refused_when_ring_changes() -> None:
    p1, n1, n2 = PartitionId("p1"), ServerId("n1"), ServerId("n2")
    ring = new_ring([p1], {n2: ""}, 1)
    router = Router(n1, ClusterTopology(ring, {}, {}), lambda _: False, waiting_max=100, bytes_max=1 << 20)
    router.handle(events.Submitted(commands.Scan(b"", b"", 9), ClientSink(), 1, p1, ring.routed), 0.0)
    later = replace(ring, version=ring.version + 1, routed=ring.version + 1)
    router.handle(events.TopologyChanged(ClusterTopology(later, {p1: (n2, 1)}, {})), 0.1)
    (refusal,) = router.handle(events.MovedRejected(), 0.1)
    assert isinstance(refusal, events.Fail)
    assert isinstance(refusal.error, Moved)


def test_all_waiting_operations_are_kept_when_ring_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones used to be dropped without an answer if the bytes of all reached the limit."""
    monkeypatch.setattr(module, "WAIT_S", WAIT_S)
    p1, p2, n1, n2 = PartitionId("p1"), PartitionId("p2"), ServerId("n1"), ServerId("n2")
    ring = new_ring([p1, p2], {n2: ""}, 1)
    router = Router(n1, ClusterTopology(ring, {}, {}), lambda _: False, waiting_max=100, bytes_max=1_000)
    key_of = {ring.partition_of(key): key for key in (b"%d" % number for number in range(100))}
    for token, (partition, size) in enumerate([(p2, 300), (p2, 300), (p2, 300), (p1, 500)]):
        assert not router.handle(events.Submitted(commands.Put(key_of[partition], b"x" * size), ClientSink(), token), 0)
    later = replace(ring, version=ring.version + 1, routed=ring.version + 1)
    router.handle(events.TopologyChanged(ClusterTopology(later, {}, {})), 0.1)
    router.handle(events.MovedRejected(), 0.1)
    router.check()
    overdue = router.handle(events.Ticked(), 2 * WAIT_S)
    assert sorted(each.token for each in overdue if isinstance(each, events.Fail)) == [0, 1, 2, 3]


def test_most_writes_are_done() -> None:
    """Otherwise the order of the remaining operations would prove little."""
    world = World(1)
    world.run(2000)
    assert len(world.refused()) < len(world.asked) / 3


BREAKAGES: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "a partition goes to another server at once": (Routes, "is_settled", lambda *_: True),
    "what comes on a held key goes out": (Router, "_is_held", lambda *_: False),
    "what is under way to a former owner holds no key": (Flight, "misdirected", lambda *_: []),
    "what is under way behind a write that came back holds no key": (Flight, "writes_on", lambda *_: []),
    "what is redirected goes out in the order in which it came back": (redirects, "by_order", lambda _: 0),
    "what waits for a leader stands in the order in which it came back": (waiting_lines, "by_order", lambda _: 0),
    "what was sent before a refusal was received is done": (UnreceivedRefusals, "of", lambda *_: None),
    "who refused is asked again before all has come back": (Routes, "_carries", lambda *_: False),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_broken_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, broken = BREAKAGES[name]
    monkeypatch.setattr(owner, attribute, broken)
    with pytest.raises(AssertionError):
        play(range(2000))
