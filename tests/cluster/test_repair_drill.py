"""The repair drills on a small scale, on real processes and under load: a disk is lost without any command, and the
repairing worker is paused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvstore.meta.registration import RegisteredBookies
from kvstore.types import BookieId, Fragment, LedgerId, LedgerMetadata, LedgerState, Quorum
from loadtest.drills.repair_stage import RepairStage, faults_of
from loadtest.drills.repairs import SCENES, destroyed, halted, wiped
from loadtest.drills.stage import QUICK, Report
from tests.cluster.harness import Cluster, running_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster on ZooKeeper. `python -m loadtest.drill --repairs --metadata etcd` runs the drills on etcd."""
    settings = SCENES["repair is halted"].settings
    with running_cluster(tmp_path_factory.mktemp("repairs"), nodes=4, partitions=2, settings=settings) as started:
        yield started


@pytest.fixture
def stage(cluster: Cluster) -> RepairStage:
    return RepairStage(cluster, replace(QUICK, rests=25.0), Report())


async def test_other_workers_continue_when_the_repairing_one_is_paused(stage: RepairStage) -> None:
    await halted(stage)
    judge(stage)


async def test_wiped_bookie_gets_a_new_id_when_back_before_its_session_ends(
    stage: RepairStage,
) -> None:
    await wiped(stage)
    judge(stage)


async def test_copies_of_a_destroyed_bookie_are_in_three_zones_again(stage: RepairStage) -> None:
    await destroyed(stage, 1)
    judge(stage)


def judge(stage: RepairStage) -> None:
    """Check the results but not the durations, which depend on the machine and which the drill prints."""
    assert [row for row in stage.report.rows if row["unit"] != "s" and not row["met"]] == []


def test_placement_verdict_detects_faults() -> None:
    a, b, c, d = (BookieId(f"n{number}-{0:012x}") for number in range(1, 5))
    there = RegisteredBookies(dict.fromkeys((a, b, c), ""), {}, {a: "a", b: "b", c: "c", d: "a"})

    def faults(*ensemble: BookieId, write: int = 3, state: LedgerState = LedgerState.CLOSED) -> int:
        fragments = (Fragment(0, ensemble),)  # type: ignore[arg-type]
        metadata = LedgerMetadata(LedgerId(1), Quorum(len(ensemble), write, 2), fragments, state)
        return len(faults_of(metadata, there, write=3, zones=3))

    assert faults(a, b, c) == 0
    assert faults(a, b, d) > 0, "one is gone"
    assert faults(a, b, write=2) > 0, "a copy too few"
    there.writable[d] = ""
    assert faults(a, b, d) > 0, "two zones"
    assert faults(a, b, d, state=LedgerState.OPEN) == 0
    again = BookieId(f"n1-{1:012x}")
    there.writable[again] = ""
    assert faults(a, b, again) > 0, "one machine"
