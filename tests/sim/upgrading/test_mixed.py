"""Servers of two releases under faults: the cluster version rises when all servers have the later release, and
nothing is lost."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

import tests.sim.run
from kvstore.partition.versioning import Versioning
from kvstore.server.cluster import rising
from kvstore.versions import Fixed, Versions
from tests.sim.judges.probes import hits
from tests.sim.run import run
from tests.sim.strikes.faults import FAULTS
from tests.sim.strikes.knobs import Knobs, draw

pytestmark = pytest.mark.sim

SEEDS = range(2)


def mixed(seed: int, older: int) -> Knobs:
    return replace(draw(Random(f"{seed}/mixed"), sorted(FAULTS)), older=older)


# docs/protocol.md V1
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("older", [2, 3])
def test_cluster_version_rises_under_faults_when_last_server_is_upgraded(seed: int, older: int) -> None:
    before = hits["upgrade.back"]
    run(seed, mixed(seed, older))
    assert hits["upgrade.back"] == before + 1


def test_version_rise_while_one_server_does_not_support_it_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(members: Any, wanted: Any) -> int:
        return max(member.can for member in members.values())

    monkeypatch.setattr(rising, "common_version", hasty)
    with pytest.raises(BaseException, match=r"supports cluster version 1|V1 p|cannot read"):
        run(1, mixed(1, 2))


# docs/protocol.md V4
def test_log_written_in_version_of_server_instead_of_cluster_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Versioning.__init__

    def hasty(self: Versioning, env: Any, partition: Any, state: Any, leading: Any, known: Versions) -> None:
        made(self, env, partition, state, leading, Fixed(known.can, known.can))

    monkeypatch.setattr(Versioning, "__init__", hasty)
    with pytest.raises(BaseException, match=r"V1 p|P8 p|can do 1|supports cluster version 1"):
        run(1, mixed(1, 2))


def test_log_that_does_not_follow_cluster_version_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: Versioning) -> None:
        """Log nothing."""

    monkeypatch.setattr(Versioning, "_raise", never)
    monkeypatch.setattr(tests.sim.run, "RECOVERY_S_MAX", 30.0)
    with pytest.raises(AssertionError, match="V4 after"):
        run(1, mixed(1, 2))
