"""Operators watch a move on real processes and cancel it: the old ring serves, and nothing of the copy is left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.client import AsyncClient
from loadtest.drills.ring_load import RingLoad
from loadtest.drills.ring_stage import PROBLEMS, RingStage
from loadtest.drills.stage import Report
from tests.cluster.harness import Cluster, running_cluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

KEYS, VALUE_BYTES = 2_000, 400
REST_S = 0.1
BYTES_PER_S = 60
"""Copy rate at which a range of about twenty keys takes two minutes, which is longer than the commands of a test
take on a busy machine."""


@pytest.fixture
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RingStage]:
    with running_cluster(tmp_path_factory.mktemp("moves"), partitions=1) as cluster:
        yield RingStage(cluster, Report(), keys=KEYS, value_bytes=VALUE_BYTES, seed=1)


def keys_of(cluster: Cluster) -> dict[str, int]:
    """Return, for each partition, the largest number of keys that one of its replicas has."""
    found: dict[str, int] = {}
    for node in cluster.ids:
        for partition, numbers in cluster.status(node)["partitions"].items():
            found[partition] = max(found.get(partition, 0), numbers["keys"])
    return found


async def ring(stage: RingStage, *words: str) -> Any:
    """Run a `kvstore ring` command and return its document."""
    code, document = await stage.command("ring", *words)
    assert code == 0
    return document


async def test_cancelled_join_restores_the_ring_and_leaves_no_garbage(stage: RingStage) -> None:
    await stage.fill()
    await stage.throttle(BYTES_PER_S)
    planned = await stage.plan("add", "--count", "2")
    async with AsyncClient(stage.cluster.url) as client:
        load = RingLoad(client, stage.statics, 1, pause_s=REST_S)
        load.aim(planned)
        await load.start()
        try:
            await ring(stage, "add", "p2", "p3")
            shown: dict[str, Any] = {}

            async def is_copying() -> bool:
                shown.update(await ring(stage, "status"))
                return any(each["keys_copied"] for each in shown["moves"])

            await wait_until(is_copying, timeout_s=60, what="keys are copied")
            for each in shown["moves"]:
                assert each["keys_copied"] <= each["keys"]
                assert each["bytes_copied"] <= each["bytes"]
            assert sum(each["keys"] for each in shown["moves"]) > KEYS / 2
            assert 0 < shown["progress"] < 1
            assert shown["eta_s"] > 0
            await ring(stage, "cancel")
            await stage.moved(load)
            await stage.retired()
        finally:
            await load.stop()
        problems = await stage.judge(load)
    assert {what: problems[what] for what in PROBLEMS} == dict.fromkeys(PROBLEMS, 0)
    assert await stage.partitions() == ["p1"]

    async def is_alone() -> bool:
        return set(keys_of(stage.cluster)) == {"p1"}

    await wait_until(is_alone, what="no node has a replica of another partition")

    async def is_sound() -> bool:
        return (await stage.command("fsck"))[0] == 0

    await wait_until(is_sound, what="no ledger of a partition that is gone but those kept for feeds")
