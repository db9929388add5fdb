"""What a ring of many partitions costs: processor time per lookup and per plan, and the size of its znode.

    python -m loadtest.bench.ring [--partitions 1000] [--joining 10]

Wanted at 1,000 partitions: at most 2 µs, 1 s and 512 KiB.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from kvstore.ring import Ring, codec, new_ring, place_members, plan
from kvstore.types import PartitionId, ServerId

SERVERS = {ServerId(f"n{number}"): "" for number in range(1, 4)}
LOOKUPS = 5_000


def best_s(tries: int, work: Callable[[], object]) -> float:
    times = []
    for _ in range(tries):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def ids(first: int, count: int) -> list[PartitionId]:
    return [PartitionId(f"p{number}") for number in range(first, first + count)]


def measure(ring: Ring, joining: int) -> dict[str, str]:
    keys = [b"key%d" % number for number in range(LOOKUPS)]
    joiners = place_members(ids(len(ring.partitions) + 1, joining), SERVERS, 3)
    lookup_s = best_s(10, lambda: [ring.partition_of(key) for key in keys]) / LOOKUPS
    join_s = best_s(3, lambda: plan.join(ring, joiners))
    leave_s = best_s(3, lambda: plan.leave(ring, ids(1, joining)))
    return {
        "a lookup": f"{lookup_s * 1e6:.2f} µs",
        f"a plan for {joining} that join": f"{join_s:.3f} s",
        f"a plan for {joining} that leave": f"{leave_s:.3f} s",
        "the ring's znode": f"{len(codec.encode(ring)) / 1024:.0f} KiB",
        f"while {joining} join": f"{len(codec.encode(plan.join(ring, joiners))) / 1024:.0f} KiB",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, default=1000)
    parser.add_argument("--joining", type=int, default=10)
    wanted = parser.parse_args()
    ring = new_ring(ids(1, wanted.partitions), SERVERS, 3)
    for name, figure in measure(ring, wanted.joining).items():
        print(f"{name:30} {figure}")


if __name__ == "__main__":
    main()
