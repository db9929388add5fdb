"""Checks whether a replica is fit to lead: whether its node can write, its engine accepts writes, and the other
replicas reach it (docs/protocol.md, P41). date_fitness.py checks the server's clock."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kvstore.env import Env
from kvstore.partition.election.peer_replicas import CandidateSurvey, PeerReplicas
from kvstore.partition.election.ranking import Incumbent
from kvstore.partition.election.tail import Tail
from kvstore.partition.state.engine import Engine, wait_caught_up

NOT_REACHED = "most other replicas cannot reach this server at the address that it advertises"
ENGINE_S = 1.0
"""Seconds to wait for an engine that is behind its disk. A flush under load keeps it behind for less."""
WEDGED = f"its engine has taken no writes for {ENGINE_S:.0f} s, although its disk can be written to"
NOBODY_ASKED = CandidateSurvey(Incumbent.GONE, is_reached=True)


class CandidateFitness:
    """Checks the fitness of one replica. Each check takes up to four seconds, and never raises an error."""

    def __init__(self, env: Env, tail: Tail, engine: Engine, peer_replicas: PeerReplicas) -> None:
        self._env, self._tail, self._engine, self._peer_replicas = env, tail, engine, peer_replicas

    async def survey(self, *, asks: bool) -> tuple[Incumbent, str]:
        """Return the fate of the former leader, and the reason why this replica is unfit to lead, which is empty if it
        is fit. Without `asks`, the other replicas are not asked."""
        trouble = self._env.nursery.spawn(self._trouble(), name="write probe")
        found = await self._peer_replicas.survey() if asks else NOBODY_ASKED
        why = await trouble or ("" if found.is_reached else NOT_REACHED)
        return found.incumbent, why

    async def why_refuse(self, *, is_planned: bool) -> str:
        """Return the reason why this replica should not take over the lead, or an empty string if it may. With
        `is_planned` False, the leader has to go, so it may hand over even to a replica that the other replicas do not
        reach."""
        if why := await self._trouble():
            return why
        return "" if not is_planned or (await self._peer_replicas.survey()).is_reached else NOT_REACHED

    async def _trouble(self) -> str:
        """Return why this replica cannot write what it applies or logs; empty if it can."""
        return self._tail.trouble or await self._env.writable() or await self._why_wedged()

    async def _why_wedged(self) -> str:
        """Return why the engine takes no writes; empty if it catches up with its disk in time."""
        with suppress(OSError):  # it has just stopped
            try:
                async with asyncio.timeout(ENGINE_S):
                    await wait_caught_up(self._engine)
            except TimeoutError:
                return WEDGED
        return self._tail.trouble
