"""A pinned view learns from the homes' pinned views which of its intents are committed (docs/protocol.md, Tx13)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sortedcontainers import SortedDict

from kvstore.errors import NoSuchPin, NotLeader, Unavailable
from kvstore.partition import pinning
from kvstore.partition.config import PartitionConfig
from kvstore.partition.pinning import Pinning
from kvstore.partition.state import move_records
from kvstore.partition.state.draft import Draft
from kvstore.partition.state.entry import EntryKind, control
from kvstore.partition.state.intents import Intent, IntentEffect, IntentRecord
from kvstore.partition.state.internal import Attempt
from kvstore.partition.state.marks import MarkRecord
from kvstore.partition.state.move_records import Founded
from kvstore.partition.state.pinned_views import PinnedView
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import spans_of
from kvstore.ring import Ring
from kvstore.ring.hashing import MURMUR3
from kvstore.server.feed.pinned_outcomes import PinnedOutcomes
from kvstore.types import EntryId, LedgerId, PartitionId, Position, ServerId
from kvstore.wal.ports import LogEntry
from tests.partition.state.engine_memory import MemoryEngine
from tests.ring import rings
from tests.ring.rings import new_ring

A, B, C = map(PartitionId, "abc")
N1, N2, N3 = ServerId("n1"), ServerId("n2"), ServerId("n3")
PIN, NUMBER = "pin", 5


def key_of(ring: Ring, partition: PartitionId, *, number: int = 0) -> bytes:
    """Return a key of the partition."""
    keys = (b"key%d" % each for each in range(1000))
    return [key for key in keys if ring.owner_of(MURMUR3.token_of(key)) == partition][number]


class Replicas:
    """One replica of each partition at each of two servers, and the calls between them."""

    def __init__(self) -> None:
        self.ring = new_ring([A, B, C], {N1: "", N2: ""}, 2)
        self.states = {
            (server, partition): ReplicaState(partition, MemoryEngine(), PartitionConfig(), rings.key_hash)
            for server in (N1, N2)
            for partition in (A, B, C)
        }
        self.logs: dict[PartitionId, list[LogEntry]] = {A: [], B: [], C: []}
        self.calls: list[tuple[ServerId, PartitionId]] = []
        self.away: set[ServerId] = set()
        for partition in self.logs:
            self.record(partition, EntryKind.EPOCH_START, Founded(spans_of(self.ring, partition)))
        source: Any = SimpleNamespace(topology=self, links=self)
        self.servers: dict[ServerId, Any] = {N1: None, N2: None}
        self.leaders = dict.fromkeys(self.logs, (N2, 1))
        self.outcomes = PinnedOutcomes(source)

    def log(self, partition: PartitionId, payload: bytes) -> None:
        log = self.logs[partition]
        log.append(LogEntry(Position(LedgerId(1), EntryId(len(log))), payload))
        for (_, each), state in self.states.items():
            if each == partition:
                state.apply(log[-1])

    def record(self, partition: PartitionId, kind: EntryKind, record: Any) -> None:
        seq = self.states[N1, partition].seq + 1
        self.log(partition, control(partition, 1, seq, 1, kind, move_records.encode(record)).encode())

    def draft(self, partition: PartitionId) -> Draft:
        return Draft(self.states[N1, partition].seq + 1, 1, MURMUR3)

    def intent(self, partition: PartitionId, home: bytes, number: int) -> Intent:
        draft = self.draft(partition)
        record = IntentRecord(Attempt(A, 1, number), home, True, 1, 2, IntentEffect.PUT, b"new")
        intent = draft.intent(key_of(self.ring, partition, number=number), record)
        self.log(partition, draft.entry(partition, 1).encode())
        return intent

    def decide(self, partition: PartitionId, *intents: Intent) -> None:
        for intent in intents:
            draft = self.draft(partition)
            draft.decision(intent.home, intent.attempt, [intent.name])
            self.log(partition, draft.entry(partition, 1).encode())

    def pin(self, *partitions: PartitionId, number: int = NUMBER) -> None:
        for partition in partitions:
            self.record(partition, EntryKind.MARK, MarkRecord(PIN, 1 << 60, True, number))

    def held(self, partition: PartitionId) -> PinnedView:
        return self.states[N1, partition].pinned_views.by_pin[PIN]

    async def call(self, server: ServerId, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        self.calls.append((server, partition))
        if server in self.away:
            raise Unavailable("away")
        if (server, partition) not in self.states:
            raise NotLeader(partition)
        env: Any = SimpleNamespace(clock=SimpleNamespace(passed_ms=lambda: 0))
        replica = Pinning(env, partition, self.states[server, partition], lambda: None, cast("Any", None))
        return await replica.answer(method, body)

    def resolve(self, partition: PartitionId) -> set[bytes]:
        """Return the keys that are committed at the pin."""
        asyncio.run(self.outcomes.resolve(self.held(partition)))
        return {key[5:] for key in self.held(partition).committed_rows or ()}


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


def test_intent_is_committed_if_the_homes_view_has_its_decision(replicas: Replicas) -> None:
    home = key_of(replicas.ring, A)
    first, second = replicas.intent(B, home, 1), replicas.intent(B, home, 2)
    replicas.decide(A, first)
    replicas.pin(A, B)
    replicas.decide(A, second)
    assert replicas.resolve(B) == {first.key}
    assert replicas.calls == [(N2, A)], "the leader of the owner was asked once"
    assert replicas.resolve(B) == {first.key}
    assert len(replicas.calls) == 1, "what is known is not asked again"


def test_view_that_owns_the_home_key_asks_nobody(replicas: Replicas) -> None:
    home = key_of(replicas.ring, B)
    intent = replicas.intent(B, home, 1)
    replicas.decide(B, intent)
    replicas.pin(B)
    assert replicas.resolve(B) == {intent.key}
    assert replicas.calls == []


def test_another_replica_is_asked_if_one_does_not_keep_the_pin(replicas: Replicas) -> None:
    intent = replicas.intent(B, key_of(replicas.ring, A), 1)
    replicas.decide(A, intent)
    replicas.pin(A, B)
    replicas.states[N2, A].pinned_views.drop(PIN)
    assert replicas.resolve(B) == {intent.key}
    assert replicas.calls == [(N2, A), (N1, A)]


def test_owner_at_the_pin_is_found_if_the_range_has_moved_since(replicas: Replicas) -> None:
    intent = replicas.intent(B, key_of(replicas.ring, C), 1)
    replicas.decide(C, intent)
    replicas.pin(A, B, C)
    replicas.ring = replace(replicas.ring, tokens=SortedDict.fromkeys(replicas.ring.tokens, A))
    assert replicas.resolve(B) == {intent.key}
    assert [partition for _, partition in replicas.calls] == [A, B, C]


def test_pin_of_another_number_does_not_answer(replicas: Replicas) -> None:
    """A pin that was taken again under its id may contain a later decision."""
    intent = replicas.intent(B, key_of(replicas.ring, A), 1)
    replicas.pin(A, B)
    replicas.decide(A, intent)
    replicas.pin(A, number=NUMBER + 1)
    with pytest.raises(NoSuchPin, match=r"outcome of 1 intents.*take another pin"):
        replicas.resolve(B)
    assert not replicas.held(B).is_resolved


# docs/protocol.md K5
def test_server_that_keeps_the_pin_for_a_replica_that_left_is_asked(replicas: Replicas) -> None:
    """All replicas of the home may have moved, or the home may have retired."""
    intent = replicas.intent(B, key_of(replicas.ring, A), 1)
    replicas.decide(A, intent)
    replicas.pin(A, B)
    for server in (N1, N2):
        replicas.states[N3, A] = replicas.states.pop((server, A))
    replicas.servers[N3] = None
    assert replicas.resolve(B) == {intent.key}
    assert replicas.calls[-1] == (N3, A)


def test_pin_is_not_gone_while_a_replica_of_the_home_is_down(replicas: Replicas) -> None:
    replicas.intent(B, key_of(replicas.ring, A), 1)
    replicas.pin(A, B)
    replicas.states[N2, A].pinned_views.drop(PIN)
    del replicas.servers[N1]
    with pytest.raises(Unavailable, match="retry"):
        replicas.resolve(B)
    replicas.states[N1, A].pinned_views.drop(PIN)
    replicas.servers[N1] = None
    with pytest.raises(NoSuchPin):
        replicas.resolve(B)


def test_view_stays_unread_while_no_home_answers(replicas: Replicas) -> None:
    intent = replicas.intent(B, key_of(replicas.ring, A), 1)
    replicas.decide(A, intent)
    replicas.pin(A, B)
    replicas.away = {N1, N2}
    with pytest.raises(Unavailable):
        replicas.resolve(B)
    replicas.away = set()
    assert replicas.resolve(B) == {intent.key}


def test_damaged_replica_does_not_answer(replicas: Replicas) -> None:
    intent = replicas.intent(B, key_of(replicas.ring, A), 1)
    replicas.pin(A, B)
    state = replicas.states[N2, A]
    state.is_suspect = True
    assert replicas.resolve(B) == set()
    assert replicas.calls == [(N2, A), (N1, A)]
    asked = pinning.AskedIntent(intent.home, intent.attempt, intent.key, intent.seq)
    body = pinning.encode(pinning.DecidedRequest(PIN, NUMBER, [asked]))
    with pytest.raises(NoSuchPin):
        asyncio.run(replicas.call(N2, A, pinning.DECIDED, body, 1.0))


def test_home_that_does_not_answer_delays_no_other_view(replicas: Replicas) -> None:
    slow = replicas.intent(B, key_of(replicas.ring, A), 1)
    quick = replicas.intent(A, key_of(replicas.ring, C), 1)
    replicas.decide(A, slow)
    replicas.decide(C, quick)
    replicas.pin(A, B, C)
    answer, asked = replicas.call, asyncio.Event()

    async def call(server: ServerId, partition: PartitionId, *asking: Any) -> bytes:
        if partition == A:
            asked.set()
            await asyncio.Event().wait()
        return await answer(server, partition, *asking)

    async def resolve() -> None:
        stuck = asyncio.ensure_future(replicas.outcomes.resolve(replicas.held(B)))
        await asked.wait()
        async with asyncio.timeout(5):
            await replicas.outcomes.resolve(replicas.held(A))
        stuck.cancel()

    replicas.call = call  # type: ignore[method-assign]
    asyncio.run(resolve())
    assert replicas.held(A).is_resolved
    assert not replicas.held(B).is_resolved


def test_many_readers_of_a_view_ask_once(replicas: Replicas) -> None:
    intent = replicas.intent(B, key_of(replicas.ring, A), 1)
    replicas.decide(A, intent)
    replicas.pin(A, B)

    async def resolve() -> None:
        await asyncio.gather(*(replicas.outcomes.resolve(replicas.held(B)) for _ in range(4)))

    asyncio.run(resolve())
    assert replicas.calls == [(N2, A)]
