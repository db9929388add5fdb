"""Drives the balancer: observes the cluster, plans, and makes steps through the calls that operators use.

Every server runs a balancer, but only that of the first server by name acts, as with the steward. Two that act at once
make no more steps than one, because each step is recorded by compare-and-set before it is made (docs/protocol.md H13).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Protocol

from google.protobuf import text_format

from kvstore.env import Env
from kvstore.errors import StoreError
from kvstore.meta.store import MetadataStore, SessionState
from kvstore.proto import admin_pb2
from kvstore.proto.admin_pb2 import BalanceReport, BalanceResponse, BalanceStep, ClusterReport
from kvstore.server.access.audit import CallAuthor
from kvstore.server.access.changes import AdminChanges
from kvstore.server.balance.observation import Observation
from kvstore.server.balance.planner import Patience, Plan, plan
from kvstore.server.balance.record import BalanceRecord, Intent, Made, record_store
from kvstore.server.balance.step import Goal, Step
from kvstore.server.balance.survey import observation_of
from kvstore.server.balance_config import BalanceConfig, BalanceMode
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.load.load import PartitionLoad
from kvstore.types import PartitionId, ServerId

log = logging.getLogger(__name__)

TICKS = 4
"""Observations within the settling time."""
TICK_S_MIN = 0.5
WHO = "balancer"
"""The author of the balancer's changes in the audit log."""


class Surveys(Protocol):
    """Reports on the cluster. Implemented by kvstore.server.status.surveyor.Surveyor."""

    async def take(self) -> ClusterReport: ...


class RingChanges(Protocol):
    """The operator's calls that make a step. Implemented by kvstore.server.grpc.ring_admin.RingAdmin."""

    async def change(self, request: admin_pb2.ChangeRingRequest) -> admin_pb2.ChangeRingResponse: ...
    async def change_replicas(self, request: admin_pb2.ChangeReplicasRequest) -> admin_pb2.RingStatusResponse: ...


class BalancedNode(Protocol):
    """The node of the balancer. Implemented by kvstore.server.app.Node."""

    @property
    def id(self) -> ServerId: ...
    @property
    def store(self) -> MetadataStore: ...
    @property
    def topology(self) -> ClusterTopology: ...
    @property
    def changes(self) -> AdminChanges: ...
    async def loads(self) -> dict[PartitionId, PartitionLoad]: ...


class Balancer:
    """The part of one server in balancing the cluster."""

    def __init__(
        self, env: Env, node: BalancedNode, surveys: Surveys, changes: RingChanges, config: BalanceConfig
    ) -> None:
        self._env, self._node, self._surveys, self._changes, self._config = env, node, surveys, changes, config
        self._records = record_store(node.store)
        self._nursery = env.nursery.child("balancer")
        self._patience = Patience()
        self._last: tuple[Plan, BalanceRecord, int] | None = None
        """The last plan, the record and the date for which it was made. None on a server that does not balance."""
        self._suggested: frozenset[tuple[Goal, str]] = frozenset()
        """The present imbalances against which a step was suggested. Each is logged once, because the best step may be
        another one at each observation."""
        self._failed = ""
        self.steps = 0

    def start(self) -> None:
        if self._config.mode is not BalanceMode.OFF:
            self._nursery.spawn(self._act_now_and_then(), name="balance")

    async def close(self) -> None:
        await self._nursery.close()

    def statistics(self) -> Mapping[str, float]:
        found: dict[str, float] = {"balance_steps_total": self.steps}
        if self._last is not None:
            planned = self._last[0]
            found["balance_step_pending"] = float(planned.step is not None)
            found["balance_waits"] = float(len(planned.waits))
            found["balance_budget_left"] = float(planned.budget_left)
        return found

    def report(self) -> BalanceReport | None:
        """Return the state of the balancer, or None if this server does not balance the cluster."""
        if self._last is None:
            return None
        planned, record, now_ms = self._last
        return BalanceReport(
            mode=self._config.mode.value,
            step=str(planned.step or ""),
            waits=planned.waits,
            made_last_hour=self._config.moves_per_hour - record.budget_left(self._config, now_ms),
            moves_per_hour=self._config.moves_per_hour,
        )

    async def explain(self) -> BalanceResponse:
        """Return the next step that would be made now, and the reasons. Changes nothing. Raises StoreError."""
        seen, record = await self._observe(), await self._records.read()
        now_ms = self._env.clock.date_ms()
        planned = plan(seen, self._config, record, now_ms)
        answer = BalanceResponse(
            mode=self._config.mode.value,
            balancer=self._balancing,
            waits=planned.waits,
            step=_message(planned.step) if planned.step is not None else None,
            budget_left=planned.budget_left,
            moves_per_hour=self._config.moves_per_hour,
            window=self._config.window,
            settle_s=self._config.settle_s,
        )
        for goal, text in planned.notes:
            answer.notes.add(goal=goal.value, text=text)
        for server, state in sorted(seen.servers.items()):
            answer.servers.add(
                id=server,
                leads=len(seen.leads_of(server)),
                replicas=sum(server in seen.ring.partitions[each].replicas for each in seen.serving),
                work_per_s=seen.works[server],
                disk_used=state.used if state.disk_total else None,
            )
        for made in reversed(record.steps):
            answer.made.add(age_s=max(0, now_ms - made.at_ms) / 1000, step=_message(made.step), by=made.by)
        return answer

    @property
    def _balancing(self) -> str:
        """The server that balances the cluster, as far as this server knows."""
        return min(self._node.topology.servers, default="")

    async def _observe(self) -> Observation:
        report, loads = await self._surveys.take(), await self._node.loads()
        return observation_of(report, self._node.topology.ring, loads)

    async def _act_now_and_then(self) -> None:
        tick_s = max(TICK_S_MIN, self._config.settle_s / TICKS)
        while True:
            await self._env.beat.pause(tick_s * (1 + self._env.random.random() / 4))
            try:
                await self.act()
            except (StoreError, ValueError) as error:
                self._forget()
                if repr(error) != self._failed:
                    log.warning("the balancer failed and retries: %r", error)
                self._failed = repr(error)
            else:
                self._failed = ""

    def _forget(self) -> None:
        """Start the observation of imbalances again, because the present state is unknown."""
        self._patience.forget()
        self._last = None

    # docs/protocol.md H13
    async def act(self) -> Step | None:
        """Observe once, and make and return the step that is due, if any. Raises StoreError, ValueError."""
        if self._node.id != self._balancing or self._node.store.state is not SessionState.CONNECTED:
            self._forget()
            return None
        seen, record = await self._observe(), await self._records.read()
        now_ms = self._env.clock.date_ms()
        planned = plan(seen, self._config, record, now_ms)
        lasts_s = self._patience.lasts_s(planned, self._env.clock.now())
        self._last = planned, record, now_ms
        self._suggested &= planned.causes
        step = planned.due
        if step is None or lasts_s < self._config.settle_s:
            return None
        if self._config.mode is not BalanceMode.AUTO:
            if step.cause not in self._suggested:
                log.info("balance suggests command=%r: %s", step.command, step)
            self._suggested |= {step.cause}
            return None
        await self._make(step, seen.ring.version, now_ms)
        return step

    async def _make(self, step: Step, ring_version: int, now_ms: int) -> None:
        """Record the step, and make it unless the ring has changed. A step that is recorded and not made only costs a
        part of the budget."""
        made = Made(step=step, at_ms=now_ms, by=self._node.id)
        await self._records.change(Intent(made=made, config=self._config))
        self._patience.forget()
        call, request, work = self._call_of(step, ring_version)
        log.info("balance makes a step command=%r: %s", step.command, step)
        by = CallAuthor(WHO, self._node.id)
        await self._node.changes.make(by, call, work, text_format.MessageToString(request, as_one_line=True))
        self.steps += 1

    def _call_of(
        self, step: Step, ring_version: int
    ) -> tuple[str, admin_pb2.ChangeRingRequest | admin_pb2.ChangeReplicasRequest, Callable[[], Awaitable[object]]]:
        """Return the name of the operator's call that makes the step, its request, and the call itself."""
        operation = f"{WHO}-{self._env.random.randbytes(8).hex()}"
        if step.goal.moves_ranges:
            ranges = admin_pb2.ChangeRingRequest(
                action=admin_pb2.ChangeRingRequest.MOVE,
                target=step.target,
                first=step.first,
                last=step.last,
                ring_version=ring_version,
                operation=operation,
            )
            return "ChangeRing", ranges, partial(self._changes.change, ranges)
        replicas = admin_pb2.ChangeReplicasRequest(
            partition=step.partition, ring_version=ring_version, operation=operation
        )
        if step.goal is Goal.LEADS:
            replicas.lead = step.target
        else:
            replicas.newcomer, replicas.leaving = step.target, step.source
        return "ChangeReplicas", replicas, partial(self._changes.change_replicas, replicas)


def _message(step: Step) -> BalanceStep:
    is_range = step.goal.moves_ranges
    return BalanceStep(
        goal=step.goal.value,
        partition=step.partition,
        source=step.source,
        target=step.target,
        first=step.first if is_range else None,
        last=step.last if is_range else None,
        reason=step.reason,
        command=step.command,
    )
