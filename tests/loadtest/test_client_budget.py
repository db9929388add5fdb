"""The cost of an operation for the process of an AsyncClient, in calls: at most the committed budget
(loadtest/client_budget.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import uvloop

from kvstore.devcluster.layout import ClusterFile
from kvstore.devcluster.local import LocalCluster
from loadtest.bench import peers
from loadtest.client_budget import BUDGET, Load, run_bench

pytestmark = pytest.mark.cluster

ATTEMPTS_MAX = 3


@pytest.fixture(scope="module")
def file() -> Iterator[ClusterFile]:
    with peers.kvstore(LocalCluster) as (_, found):
        yield found


@pytest.mark.parametrize("load", BUDGET, ids=lambda load: load.name)
def test_operation_takes_no_more_calls_than_its_budget(file: ClusterFile, load: Load) -> None:
    """The minimum of some counts: the number of operations that share a frame varies over time."""
    counted = []
    for _ in range(ATTEMPTS_MAX):
        ((ours, redis),) = uvloop.run(run_bench(file, [load], 0))  # only calls: no time is measured
        assert redis.calls > 10, "nothing was counted"
        counted.append(ours.calls)
        if ours.calls <= load.calls_max:
            return
    raise AssertionError(f"more calls than {load.calls_max}: {counted}")
