"""Breakages of the rules that depose leaders and judge the fitness of candidates (docs/protocol.md, P25, P40, P41)."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from kvstore.partition.election import deposing, upkeep
from kvstore.partition.election.candidate_fitness import CandidateFitness
from kvstore.partition.election.deposing import CONFIRM_S
from kvstore.partition.election.peer_replicas import PeerReplicas
from kvstore.partition.leading.leader import Leader
from kvstore.server.peer import link, reach
from tests.sim.breakages.catalogue import mutant
from tests.sim.stories.stories_of_liveness import (
    candidate_whose_engine_is_wedged,
    leader_that_reaches_no_other_bookie,
    leader_whose_engine_is_wedged,
)
from tests.sim.stories.stories_of_reach import (
    candidate_that_nobody_reaches,
    candidate_without_inodes,
    leader_that_nobody_reaches,
    leader_that_one_does_not_reach,
    observers_that_stand_still,
    successor_that_few_reach,
)


@mutant("nobody deposes", story=leader_that_nobody_reaches, lead_back_s=1.0)
def _nobody_deposes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deposing, "may_depose", lambda replicas, reports: False)


@mutant("one observer deposes", story=leader_that_one_does_not_reach)
def _one_deposes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deposing, "is_gone", lambda others, reports, registered: True)


@mutant("what was measured before a standstill counts", story=observers_that_stand_still, session_s=600.0)
def _standstill_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reach, "STALLED_S", inf)
    patch.setattr(link, "STALLED_S", inf)


@mutant("whoever asks may depose, reached or not", story=successor_that_few_reach, lead_back_s=1.0)
def _unreached_deposes(patch: pytest.MonkeyPatch) -> None:
    def may_depose(replicas: int, reports: Any) -> bool:
        silent = 1 + sum((report.silent_s or 0.0) >= CONFIRM_S for report in reports.values())
        return silent >= replicas // 2 + 1

    patch.setattr(deposing, "may_depose", may_depose)


@mutant("a candidate that nobody reaches stands", story=candidate_that_nobody_reaches, lead_back_s=1.0)
def _unreached_stands(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PeerReplicas, "says_unreached", lambda self, asker: b"")


@mutant("a candidate that cannot write stands", story=candidate_without_inodes, lead_back_s=1.0)
def _unwritable_stands(patch: pytest.MonkeyPatch) -> None:
    async def no_trouble(self: CandidateFitness) -> str:
        return ""

    patch.setattr(CandidateFitness, "_trouble", no_trouble)


@mutant("a leader whose engine is wedged keeps the lead", story=leader_whose_engine_is_wedged, lead_back_s=1.0)
def _wedged_keeps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(upkeep, "BEHIND_CHECKS", inf)


@mutant("a candidate whose engine is wedged runs", story=candidate_whose_engine_is_wedged, lead_back_s=1.0)
def _wedged_runs(patch: pytest.MonkeyPatch) -> None:
    async def not_wedged(self: CandidateFitness) -> str:
        return ""

    patch.setattr(CandidateFitness, "_why_wedged", not_wedged)


@mutant("a leader without an ack quorum runs again at once", story=leader_that_reaches_no_other_bookie, lead_back_s=1.0)
def _runs_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leader, "_fail", lambda self, error: self.lose(error))
