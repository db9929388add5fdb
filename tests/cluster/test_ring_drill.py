"""The ring drill on a small scale: partitions are added and removed under load on real processes, first without
faults, then while the leaders of a move's source and target and of ZooKeeper's ensemble are killed. Every answer is
checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from loadtest.drills.ring_stage import RingStage
from loadtest.drills.stage import Report
from loadtest.ring_drill import Course, grow, kills
from tests.cluster.harness import Cluster, running_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

COURSE = Course(sizes=(1, 3, 2), rounds=1, keys=1_500, base_s=0.5, round_s=10.0, pause_s=0.2, operations_least=800)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("ring"), partitions=1, zookeepers=3) as started:
        yield started


async def test_answers_are_right_while_partitions_join_and_leave(cluster: Cluster) -> None:
    stage = stage_on(cluster, 1)
    await stage.fill()
    await grow(stage, COURSE)
    assert len(await stage.partitions()) == COURSE.sizes[-1]
    judge(stage)


async def test_answers_are_right_while_leaders_and_zookeeper_are_killed(cluster: Cluster) -> None:
    stage = stage_on(cluster, 2)
    await kills(stage, replace(COURSE, operations_least=1_600))
    assert stage.kills["source"] + stage.kills["target"] > 0, "no move was open when nodes were killed"
    judge(stage)


def stage_on(cluster: Cluster, seed: int) -> RingStage:
    return RingStage(cluster, Report(), keys=COURSE.keys, value_bytes=COURSE.value_bytes, seed=seed)


def judge(stage: RingStage) -> None:
    assert stage.operations > 1_500
    assert [row for row in stage.report.rows if row["safety"] and not row["met"]] == []
