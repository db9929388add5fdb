"""The admin calls about transactions over several partitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.errors import (
    InvalidRequest,
    MetadataUnavailable,
    NoSuchNode,
    NotLeader,
    OutcomeUnknown,
    StoreError,
    Unavailable,
)
from kvstore.partition.state.commands import Sink
from kvstore.partition.state.decisions import Decision, DecisionRecord, Decisions
from kvstore.partition.state.intents import Intent, IntentName, IntentRecord, Intents
from kvstore.partition.state.internal import Attempt
from kvstore.proto.admin_pb2 import AbandonTransactionsRequest
from kvstore.server.grpc import transaction_admin
from kvstore.server.grpc.transaction_admin import TransactionAdmin
from kvstore.types import PartitionId

P1, P2, P3 = (PartitionId(f"p{number}") for number in (1, 2, 3))
NOW_MS = 1_000_000
FIRST, SECOND = Attempt(P3, 7, 1), Attempt(P3, 7, 2)
OTHER = Attempt(P2, 4, 1)


def intent(key: bytes, seq: int, attempt: Attempt, home: bytes) -> Intent:
    return Intent(key, seq, IntentRecord(attempt, home, is_exclusive=True, written_ms=NOW_MS - 45_000))


class Replica:
    """A replica that has these intents and decisions, and answers at once."""

    def __init__(self, intents: Sequence[Intent] = (), decisions: Sequence[Decision] = ()) -> None:
        self.state: Any = SimpleNamespace(seq=9, intents=Intents(intents), decisions=Decisions(decisions))
        self.serving = True
        self.answer: Any = 0
        self.abandoned: list[IntentName] = []

    def abandon(self, intents: Sequence[Intent], sink: Sink) -> None:
        self.abandoned += [each.name for each in intents]
        for place, _ in enumerate(intents):
            if self.answer is not None:
                sink.complete(place, self.answer)


class Node:
    """A node with replicas. Home keys name their partitions. It has known for an hour that nobody leads p3."""

    def __init__(self, **replicas: Replica) -> None:
        self.id = "n1"
        ring = SimpleNamespace(partitions={P1: None, P2: None, P3: None}, partition_of=lambda key: key.decode())
        self.topology: Any = SimpleNamespace(ring=ring, leaders={P1: ("n1", 3), P2: ("n2", 4)})
        self.hosted = lambda: replicas
        self.store: Any = self
        self.stored: StoreError | None = NoSuchNode("/partitions/p3/leader")
        self.time_s = 0.0
        self.changed: Callable[[], None] = lambda: None
        self.calls = TransactionAdmin(self, cast("Any", self), self.on_topology)  # type: ignore[arg-type]
        self.time_s = 3600.0

    def on_topology(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    def lead(self, partition: PartitionId, *, is_led: bool) -> None:
        """Let the node learn that the partition has a leader, or none."""
        leaders = {each: leader for each, leader in self.topology.leaders.items() if each != partition}
        leaders |= {partition: ("n3", 8)} if is_led else {}
        self.topology = SimpleNamespace(ring=self.topology.ring, leaders=leaders)
        self.changed()

    def now(self) -> float:
        return self.time_s

    def date_ms(self) -> int:
        return NOW_MS

    async def sync(self, path: str) -> None:
        assert path == "/partitions/p3/leader"

    async def get(self, path: str) -> None:
        if self.stored is not None:
            raise self.stored


def admin(**replicas: Replica) -> TransactionAdmin:
    return Node(**replicas).calls


def held() -> Replica:
    return Replica([intent(b"a", 5, FIRST, b"p3"), intent(b"b", 6, SECOND, b"p3"), intent(b"c", 7, OTHER, b"p2")])


def decided(attempt: Attempt) -> Decision:
    return Decision(b"p3", 8, DecisionRecord(attempt, (IntentName(b"a", 5),), NOW_MS - 45_000))


async def refusal(subject: TransactionAdmin, home: str, attempt: str = "", *, force: bool = False) -> StoreError:
    with pytest.raises(StoreError) as refused:
        await subject.abandon(AbandonTransactionsRequest(home=home, attempt=attempt, force=force))
    return refused.value


def test_intents_and_decisions_are_shown_with_age_attempt_and_home() -> None:
    follower = Replica(decisions=[decided(FIRST)])
    follower.serving = False
    shown = admin(p1=held(), p3=follower).standing().replicas
    assert [(each.partition, each.is_leader, each.sequence) for each in shown] == [("p1", True, 9), ("p3", False, 9)]
    found = shown[0].intents[0]
    assert (found.key, found.sequence, found.attempt, found.home, found.home_key) == (b"a", 5, "p3/7/1", "p3", b"p3")
    assert (found.is_exclusive, found.age_s) == (True, 45.0)
    (decision,) = shown[1].decisions
    assert (decision.attempt, list(decision.keys), decision.age_s) == ("p3/7/1", [b"a"], 45.0)


# docs/protocol.md Tx15
async def test_abandon_aborts_the_intents_of_one_home_only() -> None:
    replica = held()
    answer = await admin(p1=replica).abandon(AbandonTransactionsRequest(home="p3"))
    assert replica.abandoned == [(b"a", 5), (b"b", 6)]
    assert [each.key for each in answer.intents] == [b"a", b"b"]


async def test_abandon_of_one_attempt_leaves_the_others() -> None:
    replica = held()
    await admin(p1=replica).abandon(AbandonTransactionsRequest(home="p3", attempt="p3/7/2"))
    assert replica.abandoned == [(b"b", 6)]


async def test_abandon_is_refused_while_the_home_has_a_leader() -> None:
    replica = held()
    refused = await refusal(admin(p1=replica), "p2")
    assert isinstance(refused, InvalidRequest)
    assert "p2 has a leader, n2, which alone knows what is committed" in str(refused)
    assert replica.abandoned == []


# docs/protocol.md Tx15
async def test_abandon_is_refused_while_the_home_changes_leaders() -> None:
    replica = held()
    node = Node(p1=replica)
    node.lead(P3, is_led=True)
    node.lead(P3, is_led=False)
    for wait_s in (0.0, 59.0):
        node.time_s = 3600.0 + wait_s
        node.changed()
        assert f"n1 has known none of p3 for {wait_s:.0f} s" in str(await refusal(node.calls, "p3"))
    node.time_s = 3660.0
    node.lead(P3, is_led=True)
    node.time_s = 9999.0
    node.lead(P3, is_led=False)
    assert "for 0 s" in str(await refusal(node.calls, "p3")), "it had a leader meanwhile"
    assert replica.abandoned == []
    await node.calls.abandon(AbandonTransactionsRequest(home="p3", force=True))
    assert replica.abandoned == [(b"a", 5), (b"b", 6)]


async def test_abandon_needs_the_metadata_store_to_say_that_nobody_leads() -> None:
    replica = held()
    node = Node(p1=replica)
    node.stored = None
    assert "p3 has a leader again" in str(await refusal(node.calls, "p3"))
    node.stored = MetadataUnavailable("not connected")
    assert isinstance(await refusal(node.calls, "p3"), Unavailable)
    assert replica.abandoned == []
    await node.calls.abandon(AbandonTransactionsRequest(home="p3", force=True))
    assert replica.abandoned == [(b"a", 5), (b"b", 6)]


async def test_abandon_by_force_is_refused_while_a_leader_is_known() -> None:
    replica = held()
    assert "p2 has a leader, n2" in str(await refusal(admin(p1=replica), "p2", force=True))
    assert replica.abandoned == []


async def test_abandon_is_refused_for_what_a_replica_of_the_home_has_committed() -> None:
    replica, subject = held(), Replica(decisions=[decided(FIRST)])
    subject.serving = False
    for attempt in ("", "p3/7/1"):
        refused = await refusal(admin(p1=replica, p3=subject), "p3", attempt)
        assert "has decided to commit p3/7/1" in str(refused)
    assert replica.abandoned == []
    await admin(p1=replica, p3=subject).abandon(AbandonTransactionsRequest(home="p3", attempt="p3/7/2"))
    assert replica.abandoned == [(b"b", 6)]


async def test_abandon_of_an_unknown_home_is_refused() -> None:
    assert "expected a partition of the ring as home, one of p1, p2, p3; got 'p9'" in str(await refusal(admin(), "p9"))


async def test_abandon_leaves_partitions_that_another_node_leads() -> None:
    replica = held()
    replica.serving = False
    answer = await admin(p1=replica).abandon(AbandonTransactionsRequest(home="p3"))
    assert (replica.abandoned, len(answer.intents)) == ([], 0)


async def test_abandon_reports_a_log_that_refuses_or_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = held()
    replica.answer = NotLeader("p1")
    assert isinstance(await refusal(admin(p1=replica), "p3"), NotLeader)
    monkeypatch.setattr(transaction_admin, "ABANDON_S", 0.0)
    replica.answer = None
    assert isinstance(await refusal(admin(p1=replica), "p3"), OutcomeUnknown)
