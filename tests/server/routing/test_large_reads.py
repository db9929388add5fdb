"""Large reads from another server delay other clients little, and answers that nobody waits for are not sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvstore.errors import Unavailable
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Sink
from kvstore.server.peer import flow_control
from kvstore.server.routing.large_reads import (
    BYTES_AT_ONCE,
    LARGE_BYTES,
    PATIENCE_S,
    QUIET_S,
    READS_FIRST,
    LargeReads,
)
from kvstore.server.routing.pending import Pending
from kvstore.types import PartitionId
from tests.server.backends import Collector
from tests.server.servers import Servers, servers
from tests.waiting import wait_until

P1 = PartitionId("p1")
LARGE = LARGE_BYTES + 1
LARGE_AT_ONCE = BYTES_AT_ONCE // LARGE


class Caller(Sink):
    """A client that may leave."""

    left = False

    @property
    def is_gone(self) -> bool:
        return self.left

    def complete(self, token: int, result: Any) -> None:
        """Do nothing: no test looks at it."""

    def flush(self) -> None:
        """Do nothing: no operations are gathered."""


class Way:
    """The flow control of one link, as the router and the link use it."""

    def __init__(self) -> None:
        self.reads, self.now, self.in_flight = LargeReads(), 0.0, dict[int, Pending]()
        self.asked = 0
        self.begun: list[tuple[Sink, int]] = []

    def ask(self, caller: Caller, count: int = 1) -> None:
        for _ in range(count):
            self.asked += 1
            pending = Pending(self.asked, commands.Get(b"k"), caller, self.asked)
            if self.reads.is_on and not self.reads.may_begin(pending):
                self.reads.wait(P1, pending, self.now)
            else:
                self._begin(pending)
        self.reads.check()

    def _begin(self, pending: Pending) -> None:
        self.begun.append((pending.sink, pending.order))
        self.in_flight[pending.order] = pending
        if self.reads.is_on:
            self.reads.begin(pending.order, pending)

    def answer(self, number: int, size: int) -> None:
        pending = self.in_flight.pop(number)
        if size > LARGE_BYTES:
            self.reads.note_large(pending.sink.line, size, self.now)
        self.reads.ended(number, size, self.now)
        self._resume()

    def come_back(self, number: int) -> None:
        """The operation is refused, or has timed out."""
        self.in_flight.pop(number)
        self.reads.over(number)
        self._resume()

    def _resume(self) -> None:
        while (following := self.reads.next_or_none()) is not None:
            self._begin(following)
        self.reads.check()

    def of(self, caller: Caller) -> list[int]:
        return [number for number, pending in self.in_flight.items() if pending.sink is caller]


def greedy_ones(way: Way, count: int) -> list[Caller]:
    """Clients known for large reads, each with two hundred reads in progress or waiting."""
    found = [Caller() for _ in range(count)]
    for each in found:
        way.ask(each)
        way.answer(way.of(each)[0], LARGE)
        way.ask(each, 200)
    return found


def test_nothing_waits_without_large_values() -> None:
    way, caller = Way(), Caller()
    way.ask(caller, 10_000)
    for number in list(way.in_flight):
        way.answer(number, LARGE_BYTES)
    assert not way.reads.is_on
    assert way.reads.count == 0


def test_large_readers_share_slots_in_turn() -> None:
    way = Way()
    greedy = greedy_ones(way, 3)
    assert len(way.in_flight) == LARGE_AT_ONCE
    begun = {id(each): 0 for each in greedy}
    for _ in range(90):
        before = set(way.in_flight)
        way.answer(min(way.in_flight), LARGE)
        (new,) = set(way.in_flight) - before
        begun[id(way.in_flight[new].sink)] += 1
    assert set(begun.values()) == {30}


def test_small_reader_waits_for_no_other_and_gains_slots() -> None:
    way, small = Way(), Caller()
    greedy_ones(way, 10)
    way.ask(small, 100)
    assert len(way.of(small)) == READS_FIRST
    for _ in range(5):
        for number in way.of(small):
            way.answer(number, 10)
    assert len(way.of(small)) == 32 * READS_FIRST


def test_mixed_reader_counts_by_its_last_value() -> None:
    way, other = Way(), Caller()
    (greedy,) = greedy_ones(way, 1)
    way.answer(way.of(greedy)[0], 10)
    assert len(way.of(greedy)) == LARGE_AT_ONCE - 1, "it has room for fewer"
    for number in way.of(greedy):
        way.answer(number, 10)
    assert len(way.of(greedy)) > READS_FIRST
    way.ask(other, 10)
    way.answer(way.of(other)[0], LARGE)
    assert len(way.of(other)) == 9, "nobody else reads what is large"


def test_value_beyond_the_limit_is_read_alone() -> None:
    way, caller = Way(), Caller()
    way.ask(caller)
    way.answer(way.of(caller)[0], 2 * BYTES_AT_ONCE)
    way.ask(caller, 3)
    for left in (2, 1, 0):
        assert (len(way.in_flight), way.reads.count) == (1, left)
        way.answer(way.of(caller)[0], 2 * BYTES_AT_ONCE)


def test_reads_of_gone_or_silent_clients_end() -> None:
    way = Way()
    first, second = greedy_ones(way, 2)
    waiting = way.reads.count
    first.left = True
    gone = way.reads.take_late(way.now)
    assert {id(each.sink) for each in gone} == {id(first)}
    assert way.reads.count == waiting - len(gone)
    way.now += PATIENCE_S / 2
    way.answer(way.of(first)[0], LARGE)
    way.answer(way.of(second)[0], LARGE)
    way.now += PATIENCE_S / 2 + 0.1
    assert way.reads.take_late(way.now) == []
    way.now += PATIENCE_S
    assert {id(each.sink) for each in way.reads.take_late(way.now)} == {id(second)}
    assert way.reads.count == 0


def test_scheduling_ends_without_large_values() -> None:
    way = Way()
    (greedy,) = greedy_ones(way, 1)
    while way.in_flight:
        way.answer(min(way.in_flight), LARGE)
    way.now += QUIET_S + 0.1
    assert way.reads.take_late(way.now) == []
    assert not way.reads.is_on
    way.ask(greedy, 500)
    assert len(way.in_flight) == 500


@pytest.mark.parametrize("seed", range(40))
def test_reads_start_once_in_client_order(seed: int) -> None:
    random, way, callers = Random(seed), Way(), [Caller() for _ in range(6)]
    while way.asked < 800 or way.in_flight:
        if way.asked < 800:
            way.ask(random.choice(callers), random.randrange(6))
        for _ in range(random.randrange(9)):
            if not way.in_flight:
                break
            number = random.choice(list(way.in_flight))
            if random.random() < 0.05:
                way.come_back(number)
            else:
                way.answer(number, random.choice([0, 10, LARGE]))
        way.now += 0.01
    assert sorted(number for _, number in way.begun) == [*range(1, way.asked + 1)]
    for caller in callers:
        numbers = [number for sink, number in way.begun if sink is caller]
        assert numbers == sorted(numbers)
    assert way.reads.count == 0


# ── over a link ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Servers]:
    async with servers(tmp_path, ["n1", "n2"]) as started:
        await started.lead("p1", "n2")
        yield started


class Leaving(Collector):
    """A client that may leave."""

    left = False

    @property
    def is_gone(self) -> bool:
        return self.left


GREEDY = 400


async def asked_for_much(cluster: Servers, count: int) -> list[Leaving]:
    """Clients of n1 that each request many large values that n2 leads, once their size is known."""
    server, callers = cluster["n1"], [Leaving() for _ in range(count)]
    value = bytes(LARGE)
    for token in range(1, GREEDY + 1):
        server.dispatcher.submit((commands.Put(b"fat%d" % token, value),), server.sink, (token,))
    server.dispatcher.submit((commands.Put(b"small", b"v"),), server.sink, (0,))
    await server.sink.wait(*range(GREEDY + 1))
    server.dispatcher.submit((commands.Get(b"fat1"),), callers[0], (0,))
    await callers[0].wait(0)
    for each in callers:
        for token in range(1, GREEDY + 1):
            server.dispatcher.submit((commands.Get(b"fat%d" % token),), each, (token,))
    return callers


async def test_small_read_does_not_wait_behind_large_ones(cluster: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_control, "LARGE_KEYS_MAX", 0)  # more keys than n2 remembers to be large
    greedy = await asked_for_much(cluster, 4)
    server = cluster["n1"]
    server.dispatcher.submit((commands.Get(b"small"),), server.sink, (-1,))
    await server.sink.wait(-1)
    answered = sum(len(each.results) for each in greedy)
    assert answered < GREEDY, "of 1,600 reads of large values few came before it"
    for each in greedy:
        results = await each.wait(*range(1, GREEDY + 1))
        assert {len(found[0]) for found in results} == {LARGE}


async def test_waiting_reads_of_gone_clients_are_not_sent(cluster: Servers) -> None:
    greedy = await asked_for_much(cluster, 4)
    for each in greedy:
        each.left = True
    for each in greedy:
        await each.wait(*range(1, GREEDY + 1))
    errors = [found for each in greedy for found in each.results.values() if isinstance(found, Unavailable)]
    assert len(errors) > 4 * GREEDY - 100
    assert cluster["n2"].peers.operations < GREEDY + 150
    assert cluster["n1"].dispatcher.statistics()["waiting_for_leader"] == 0


async def test_waiting_reads_go_to_the_next_leader(cluster: Servers) -> None:
    greedy = await asked_for_much(cluster, 2)
    cluster["n2"].hosted[P1].is_up = False
    replica = await cluster.lead("p1", "n1")
    assert replica.serving
    for each in greedy:
        results = await each.wait(*range(1, GREEDY + 1))
        assert not [found for found in results if isinstance(found, Exception)]


async def is_over(cluster: Servers) -> bool:
    return not any(flight.reads.is_on for flight in cluster["n1"].dispatcher.in_transit()[0].values())


async def test_link_returns_to_normal_without_large_values(cluster: Servers) -> None:
    (greedy,) = await asked_for_much(cluster, 1)
    await greedy.wait(*range(1, GREEDY + 1))
    assert not await is_over(cluster)
    await wait_until(lambda: is_over(cluster), what="nothing is weighed any more")
