"""Operations between the leaders of a transaction, as the router sends them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.errors import NotCaughtUp, NotYetRaised, RateExceeded
from kvstore.namespaces.rates import Rates
from kvstore.namespaces.table import Namespace
from kvstore.partition.leading.answers import SingleResultSink
from kvstore.partition.state.commands import Get, Resolve
from kvstore.partition.state.internal import Attempt
from kvstore.server.routing.ask import ask
from kvstore.server.routing.transactions import RoutedParticipants
from kvstore.types import PartitionId
from tests.server.servers import Servers, servers

P1 = PartitionId("p1")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Servers]:
    async with servers(tmp_path, ["n1", "n2"]) as started:
        yield started


@pytest.mark.parametrize("leader", ["n1", "n2"])
async def test_operations_of_leaders_are_routed_by_key_and_not_charged(cluster: Servers, leader: str) -> None:
    await cluster.lead("p1", leader)
    server = cluster["n1"]
    rates = Rates(lambda: 0.0, Counter())
    rates.take([Namespace(name="shop", prefix=b"shop/", ops_per_s=1)])
    server.dispatcher.rates = rates
    assert await ask(server.dispatcher, Get(b"shop/k")) is None
    with pytest.raises(RateExceeded):
        await ask(server.dispatcher, Get(b"shop/k"))
    participants = RoutedParticipants(server.dispatcher)
    assert participants.owner_of(b"shop/k") == P1
    sink = SingleResultSink()
    participants.send(Resolve(b"shop/k", Attempt(P1, 1, 1), 1, True), sink, 0)
    assert not sink.done.done(), "the result came from inside the call"
    with pytest.raises((NotYetRaised, NotCaughtUp)):  # the leader has answered
        await asyncio.wait_for(sink.done, 10)
