"""Breakages of the balancer's rules that a simulated cluster notices (docs/protocol.md, H13, H15). A wrong or needless
step loses nothing: tests/server/balance/test_mutants.py has the breakages that make one."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.ring import replicas
from kvstore.server.balance.balancer import Balancer
from kvstore.server.placement import balancing
from tests.sim.breakages.catalogue import mutant
from tests.sim.strikes.knobs import BALANCER, MACHINES

CROWDED = {"nodes": 5, "machines": MACHINES, "partitions": 3, "balance": BALANCER, "partition__lead_back_s": 1.0}
"""Two processes have no replica, and both of their machines have one of each partition."""


# docs/protocol.md H15
@mutant("the balancer moves two replicas to a machine", **CROWDED)
def _machines_ignored(patch: pytest.MonkeyPatch) -> None:
    for module in (balancing, replicas):
        patch.setattr(module, "may_replace", lambda newcomer, _leaving, replicas: newcomer not in replicas)


# docs/protocol.md H13
@mutant("the balancer acts before it records", **CROWDED)
def _unrecorded(patch: pytest.MonkeyPatch) -> None:
    make = Balancer._make

    class Unwritten:
        async def change(self, intent: object) -> None:
            """Do nothing."""

    async def make_unrecorded(self: Balancer, step: Any, ring_version: int, now_ms: int) -> None:
        records, self._records = self._records, Unwritten()  # type: ignore[assignment]
        try:
            await make(self, step, ring_version, now_ms)
        finally:
            self._records = records

    patch.setattr(Balancer, "_make", make_unrecorded)
