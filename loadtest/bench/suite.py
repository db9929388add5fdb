"""The benchmark suite: the store beside etcd, Redis and the floor, on one machine, in alternation.

    python -m loadtest.bench.suite [--data-dir DIR] [--runs 3] [--seconds 2] [--only TEXT] [--etcd PROGRAM]
                                   [--out FILE [--add]]

Each load is measured on each system in turn, and the order is reversed after each round, so that other work of the
machine slows all systems alike. One generator, closedloop/, makes all loads except those of AsyncClient. A cell of the
table has the median rate per second, and the median processor time of all processes of that store, in milliseconds per
1,000 operations. Rates depend on the machine. The ratios, which are of medians, can be compared.

Without --data-dir a three-node cluster is started in a scratch folder and ended afterwards. The stores that a run needs
run all the time. With --add, the cells that FILE already has are kept, and further rounds of a cell are added to them,
so that a long suite can run in parts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import uvloop

from kvstore.client import AsyncClient, ClientConfig
from kvstore.devcluster.layout import ClusterFile
from kvstore.devcluster.local import LocalCluster
from kvstore.env.interpreter import interpreter
from kvstore.errors import ConfigError
from kvstore.loadtest.generator.options import path_word
from kvstore.loadtest.loads import LoadSpec, run_load
from kvstore.ring.hashing import MURMUR3
from loadtest.bench import closed_loop, peers
from loadtest.bench.closed_loop import Figures, Request
from loadtest.bench.processors import spent_s
from loadtest.figures import keep
from loadtest.floor_member import PROCESSES

SPREAD_S = 120.0
"""Maximum wait until the nodes lead equally many partitions."""
WARM_S = 0.5
"""Length of the load before each measured span."""
WRITTEN_KEYS = 1_000_000
READ_KEYS = 10_000
"""Number of keys that GETs draw from. All exist."""
MANY = 48
"""Number of partitions of the second cluster."""


class Load(NamedTuple):
    """A column of the table."""

    op: str
    connections: int
    pipeline: int = 1

    @property
    def name(self) -> str:
        pipelined = f", pipeline {self.pipeline}" if self.pipeline > 1 else ""
        return f"{self.op.upper()}, {self.connections:,}{pipelined}"


class System(NamedTuple):
    """A row of the table: a store, and how it is asked."""

    name: str
    store: str
    protocol: str
    """A protocol of the generator, or `client` for AsyncClient."""
    is_led: bool = False
    """True if all keys are led by the asked node."""
    is_spread: bool = False
    """True if the callers ask all servers in turn, instead of one."""
    channels: int = 0
    """Number of gRPC connections that the callers share; 0: one for each caller."""


LOADS = (Load("set", 1), Load("set", 50), Load("set", 1_000), Load("get", 1), Load("get", 50), Load("set", 50, 16))
LED, RANDOM, CLUSTER = "kvstore, led keys", "kvstore, random keys", "kvstore, cluster client"
CLIENT, HTTP = "kvstore, AsyncClient", "kvstore, HTTP"
GRPC, SHARED_GRPC = "kvstore, unary gRPC", "kvstore, unary gRPC, 3 shared connections"
MANY_PARTITIONS = f"kvstore, random keys, {MANY} partitions"
ETCD, SHARED, GATEWAY = "etcd, a connection for each caller", "etcd, 3 shared connections", "etcd, JSON gateway"
REDIS = "Redis, appendfsync always"
LOOKUP = "floor with lookup, random keys"
SYSTEMS = (
    System(LED, "kvstore", "resp", is_led=True),
    System(RANDOM, "kvstore", "resp"),
    System(CLUSTER, "kvstore", "cluster"),
    System(CLIENT, "kvstore", "client"),
    System(HTTP, "kvstore", "http", is_spread=True),
    System(GRPC, "kvstore", "kv", is_spread=True),
    System(SHARED_GRPC, "kvstore", "kv", is_spread=True, channels=3),
    System(MANY_PARTITIONS, "many", "resp"),
    System("floor, led keys", "floor", "resp", is_led=True),
    System("floor, random keys", "floor", "resp"),
    System(LOOKUP, "lookup", "resp"),
    System(ETCD, "etcd", "etcd"),
    System(SHARED, "etcd", "etcd", channels=3),
    System(GATEWAY, "etcd", "gateway"),
    System(REDIS, "Redis", "resp"),
)


class Cell(NamedTuple):
    load: Load
    system: System

    @property
    def name(self) -> str:
        return f"{self.load.name}: {self.system.name}"


def cells(only: str) -> list[Cell]:
    """Return the cells whose name contains a text. Only pipelines need many partitions, and only RESP has pipelines."""
    return [
        cell
        for load in LOADS
        for system in SYSTEMS
        if (load.pipeline == 1 or system.protocol == "resp") and (load.pipeline > 1 or system.store != "many")
        if only in (cell := Cell(load, system)).name
    ]


class Ratio(NamedTuple):
    """A ratio of two cells."""

    name: str
    above: tuple[Load, str]
    below: tuple[Load, str]
    wanted: float | None
    """The target: a minimum of rates, a maximum of processor times."""
    of: str = "rate"
    """`rate` or `cpu`, the processor time."""


SET_50, SET_1000, GET_50, PIPELINED = LOADS[1], LOADS[2], LOADS[4], LOADS[5]
RATIOS = (
    Ratio("SET, 50: random keys, of etcd's", (SET_50, RANDOM), (SET_50, ETCD), 1.5),
    Ratio("SET, 50: random keys, of etcd's with shared connections", (SET_50, RANDOM), (SET_50, SHARED), None),
    Ratio("SET, 50: random keys, of the floor's with lookup", (SET_50, RANDOM), (SET_50, LOOKUP), 0.6),
    Ratio("SET, 50: cluster client, of etcd's", (SET_50, CLUSTER), (SET_50, ETCD), 2.0),
    Ratio("SET, 1,000: random keys, of etcd's", (SET_1000, RANDOM), (SET_1000, ETCD), None),
    Ratio("SET, 1,000: random keys, of etcd's with shared connections", (SET_1000, RANDOM), (SET_1000, SHARED), None),
    Ratio("GET, 50: random keys, of etcd's", (GET_50, RANDOM), (GET_50, ETCD), 2.5),
    Ratio("GET, 50: random keys, of etcd's with shared connections", (GET_50, RANDOM), (GET_50, SHARED), None),
    Ratio("GET, 50: cluster client, of Redis's", (GET_50, CLUSTER), (GET_50, REDIS), 0.5),
    Ratio("SET, 50: unary gRPC, of etcd's", (SET_50, GRPC), (SET_50, ETCD), 0.6),
    Ratio(
        "SET, 50: unary gRPC, of etcd's, both with shared connections", (SET_50, SHARED_GRPC), (SET_50, SHARED), None
    ),
    Ratio("SET, 50: HTTP, of etcd's JSON gateway", (SET_50, HTTP), (SET_50, GATEWAY), 1.0),
    Ratio("HTTP: SET, 1,000, of SET, 50", (SET_1000, HTTP), (SET_50, HTTP), 0.8),
    Ratio(f"SET, pipeline 16: {MANY} partitions, of 3", (PIPELINED, MANY_PARTITIONS), (PIPELINED, RANDOM), 0.8),
    Ratio("SET, 50: processor time of random keys, of led ones", (SET_50, RANDOM), (SET_50, LED), 1.9, "cpu"),
)


@dataclass
class Measured:
    """The figures of one cell, one of each round."""

    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    """Processor time of all processes of the store, in milliseconds per 1,000 operations."""
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, figures: Figures, cpu_s: float) -> None:
        self.rates.append(figures.rate)
        self.cpu_ms.append(cpu_s * 1e6 / figures.operations if figures.operations else math.nan)
        self.p50_ms.append(figures.p50_ms)
        self.p99_ms.append(figures.p99_ms)
        self.errors.update(figures.errors)

    def extend(self, later: Measured) -> None:
        """Add the rounds of a later run."""
        for name in ("rates", "cpu_ms", "p50_ms", "p99_ms"):
            getattr(self, name).extend(getattr(later, name))
        self.errors.update(later.errors)

    @property
    def rate(self) -> float:
        return median(self.rates)

    @property
    def cpu(self) -> float:
        return median(self.cpu_ms)

    def document(self) -> dict[str, Any]:
        return {
            "rates": self.rates,
            "cpu_ms": self.cpu_ms,
            "p50_ms": self.p50_ms,
            "p99_ms": self.p99_ms,
            "errors": dict(self.errors),
        }

    @classmethod
    def from_document(cls, found: dict[str, Any]) -> Measured:
        return cls(**{**found, "errors": Counter(found["errors"])})


Table = dict[str, Measured]
"""The measured cells by name."""


class Store(NamedTuple):
    """A running store."""

    endpoints: dict[str, list[str]]
    """The addresses of its servers by protocol. The first one is asked, unless all are."""
    pids: list[int]
    """All of its server processes, the metadata store's included."""
    tag: str = ""
    """Hash tag of the keys that the first server leads."""
    config: ClientConfig | None = None


def run_suite(
    *, data_dir: Path | None, runs: int, seconds: float, only: str, etcd: str, out: Path, is_adding: bool
) -> Table:
    """Run the suite, print its tables, and write them. Raises ConfigError if no cell is to be measured."""
    table: Table = {}
    if is_adding and out.exists():
        kept = json.loads(out.read_text())["cells"]
        table = {name: Measured.from_document(each) for name, each in kept.items()}
    with peers.scratch() as folder:
        program = _generator(folder)
        wanted = [cell for cell in cells(only) if _can_be_measured(cell, program, etcd)]
        if not wanted:
            raise ConfigError(f"no cell that can be measured here contains {only!r} in its name")
        with ExitStack() as stack:
            stores = {
                name: stack.enter_context(_started(name, folder / name, data_dir, etcd))
                for name in dict.fromkeys(cell.system.store for cell in wanted)
            }
            _fill(wanted, stores, program)
            for name, measured in _measure(wanted, stores, program, runs, seconds).items():
                table.setdefault(name, Measured()).extend(measured)
    shown = f"{figures_table(table)}\n\n{ratios_table(table)}"
    print(shown)
    document = {"machine": _machine(), "cells": {name: each.document() for name, each in table.items()}}
    keep(out, document)
    print(f"\nfigures in {out}")
    return table


def _generator(folder: Path) -> Path | None:
    try:
        return closed_loop.build(folder)
    except (FileNotFoundError, RuntimeError) as error:
        print(f"{error}; only {CLIENT} is measured", file=sys.stderr)
        return None


def _can_be_measured(cell: Cell, program: Path | None, etcd: str) -> bool:
    if program is None and cell.system.protocol != "client":
        return False
    needed = {"etcd": etcd, "Redis": "redis-server"}.get(cell.system.store)
    if needed is None or peers.is_installed(needed):
        return True
    print(f"{needed} is not installed; left out: {cell.name}", file=sys.stderr)
    return False


@contextmanager
def _started(name: str, folder: Path, data_dir: Path | None, etcd: str) -> Iterator[Store]:
    if name == "etcd":
        with peers.etcd(folder, etcd) as running:
            yield Store({"etcd": running.addresses, "gateway": running.addresses}, running.pids)
    elif name == "Redis":
        with peers.redis(folder) as running:
            yield Store({"resp": running.addresses}, running.pids)
    elif name in ("floor", "lookup"):
        tag = next(f"t{number}" for number in count() if MURMUR3.token_of(b"t%d" % number) % PROCESSES == 0)
        with peers.floor(folder, is_looking_up=name == "lookup") as floor:
            yield Store({"resp": floor.endpoints}, floor.pids, tag)
    else:
        is_many = name == "many"
        with _cluster(None if is_many else data_dir, MANY if is_many else None) as file:
            store = _on_loop(lambda: _store(file))
            leaders = _on_loop(lambda: _spread(store.config))
            yield store
            if leaders != _on_loop(lambda: _leaders(store.config)):
                print("leaders have moved: figures of led keys may be of forwarded ones", file=sys.stderr)


def _fill(wanted: Sequence[Cell], stores: dict[str, Store], program: Path | None) -> None:
    """Set the keys that GETs draw from."""
    for name, store in stores.items():
        prefixes = {_prefix(each, store) for each in wanted if each.load.op == "get" and each.system.store == name}
        for prefix in prefixes if program is not None else ():
            protocol, endpoints = next(iter(store.endpoints.items()))
            found = closed_loop.run(program, Request(protocol, endpoints, "fill", 50, prefix=prefix, keys=READ_KEYS))
            if found.operations != READ_KEYS:
                raise RuntimeError(f"{name}: expected {READ_KEYS:,} keys to be set, got {found}")


def _measure(
    wanted: Sequence[Cell], stores: dict[str, Store], program: Path | None, runs: int, seconds: float
) -> Table:
    """Measure each cell once a round. Within a round all systems get a load in turn."""
    found: Table = {cell.name: Measured() for cell in wanted}
    order = list(wanted)
    for run in range(runs):
        for cell in order:
            store = stores[cell.system.store]
            measured = found[cell.name]
            figures, cpu_s = _once(cell, store, program, seconds, seed=run + 1)
            measured.add(figures, cpu_s)
            reported = f"{figures.rate:,.0f}/s, {measured.cpu_ms[-1]:.1f} ms per 1,000"
            print(f"round {run + 1}, {cell.name}: {reported} {figures.errors or ''}", file=sys.stderr, flush=True)
        order.reverse()  # nobody always follows the same system, which may have left work behind
    return found


def _once(cell: Cell, store: Store, program: Path | None, seconds: float, seed: int) -> tuple[Figures, float]:
    """Measure a cell once. Returns the processor seconds of the store's processes, too."""
    load, system = cell
    borders: list[float] = []

    def at_border() -> None:
        borders.append(sum(map(spent_s, store.pids)))

    keys = READ_KEYS if load.op == "get" else WRITTEN_KEYS
    prefix = _prefix(cell, store)
    if system.protocol == "client":
        spec = LoadSpec(
            seconds=seconds,
            warmup_s=0.0,
            in_flight=load.connections,
            mix=(({"set": "put"}.get(load.op, load.op), 1),),
            keys=keys,
            prefix=prefix.encode(),
            seed=seed,
        )
        figures = _on_loop(lambda: _async_client(store.config, spec, at_border))
    else:
        assert program is not None
        endpoints = store.endpoints[system.protocol]
        request = Request(
            system.protocol,
            endpoints if system.is_spread else endpoints[:1],
            load.op,
            load.connections,
            load.pipeline,
            min(system.channels, load.connections),
            prefix,
            keys,
            seconds,
            WARM_S,
            seed,
        )
        figures = closed_loop.run(program, request, at_border)
    return figures, borders[1] - borders[0]


def _prefix(cell: Cell, store: Store) -> str:
    return f"{{{store.tag}}}:" if cell.system.is_led else "key:"


async def _async_client(config: ClientConfig, load: LoadSpec, at_border: Callable[[], None]) -> Figures:
    async with AsyncClient(config) as client:
        await run_load(client, replace(load, seconds=WARM_S, seed=load.seed + 1_000))
        at_border()
        found = await run_load(client, load)
        at_border()
    ((_, tally),) = found.tallies.items()
    p50, p99 = (tally.responses.get_value_at_percentile(share) / 1000 for share in (50, 99))
    return Figures(found.rate, p50, p99, found.operations, dict(found.errors))


def figures_table(table: Table) -> str:
    """Return a Markdown table: a row per system, a column per load."""
    loads = [load for load in LOADS if any(Cell(load, system).name in table for system in SYSTEMS)]
    rows = [
        [system.name, *(_shown(table.get(Cell(load, system).name)) for load in loads)]
        for system in SYSTEMS
        if any(Cell(load, system).name in table for load in loads)
    ]
    return _markdown(["", *(load.name for load in loads)], rows)


def _shown(measured: Measured | None) -> str:
    if measured is None:
        return ""
    failed = sum(measured.errors.values())
    refused = f"; {failed:,} errors" if failed else ""
    cpu = f"{measured.cpu:,.0f}" if measured.cpu >= 100 else f"{measured.cpu:.3g}"
    return f"{measured.rate:,.0f}; {cpu}{refused}"


def ratios_table(table: Table) -> str:
    """Return a Markdown table of the ratios whose cells are measured, with the range of the ratios of single rounds."""
    rows = []
    for ratio in RATIOS:
        found = rounds_of(ratio, table)
        if found is None:
            continue
        above, below = found
        value = median(above) / median(below)
        each = [one / other for one, other in zip(above, below, strict=False)]
        wanted, met = "", ""
        if ratio.wanted is not None:
            is_rate = ratio.of == "rate"
            wanted = f"{'≥' if is_rate else '≤'} {ratio.wanted:g}"
            met = "yes" if (value >= ratio.wanted if is_rate else value <= ratio.wanted) else "no"
        rows.append([ratio.name, f"{value:.2f}", f"{min(each):.2f} to {max(each):.2f}", wanted, met])
    return _markdown(["ratio", "of medians", "of rounds", "wanted", "met"], rows)


def rounds_of(ratio: Ratio, table: Table) -> tuple[list[float], list[float]] | None:
    """Return the figures of both cells, or None if a cell is missing or had a round without an operation."""
    found: list[list[float]] = []
    for load, name in (ratio.above, ratio.below):
        measured = table.get(f"{load.name}: {name}")
        if measured is None or not all(measured.rates):
            return None
        found.append(measured.rates if ratio.of == "rate" else measured.cpu_ms)
    above, below = found
    return above, below


def _markdown(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])


async def _store(file: ClusterFile) -> Store:
    """Return the cluster as a store. Its first node is one that leads a partition."""
    config = ClientConfig(endpoints=tuple(node.grpc for node in file.nodes))
    pids = [pid for pid in (file.zookeeper_pid, *(node.pid for node in file.nodes)) if pid is not None]
    async with AsyncClient(config) as client:
        for number in range(1_000):
            tag = f"t{number}"
            leader = client.cluster.leader_of(client.cluster.partition_of(b"{%b}" % tag.encode()))
            if leader in config.endpoints:
                nodes = sorted(file.nodes, key=lambda node: node.grpc != leader)
                endpoints = {
                    "resp": [node.resp for node in nodes],
                    "cluster": [node.resp for node in nodes],
                    "http": [node.http for node in nodes],
                    "kv": [node.grpc for node in nodes],
                }
                return Store(endpoints, pids, tag, config)
    raise RuntimeError("no partition has a leader")


async def _leaders(config: ClientConfig) -> dict[str, str]:
    """Return the leader of each partition."""
    async with AsyncClient(config) as client:
        return {each: client.cluster.leader_of(each) for each in client.cluster.partitions()}


async def _spread(config: ClientConfig) -> dict[str, str]:
    """Return the leaders once all nodes lead equally many partitions. After a while, return the leaders as they are."""
    until = time.monotonic() + SPREAD_S
    while True:
        leaders = await _leaders(config)
        if max(Counter(leaders.values()).values()) <= math.ceil(len(leaders) / len(config.endpoints)):
            return leaders
        if time.monotonic() > until:
            shares = dict(Counter(leaders.values()))
            print(f"the nodes do not lead equally many partitions: {shares}", file=sys.stderr)
            return leaders
        await asyncio.sleep(0.5)


@contextmanager
def _cluster(data_dir: Path | None, partitions: int | None) -> Iterator[ClusterFile]:
    if data_dir is not None:
        yield LocalCluster(data_dir).load()
        return
    with peers.kvstore(LocalCluster, partitions=partitions) as (_, file):
        yield file


def _on_loop(work: Callable[[], Any]) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        async def main() -> Any:
            return await work()

        return runner.run(main())


def _machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": interpreter(),
        "load_1m": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=path_word)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--etcd", default="etcd")
    parser.add_argument("--out", type=path_word, default=Path("reports/bench.json"))
    parser.add_argument("--add", action="store_true", dest="is_adding")
    words = parser.parse_args()
    if words.runs < 1 or not 0 < words.seconds < math.inf:
        parser.error(f"expected 1 run or more, of more than 0 seconds each, got {words.runs} of {words.seconds:g} s")
    try:
        run_suite(**vars(words))
    except ConfigError as error:
        print(f"suite: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
