"""Many operations of one call of the blocking client: how often they are sent, and how often the topology is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.client.blocking.link import BlockingLink
from kvstore.errors import NotLeader, Overloaded
from kvstore.partition.state.commands import Op
from kvstore.proto import kv_pb2
from kvstore.types import PartitionId
from tests.client.model import ModelCluster
from tests.client.serving import serving_in_a_thread
from tests.waiting import PATIENCE_S

COUNT = 100
KEYS = [b"%d" % number for number in range(COUNT)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that were asked for a topology."""
    addresses = list[str]()
    topology = BlockingLink.topology

    def told(link: BlockingLink, timeout_s: float) -> kv_pb2.TopologyResponse:
        addresses.append(link.address)
        return topology(link, timeout_s)

    monkeypatch.setattr(BlockingLink, "topology", told)
    return addresses


def test_values_too_large_for_one_message_are_requested_again_together(asked: list[str]) -> None:
    with serving_in_a_thread(ModelCluster(1, 1)) as servers, Client(servers.patient_url) as client:
        for key in KEYS:
            client.put(key, bytes(100_000))
        asked.clear()
        before = client.statistics()["frames"]
        found = client.get_many(KEYS)
        assert [len(found[key].value) for key in KEYS] == [100_000] * COUNT
        assert client.statistics()["frames"] - before <= 10
        assert asked == []


def test_repeated_reads_have_their_time_from_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_in_a_thread(ModelCluster(1, 1)) as servers, Client(servers.patient_url) as client:
        for key in KEYS:
            client.put(key, bytes(100_000))
        engine = client._engine
        assert engine is not None
        send, at, left = engine._send_together, 0.0, list[float]()
        now = engine.env.clock.now
        monkeypatch.setattr(engine.env.clock, "now", lambda: now() + at)

        def slowly(operations: Any) -> None:
            nonlocal at
            left.append(operations[0].deadline - engine.env.clock.now())
            send(operations)
            at += 20.0

        monkeypatch.setattr(engine, "_send_together", slowly)
        assert set(client.get_many(KEYS)) == set(KEYS)
        assert at > PATIENCE_S
        assert min(left) > 0


def test_operations_that_fail_together_request_one_topology(asked: list[str]) -> None:
    cluster = ModelCluster(1, 1)
    with serving_in_a_thread(cluster) as servers, Client(servers.patient_url) as client:
        refused = set[bytes]()

        def once(op: Op, answer: Callable[[Any], None]) -> bool:
            if op.key in refused:
                return False
            refused.add(op.key)
            answer(NotLeader(PartitionId("p1")))
            return True

        cluster.servers[0].intercept = once
        asked.clear()
        client.put_many(dict.fromkeys(KEYS, b"v"))
        assert len(refused) == COUNT
        assert len(asked) == 1


@pytest.mark.parametrize("call", ["put_many", "count"])
def test_operation_refused_by_an_overloaded_server_keeps_its_deadline(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Otherwise all clients would resend it without a pause, as long as one operation is done each time."""
    cluster = ModelCluster(1, 3)
    with serving_in_a_thread(cluster) as servers, Client(servers.patient_url) as client:
        engine = client._engine
        assert engine is not None
        send, at, room, goes = engine._send_together, 0.0, list[int](), 0
        now = engine.env.clock.now
        monkeypatch.setattr(engine.env.clock, "now", lambda: now() + at)

        def one(op: Op, answer: Callable[[Any], None]) -> bool:
            if room:
                room.pop()
                return False
            answer(Overloaded("too much to do"))
            return True

        def slowly(operations: Any) -> None:
            nonlocal at, goes
            room.append(1)
            send(operations)
            goes, at = goes + 1, at + 30.0

        monkeypatch.setattr(engine, "_send_together", slowly)
        cluster.servers[0].intercept = one
        began = engine.env.clock.now()
        arguments = [dict.fromkeys(KEYS, b"v")] if call == "put_many" else []
        with pytest.raises(Overloaded):
            getattr(client, call)(*arguments, timeout_s=20.0)
        assert goes == 1
        assert engine.env.clock.now() - began < 30.0 + 20.0, "its deadline starts with the first answers"
