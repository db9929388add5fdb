"""Measure the cost of an operation in the process of a Python client, and compare it with a Redis client of the same
servers.

    python -m loadtest.client_budget [--only TEXT] [--runs 5] [--functions] [--out FILE]

A three-node cluster runs in a scratch folder. All keys belong to one partition. `AsyncClient` and a minimal client of
the Redis protocol (hiredis on asyncio, one connection to the leader's node) put and get them in turn, so that other
work of the machine slows both. Rates and times are compared as ratios, ours divided by the other client's. The calls of
Python and C in the client's process are counted in a separate run and compared with `BUDGET`; those that the process
makes in the same time without a load are subtracted. The exit code is 1 if a load exceeds its limit of calls or of the
ratio of times.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import uvloop

from kvstore.cli.output import as_table
from kvstore.client import AsyncClient, ClientConfig
from kvstore.devcluster.layout import ClusterFile, NodePlace
from kvstore.devcluster.local import LocalCluster
from kvstore.errors import ConfigError
from kvstore.loadtest.generator.options import path_word
from kvstore.loadtest.loads import closed_loop
from kvstore.loadtest.resp import AsyncRespConnection, connect
from loadtest.bench import peers
from loadtest.bench.counted_node import Calls
from loadtest.figures import keep

KEYS = 1_000
VALUE = b"x" * 100
TAG = b"{budget}"
CONNECT_S = 5.0
CLIENTS = ("AsyncClient", "RESP")
Call = Callable[[int], Awaitable[object]]
"""Runs one operation on the key of this number."""


@dataclass(frozen=True)
class Load:
    """`operations` in total, by `in_flight` tasks."""

    kind: str
    in_flight: int
    operations: int
    calls_max: float
    """Maximum calls per operation in the client's process."""
    rate_min: float
    """Minimum share of the Redis client's rate. A lower share is a regression and not an effect of a busy machine."""

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.in_flight:,} in flight"


BUDGET = (
    Load("put", 1, 400, 60, 0.65),
    Load("put", 50, 5_000, 27, 0.6),
    Load("put", 1_000, 20_000, 30, 0.2),
    Load("get", 1, 1_000, 53, 0.6),
    Load("get", 50, 10_000, 28, 0.65),
    Load("get", 1_000, 20_000, 31, 0.65),
)


@dataclass
class Cost:
    """The cost of one load by one client."""

    load: Load
    client: str
    rates: list[float] = field(default_factory=list)
    """Operations per second."""
    p50s_ms: list[float] = field(default_factory=list)
    cpus_us: list[float] = field(default_factory=list)
    """Processor time per operation in the client's process, in microseconds."""
    leader_cpus_us: list[float] = field(default_factory=list)
    wake_ups: list[float] = field(default_factory=list)
    frames: float | None = None
    """Number of frames per operation."""
    functions: Counter[str] = field(default_factory=Counter)

    @property
    def calls(self) -> float:
        """Number of calls per operation."""
        return sum(self.functions.values()) / self.load.operations

    def row(self, beside: Cost) -> dict[str, Any]:
        """Return the row of the report, with ratios to the runs of the other client, each measured beside one of
        these runs."""
        return {
            "load": self.load.name,
            "client": self.client,
            "ops/s": round(median(self.rates)),
            "p50 ms": round(median(self.p50s_ms), 3),
            "rate, of RESP": round(ratio(self.rates, beside.rates), 2),
            "p50, of RESP": round(ratio(self.p50s_ms, beside.p50s_ms), 2),
            "calls/op": round(self.calls, 1),
            "budget": self.load.calls_max if self.client == CLIENTS[0] else None,
            "frames/op": None if self.frames is None else round(self.frames, 3),
            "wake-ups/op": round(median(self.wake_ups), 2),
            "CPU us/op": round(median(self.cpus_us), 1),
            "leader CPU us/op": round(median(self.leader_cpus_us), 1),
        }


def ratio(these: list[float], those: list[float]) -> float:
    """Return the median of the ratios of runs that were measured side by side."""
    return median(this / that for this, that in zip(these, those, strict=True))


class Bench:
    """Both clients, and the node that leads their keys."""

    def __init__(self, client: AsyncClient, file: ClusterFile) -> None:
        self._client, self._file = client, file
        self._keys = [TAG + b"%d" % number for number in range(KEYS)]
        self._node: NodePlace | None = None
        self._redis: AsyncRespConnection
        self._processes: tuple[psutil.Process, psutil.Process]

    async def _find_leader(self) -> bool:
        """Connect to the leader's node. Return False if the leader has not changed."""
        leader = self._client.cluster.leader_of(self._client.cluster.partition_of(TAG))
        node = next(node for node in self._file.nodes if node.grpc == leader)
        if node == self._node:
            return False
        if self._node is not None:
            self._redis.close()
        self._redis = await connect(node.resp, timeout_s=CONNECT_S)
        self._node, self._processes = node, (psutil.Process(), psutil.Process(node.pid))
        return True

    async def measure(self, load: Load, runs: int) -> tuple[Cost, Cost]:
        """Return the costs of AsyncClient and of the Redis client. Measure again if the leader changes meanwhile."""
        await self._find_leader()
        costs = await self._measure(load, runs)
        return await self.measure(load, runs) if await self._find_leader() else costs

    async def _measure(self, load: Load, runs: int) -> tuple[Cost, Cost]:
        costs = Cost(load, CLIENTS[0]), Cost(load, CLIENTS[1])
        calls = self._calls(load)
        for call in calls:
            await self._run(load, call)
        for _ in range(runs):
            for cost, call in zip(costs, calls, strict=True):
                await self._timed(cost, call)
        frames = self._client.statistics()["frames"]
        for cost, call in zip(costs, calls, strict=True):
            began = time.perf_counter()
            counted = await _counted(self._run(load, call))
            cost.functions = counted - await _counted(asyncio.sleep(time.perf_counter() - began))
        costs[0].frames = (self._client.statistics()["frames"] - frames) / load.operations
        return costs

    def _calls(self, load: Load) -> tuple[Call, Call]:
        client, redis, keys = self._client, self._redis, self._keys
        if load.kind == "put":
            return (
                lambda number: client.put(keys[number % KEYS], VALUE),
                lambda number: redis.call(b"SET", keys[number % KEYS], VALUE),
            )
        return (
            lambda number: client.get(keys[number % KEYS]),
            lambda number: redis.call(b"GET", keys[number % KEYS]),
        )

    async def _run(self, load: Load, call: Call) -> None:
        await closed_loop(iter(range(load.operations)), load.in_flight, call)

    async def _timed(self, cost: Cost, call: Call) -> None:
        operations = cost.load.operations
        times: list[float] = []

        async def one(number: int) -> None:
            begun = time.perf_counter()
            await call(number)
            times.append(time.perf_counter() - begun)

        before, begun = self._spent(), time.perf_counter()
        await self._run(cost.load, one)
        took_s = time.perf_counter() - begun
        own, leader, wake_ups = (b - a for a, b in zip(before, self._spent(), strict=True))
        cost.rates.append(operations / took_s)
        cost.p50s_ms.append(median(times) * 1e3)
        cost.cpus_us.append(own / operations * 1e6)
        cost.leader_cpus_us.append(leader / operations * 1e6)
        cost.wake_ups.append(wake_ups / operations)

    def _spent(self) -> tuple[float, float, int]:
        """Return the processor time of this process and of the leader's, and how often this process has slept."""
        own, leader = self._processes
        times = leader.cpu_times()
        return time.process_time(), times.user + times.system, own.num_ctx_switches().voluntary


async def _counted(work: Awaitable[None]) -> Counter[str]:
    """Return the calls by function until `work` is done."""
    calls = Calls()
    calls.begin()
    await work
    return calls.end()


async def run_bench(file: ClusterFile, loads: Sequence[Load], runs: int) -> list[tuple[Cost, Cost]]:
    async with AsyncClient(ClientConfig(endpoints=tuple(node.grpc for node in file.nodes))) as client:
        bench = Bench(client, file)
        return [await bench.measure(load, runs) for load in loads]


def _faults(ours: Cost, other: Cost) -> list[str]:
    found = []
    load = ours.load
    if ours.calls > load.calls_max:
        found.append(f"{load.name}: {ours.calls:.1f} calls per operation, {load.calls_max} may be")
    if (got := ratio(ours.rates, other.rates)) < load.rate_min:
        found.append(f"{load.name}: {got:.2f} of the Redis client's rate, expected at least {load.rate_min}")
    return found


def _show_functions(cost: Cost) -> None:
    print(f"\n{cost.load.name}, {cost.client}: calls per operation")
    for name, calls in cost.functions.most_common(60):
        print(f"  {calls / cost.load.operations:7.2f}  {name.rpartition('/kvstore/')[2] or name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--functions", action="store_true", help="also by function")
    parser.add_argument("--out", type=path_word, default=Path("reports/client_budget.json"))
    options = parser.parse_args()
    loads = [load for load in BUDGET if options.only in load.name]
    if not loads:
        sys.exit(f"client_budget: no load holds {options.only!r} in its name")
    try:
        with peers.kvstore(LocalCluster) as (_, file):
            costs = uvloop.run(run_bench(file, loads, options.runs))
    except ConfigError as error:
        sys.exit(f"client_budget: {error}")
    rows = [cost.row(pair[1]) for pair in costs for cost in pair]
    print(as_table(rows))
    if options.functions:
        for ours, _ in costs:
            _show_functions(ours)
    keep(options.out, rows)
    if faults := [fault for pair in costs for fault in _faults(*pair)]:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
