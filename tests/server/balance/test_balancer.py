"""The balancer makes steps through the operator's calls, after the imbalance has lasted, and one at a time."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.env import Env
from kvstore.env.clock import Unjudged
from kvstore.env.logs.audit_lines import AuditLines
from kvstore.env.real import real_env
from kvstore.errors import InvalidRequest
from kvstore.meta.memory import MemoryStore
from kvstore.proto.admin_pb2 import DEGRADED, ClusterReport
from kvstore.ring import Ring, replicas
from kvstore.server.access.audit import AuditLog
from kvstore.server.access.changes import AdminChanges
from kvstore.server.balance.balancer import Balancer
from kvstore.server.balance.record import record_store
from kvstore.server.balance.survey import observation_of
from kvstore.server.balance_config import BalanceConfig, BalanceMode
from kvstore.server.cluster.topology import ClusterTopology, Member
from kvstore.server.grpc.ring_admin import RingAdmin
from kvstore.server.load.load import PartitionLoad
from kvstore.types import PartitionId, ServerId
from kvstore.versions import Fixed
from tests.ring.rings import new_ring

N1, N2, N3, N4, N5, N6 = (ServerId(f"n{i}") for i in range(1, 7))
AUTO = BalanceConfig(mode=BalanceMode.AUTO, settle_s=60)


class Clock(Unjudged):
    at = 1_000.0

    def now(self) -> float:
        return self.at

    def wall_ms(self) -> int:
        return int(self.at * 1000)

    date_ms = wall_ms


class Lines(AuditLines):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def put(self, line: str) -> None:
        self.lines.append(line)

    async def write(self, line: str) -> None:
        self.lines.append(line)


class World:
    """Three servers, of which n1 leads everything that is busy."""

    def __init__(self, env: Env) -> None:
        self.clock, self.audit = Clock(), Lines()
        self.env = replace(env, clock=self.clock)  # type: ignore[arg-type]
        self.store = MemoryStore()
        self.ring = new_ring([PartitionId(f"p{i}") for i in range(1, 7)], dict.fromkeys((N1, N2, N3), ""), 3)
        self.up = {each: Member(id=each, resp=f"{each}:1") for each in (N1, N2, N3)}
        self.busy = {each.id for each in self.ring.partitions.values() if each.replicas[0] == N1}
        self.busier = N1
        """The server whose busy partitions have a little more load."""
        self.findings: list[tuple[str, str]] = []

    def add_servers(self, *more: ServerId) -> None:
        """Found the cluster again with these servers, of which n1 and n2 are busy."""
        self.up |= {each: Member(id=each, resp=f"{each}:1") for each in more}
        self.ring = new_ring([PartitionId(f"p{i}") for i in range(1, 25)], dict.fromkeys(self.up, ""), 3)
        self.busy = {each.id for each in self.ring.partitions.values() if each.replicas[0] in (N1, N2)}

    def node(self, id: ServerId) -> Node:
        return Node(self, id)

    def balancer(self, id: ServerId = N1, config: BalanceConfig = AUTO) -> Balancer:
        node: Any = self.node(id)
        return Balancer(self.env, node, node, RingAdmin(self.env, node, node), config)

    async def wait(self, balancer: Balancer, seconds: float) -> None:
        """Let the balancer observe for so long."""
        for _ in range(int(seconds / 15)):
            self.clock.at += 15
            await balancer.act()


class Node:
    """One server of the world, as the balancer and the admin service see it."""

    def __init__(self, world: World, id: ServerId) -> None:
        self._world, self.id, self.store, self.versions = world, id, world.store, Fixed()
        audit = AuditLog(world.clock.now, world.clock.wall_ms, world.audit)
        self.changes = AdminChanges(world.env, audit)
        self.rings = self

    @property
    def ring(self) -> Ring:
        return self._world.ring

    @property
    def topology(self) -> ClusterTopology:
        return ClusterTopology(self._world.ring, {}, self._world.up)

    async def reread_servers(self) -> None:
        """Do nothing, because `topology` is never old."""

    async def change(self, step: Callable[[Ring], Ring], *, plans: bool = False) -> Ring:
        self._world.ring = step(self._world.ring)
        return self._world.ring

    async def take(self) -> ClusterReport:
        world = self._world
        report = ClusterReport(server=self.id)
        report.ring.version = world.ring.version
        for server in world.up:
            node = report.nodes.add(id=server, registered=True)
            node.report.roles.append("server")
        for member in world.ring.partitions.values():
            view = report.partitions.add(id=member.id, state="serving", leader=member.replicas[0], served=True)
            for server in member.replicas:
                view.replicas.add(server=server, is_up=True)
        for code, reason in world.findings:
            report.findings.add(grade=DEGRADED, code=code, subject="node n3", reason=reason)
        return report

    async def loads(self) -> dict[PartitionId, PartitionLoad]:
        busy, busier = self._world.busy, self._world.busier
        return {
            each.id: PartitionLoad(
                each.id, (5_000.0 + (each.replicas[0] == busier)) if each.id in busy else 100.0, 0.0, 0.0
            )
            for each in self._world.ring.partitions.values()
        }

    def leads(self) -> int:
        return sum(each.replicas[0] == N1 for each in self._world.ring.partitions.values())


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    env = real_env(tmp_path)
    yield World(env)
    await env.nursery.close()


async def test_step_is_made_once_imbalance_has_lasted(world: World) -> None:
    balancer, before = world.balancer(), world.ring
    await world.wait(balancer, 60)
    assert world.ring is before, "it has not lasted for 60 s yet"
    await world.wait(balancer, 30)
    assert len(world.busy & {each.id for each in world.ring.partitions.values() if each.replicas[0] != N1}) == 1
    [made] = (await record_store(world.store).read()).steps
    assert world.ring.operations[-1].id.startswith("balancer-")
    assert (made.by, made.step.source) == (N1, N1)
    begun, done = (line for line in world.audit.lines if "ChangeReplicas" in line)
    assert '"who":"balancer"' in begun
    assert '"outcome":"BEGUN"' in begun
    assert '"outcome":"OK"' in done
    await world.wait(balancer, 600)
    assert len((await record_store(world.store).read()).steps) == 1, "both servers have one busy partition now"
    assert balancer.statistics()["balance_steps_total"] == 1


# docs/protocol.md H13
async def test_two_servers_that_both_balance_make_one_step(world: World) -> None:
    one, other = world.balancer(), world.balancer()
    world.busy |= {each.id for each in world.ring.partitions.values() if each.replicas[0] == N2}
    for _ in range(8):
        world.clock.at += 15
        for balancer in (one, other):
            try:
                await balancer.act()
            except InvalidRequest:
                continue
    assert len((await record_store(world.store).read()).steps) == 1
    assert world.ring.version == 2


# docs/protocol.md H13
async def test_step_that_cannot_be_recorded_is_not_made(world: World) -> None:
    balancer, before = world.balancer(), world.ring

    async def refuse(intent: object) -> None:
        raise InvalidRequest("the budget is used up")

    balancer._records.change = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(InvalidRequest, match="used up"):
        await world.wait(balancer, 120)
    assert world.ring is before


async def test_only_first_server_balances(world: World) -> None:
    before = world.ring
    balancer = world.balancer(N2)
    await world.wait(balancer, 300)
    assert world.ring is before
    assert balancer.report() is None
    del world.up[N1]
    assert (await balancer.explain()).balancer == N2


async def test_suggestion_is_logged_once_and_changes_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    before = world.ring
    balancer = world.balancer(config=replace(AUTO, mode=BalanceMode.SUGGEST))
    await world.wait(balancer, 600)
    assert world.ring is before
    assert await record_store(world.store).read() == record_store(world.store).empty
    told = [each.getMessage() for each in caplog.records if "balance suggests" in each.getMessage()]
    assert len(told) == 1
    assert "kvstore partition move-lead" in told[0]
    report = balancer.report()
    assert report is not None
    assert report.mode == "suggest"
    assert "move the lead of" in report.step


async def test_equal_imbalances_are_each_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Two servers are about equally busy, and another one is busier at each observation."""
    caplog.set_level(logging.INFO)
    world.add_servers(N4, N5, N6)
    balancer = world.balancer(config=replace(AUTO, mode=BalanceMode.SUGGEST))
    for tick in range(40):
        world.busier = (N1, N2)[tick % 2]
        await world.wait(balancer, 15)
    told = [each.getMessage() for each in caplog.records if "balance suggests" in each.getMessage()]
    assert len(told) == 2


async def test_unhealthy_cluster_stops_balancer(world: World) -> None:
    before, balancer = world.ring, world.balancer()
    world.findings = [("node_silent", "it does not answer")]
    await world.wait(balancer, 600)
    assert world.ring is before
    answer = await balancer.explain()
    assert "the cluster is not healthy: see the findings about node n3" in answer.waits
    assert answer.step.command, "the step is shown all the same"
    world.findings = [("certificate_expires", "its certificate expires in 20 days")]
    await world.wait(balancer, 75)
    assert world.ring.version == before.version + 1, "the time counts from when the cluster is healthy"


async def test_ring_that_has_changed_refuses_step_and_costs_budget_only(world: World) -> None:
    balancer, taken = world.balancer(), None
    await world.wait(balancer, 60)
    node: Any = world.node(N1)

    async def changes(intent: Any) -> None:
        nonlocal taken
        taken = replicas.prefer_leader(
            world.ring, PartitionId("p2"), world.ring.partitions[PartitionId("p2")].replicas[2]
        )
        world.ring = taken

    balancer._records.change = changes  # type: ignore[method-assign,assignment]
    with pytest.raises(InvalidRequest, match="expected ring version 1"):
        await world.wait(balancer, 30)
    assert world.ring is taken
    assert node.leads() >= 1


async def test_open_moves_and_different_releases_are_obstacles(world: World) -> None:
    node = world.node(N1)
    report, loads = await node.take(), await node.loads()
    assert observation_of(report, world.ring, loads).obstacles == ()
    report.nodes[0].report.version, report.nodes[1].report.version = "0.1.0", "0.2.0"
    assert "different releases" in observation_of(report, world.ring, loads).obstacles[0]
    joined = replicas.drain(world.ring, N3)
    [changed, drained, *_] = observation_of(await node.take(), joined, loads).obstacles
    assert "during the survey" in changed
    assert "n3 is being drained" in drained
    del loads[PartitionId("p1")]
    assert "p1 do not report" in observation_of(await node.take(), world.ring, loads).obstacles[0]
