"""Checks whether a replica is fit to lead: its node can write, its engine takes writes, and the other replicas reach it
(docs/protocol.md, P41). date_fitness.py checks the server's clock."""

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
    """The fitness of one replica. Each call takes up to four seconds, and never fails."""

    def __init__(self, env: Env, tail: Tail, engine: Engine, peer_replicas: PeerReplicas) -> None:
        self._env, self._tail, self._engine, self._peer_replicas = env, tail, engine, peer_replicas

    async def survey(self, *, asks: bool) -> tuple[Incumbent, str]:
        """Return the fate of the former leader, and why this replica is unfit to lead; empty if it is fit. Without
        `asks` no other replica is asked."""
        trouble = self._env.nursery.spawn(self._trouble(), name="write probe")
        found = await self._peer_replicas.survey() if asks else NOBODY_ASKED
        why = await trouble or ("" if found.is_reached else NOT_REACHED)
        return found.incumbent, why

    async def why_refuse(self, *, is_planned: bool) -> str:
        """Return why this replica should not be handed the lead; empty if it may. A leader that has to go hands the
        lead even to a replica that others do not reach."""
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
