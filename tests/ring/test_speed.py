"""What a ring of a thousand partitions costs: processor time, the best of some tries, so that a busy machine counts
little."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kvstore.ring import Ring, new_ring, plan
from tests.ring.rings import SERVERS, ids, members

LOOKUP_S_MAX = 2e-6
PLAN_S_MAX = 1.0
TRIES, LOOKUPS = 10, 5_000


def best_of(tries: int, work: Callable[[], object]) -> float:
    times = []
    for _ in range(tries):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


@pytest.fixture(scope="module")
def ring() -> Ring:
    return new_ring(ids(1, 1000), SERVERS, 3)


def test_a_key_is_found_in_two_microseconds(ring: Ring) -> None:
    keys = [b"key%d" % number for number in range(LOOKUPS)]

    def look() -> None:
        for key in keys:
            ring.partition_of(key)

    assert best_of(TRIES, look) / LOOKUPS <= LOOKUP_S_MAX


def test_a_change_is_planned_within_a_second(ring: Ring) -> None:
    assert best_of(3, lambda: plan.join(ring, members(ids(1001, 1010)))) <= PLAN_S_MAX
    assert best_of(3, lambda: plan.leave(ring, ids(1, 10))) <= PLAN_S_MAX
