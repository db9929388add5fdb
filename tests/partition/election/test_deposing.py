"""When the replicas that follow a leader may depose it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.env.real import real_env
from kvstore.errors import InvalidRequest, OutcomeUnknown
from kvstore.meta.memory import MemoryStore
from kvstore.partition.election import deposing
from kvstore.partition.election.deposing import CONFIRM_S, SEES, LeaderWatch, ReachReport, is_gone, may_depose
from kvstore.partition.election.leader_znode import Claims
from kvstore.partition.election.peer_replicas import HOLD, SERVING, PeerReplicas
from kvstore.partition.election.ranking import LeaderRecord
from kvstore.partition.election.role_events import LeaderLost
from kvstore.types import PartitionId, ServerId
from tests.waiting import PATIENCE_S

P1 = PartitionId("p1")
ME, LEADER = ServerId("me"), ServerId("leader")
B, C, D = ServerId("b"), ServerId("c"), ServerId("d")
AGREES = ReachReport(CONFIRM_S, reaches_me=True)
HEARS = ReachReport(None, reaches_me=True)
HEARD_A_MOMENT_AGO = ReachReport(CONFIRM_S - 0.5, reaches_me=True)
CUT_OFF_FROM_ME = ReachReport(9.0, reaches_me=False)


# docs/protocol.md P40
@pytest.mark.parametrize(
    ("replicas", "reports", "may"),
    [
        (3, {B: AGREES}, True),
        (3, {}, False),  # the third replica is dead: a single observer deposes nobody
        (3, {B: HEARS}, False),
        (3, {B: HEARD_A_MOMENT_AGO}, False),
        (3, {B: CUT_OFF_FROM_ME}, False),  # the asking replica would be deposed next
        (2, {}, False),
        (5, {B: AGREES}, False),
        (5, {B: AGREES, C: AGREES}, True),
        (5, {B: AGREES, C: AGREES, D: HEARS}, True),  # reachable by one of four
        (5, {B: AGREES, C: HEARS, D: HEARS}, False),
        (5, {B: AGREES, C: CUT_OFF_FROM_ME, D: CUT_OFF_FROM_ME}, False),
    ],
)
def test_leader_is_deposed_by_majority_only_when_silent(
    replicas: int, reports: dict[ServerId, ReachReport], may: bool
) -> None:
    assert may_depose(replicas, reports) is may


# docs/protocol.md P40
@pytest.mark.parametrize(
    ("others", "reports", "registered", "gone"),
    [
        ([], {}, [], True),  # two replicas: there is no other to ask
        ([B], {B: ReachReport(0.01, reaches_me=True)}, [B], True),  # its link broke a moment ago
        ([B], {B: CUT_OFF_FROM_ME}, [B], False),  # no replica would reach the asking one
        ([B], {B: HEARS}, [B], False),
        ([B], {}, [B], False),  # it is alive and does not answer: this replica may be the one that is cut off
        ([B], {}, [], True),  # it has no session
        ([B], {B: HEARS}, [], False),  # it has none either, and still receives
        ([B, C], {B: HEARS}, [], False),
        ([B, C], {B: AGREES}, [], True),
        ([B, C], {B: AGREES}, [C], False),
        ([B, C, D], {B: AGREES, C: AGREES, D: HEARS}, [B, C, D], False),
    ],
)
def test_refused_connection_counts_unless_another_replica_reaches_leader(
    others: list[ServerId], reports: dict[ServerId, ReachReport], registered: list[ServerId], gone: bool
) -> None:
    assert is_gone(others, reports, registered) is gone


def test_reach_report_round_trips_and_refuses_garbage() -> None:
    for report in (AGREES, HEARS, CUT_OFF_FROM_ME):
        assert ReachReport.decode(report.encode()) == report
    for garbage in (b"", b"1", b"[1]", b'["x", true]', b"{}"):
        with pytest.raises(InvalidRequest, match="expected"):
            ReachReport.decode(garbage)


class Wedged:
    """A leader whose link echoes pings and whose replica answers nothing, and another replica that agrees."""

    def silent_s(self, server: ServerId) -> float | None:
        return None

    async def call(self, server: ServerId, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        if method == HOLD:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), timeout_s)
            raise OutcomeUnknown(f"{server} did not answer {method}")
        assert (server, method) == (B, SEES)
        return AGREES.encode()


class Recovered(Wedged):
    """A leader that has left one held question unanswered and then recovers: it holds the next one."""

    def __init__(self) -> None:
        self.methods: list[str] = []
        self.is_held = asyncio.Event()

    async def call(self, server: ServerId, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        self.methods.append(method)
        if method == HOLD and self.methods.count(HOLD) > 1:
            self.is_held.set()
            await asyncio.Event().wait()
        return b"1unreached" if method == SERVING else await super().call(server, partition, method, body, timeout_s)


# docs/protocol.md P40
async def test_leader_that_recovers_is_not_reported_as_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another follower would depose it by that report, until the held question is answered."""
    monkeypatch.setattr(deposing, "HOLD_PATIENCE_S", 0.1)
    env, store, peers = real_env(tmp_path), MemoryStore(), Recovered()
    claims = Claims(store, P1, LEADER)
    await claims.prepare()
    replicas = PeerReplicas(env, P1, ME, peers, lambda: (LEADER, B, ME))  # type: ignore[arg-type]
    watch = LeaderWatch(env, P1, ME, peers, replicas, claims, lambda _: None)  # type: ignore[arg-type]
    running = env.nursery.spawn(watch.run(lambda: LEADER, _never), name="watch")
    async with asyncio.timeout(PATIENCE_S):
        await peers.is_held.wait()
    assert peers.methods.count(HOLD) == 2
    assert ReachReport.decode(await watch.sees(B, b'["leader", false]')).silent_s is None
    running.cancel()
    await env.nursery.close()


async def _never(timeout_s: float) -> None:
    await asyncio.Event().wait()


# docs/protocol.md P40
async def test_leader_is_lost_when_it_answers_nothing_on_a_live_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deposing, "HOLD_PATIENCE_S", 0.1)
    monkeypatch.setattr(deposing, "SILENT_S", 0.05)
    env, store, peers = real_env(tmp_path), MemoryStore(), Wedged()
    claims = Claims(store, P1, LEADER)
    await claims.prepare()
    record = LeaderRecord(LEADER, 1, "nonce")
    assert await claims.claim(record)
    replicas = PeerReplicas(env, P1, ME, peers, lambda: (LEADER, B, ME))  # type: ignore[arg-type]
    lost: asyncio.Future[LeaderLost] = asyncio.get_running_loop().create_future()
    watch = LeaderWatch(env, P1, ME, peers, replicas, claims, lambda event: lost.done() or lost.set_result(event))  # type: ignore[arg-type]
    running = env.nursery.spawn(watch.run(lambda: LEADER, _never), name="watch")
    async with asyncio.timeout(PATIENCE_S):
        assert await lost == LeaderLost(record, await claims.term())
    running.cancel()
    await env.nursery.close()
