"""The order of the tests, and which of them run at once.

Tests with real processes mostly wait: for elections, leases, the JVM. Other tests need a processor all the time. So a
run of all tests has at most WAITING_AT_ONCE workers with tests of the first kind, and at least one with the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from functools import cached_property

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

REAL_PROCESSES = {"needs_zookeeper", "needs_etcd", "cluster", "spark", "interop"}
WAITING_AT_ONCE, SPARKS_AT_ONCE = 4, 1
"""Maximum number of workers that run tests with real processes, and of those that run Spark, as long as there is other
work. A worker keeps its JVM."""
SIMULATIONS, SPARK = "tests/sim/", "tests/spark/"
LONG_S = {
    "tests/spark/test_stream.py": 200,
    "tests/spark/test_reader.py": 155,
    "tests/spark/end_to_end/test_snapshots.py": 150,
    "tests/cluster/test_repair_drill.py": 110,
    "tests/spark/end_to_end/test_executors.py": 110,
    "tests/spark/end_to_end/test_memory.py": 100,
    "tests/spark/end_to_end/test_frame_again.py": 95,
    "tests/upgrade/test_rolling.py": 80,
    "tests/loadtest/generator/test_small_redis.py": 80,
    "tests/cluster/pages/test_pages.py": 80,
    "tests/cluster/test_grpc_tools.py": 75,
    "tests/loadtest/generator/test_locust.py": 65,
    "tests/cluster/test_redis_transactions.py": 60,
    "tests/cluster/test_transactions.py": 60,
    "tests/cluster/access/test_walk.py": 60,
    "tests/cluster/test_fsck.py": 55,
    "tests/cluster/secure/test_up.py": 55,
    "tests/cluster/hanging/test_hanging.py": 50,
    "tests/cluster/test_up.py": 50,
    "tests/cluster/dashboard/test_dashboard.py": 50,
    "tests/cluster/access/test_attacks.py": 45,
    "tests/cluster/restoring/test_older_metadata.py": 45,
    "tests/cluster/test_balance.py": 40,
    "tests/cluster/access/test_namespaces.py": 40,
    "tests/cluster/coordination/test_locks.py": 40,
    "tests/cluster/restoring/test_restored_ensemble.py": 40,
    "tests/cluster/test_autorecovery.py": 40,
}
"""Approximate duration of each long test file that waits, in seconds. Long files are started first."""


def in_order(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return unit tests, simulations, and then tests with real processes, as `Scheduling` expects them."""
    stages: dict[str, int] = defaultdict(int)
    for item in items:
        stages[file_of(item)] = max(stages[file_of(item)], _stage_of(item))
    return sorted(items, key=lambda item: (stages[file_of(item)], -LONG_S.get(file_of(item), 0)))


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _stage_of(item: pytest.Item) -> int:
    if item.nodeid.startswith(SIMULATIONS):
        return 1
    if file_of(item) not in LONG_S and not any(mark.name in REAL_PROCESSES for mark in item.iter_markers()):
        return 0
    return 2 if item.nodeid.startswith(SPARK) else 3


class Scheduling(LoadScopeScheduling):
    """Runs the tests of a file in one worker and in order: they may share a cluster, and each continues from its state.
    Simulated runs have their own worlds. Expects the tests in the order of `in_order`."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(SIMULATIONS) else nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        self.workqueue.move_to_end(self._next_scope(node), last=False)
        super()._assign_work_unit(node)

    def _next_scope(self, node: WorkerController) -> str:
        """Return the next scope that waits, or one that computes if enough other workers run scopes that wait."""
        waiting = self._waiting
        others = [scopes for other, scopes in self.assigned_work.items() if other is not node]
        busy = sum(any(scope in waiting and False in done.values() for scope, done in each.items()) for each in others)
        sparks = sum(any(_needs_jvm(scope, waiting) for scope in each) for each in others)
        fitting = (
            scope
            for scope in self.workqueue
            if (scope in waiting) is (busy < min(WAITING_AT_ONCE, len(others)))
            and (sparks < SPARKS_AT_ONCE or not _needs_jvm(scope, waiting))
        )
        return next(fitting, next(iter(self.workqueue)))

    @cached_property
    def _waiting(self) -> set[str]:
        """Return the scopes with real processes: those after the last simulation. Without simulations, the order says
        nothing."""
        collection = self.collection or []
        last = max((place for place, each in enumerate(collection) if each.startswith(SIMULATIONS)), default=-1)
        return {self._split_scope(each) for each in collection[last + 1 :]} if last >= 0 else set()


def _needs_jvm(scope: str, waiting: Container[str]) -> bool:
    return scope.startswith(SPARK) and scope in waiting
