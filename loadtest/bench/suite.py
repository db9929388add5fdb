"""The benchmark suite: our figures beside our targets, and beside the floor, etcd and Redis from the same run.

    python -m loadtest.bench.suite [--data-dir DIR] [--runs 3] [--seconds 4] [--only TEXT] [--out FILE]

Without --data-dir a three-node cluster is started in a scratch folder and ended afterwards. Each line runs several
times and the median counts. Rates depend on the machine: the ratios are what can be compared. The store and the floor
(loadtest/floor.py), as it is and with lookup, take turns, with as many requests each; `--only floor` runs these alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from kvstore.cli.output import as_table
from kvstore.client import AsyncClient, ClientConfig
from kvstore.devcluster.layout import ClusterFile
from kvstore.devcluster.local import LocalCluster
from kvstore.env.interpreter import interpreter
from kvstore.errors import ConfigError
from kvstore.loadtest.generator.options import path_word
from kvstore.loadtest.loads import LoadSpec, run_load
from kvstore.ring.hashing import MURMUR3
from loadtest.bench import etcd_load, peers
from loadtest.bench.redis_lines import Figure, Line, requests_for, run_for, run_line
from loadtest.bench.unary import calls_per_second
from loadtest.floor_member import PROCESSES

OFFSETS = range(24_000, 30_000, 100)
SPREAD_S = 30.0
"""Maximum wait until each node leads one partition."""


@dataclass
class Measured:
    """One line of the report."""

    name: str
    unit: str = "/s"
    target: float | None = None
    """The target: a minimum, or a maximum for times."""
    values: list[float] = field(default_factory=list)
    note: str = ""
    """Remarks on the figures, such as failed operations or a change of leader."""

    @property
    def value(self) -> float:
        return median(self.values) if self.values else 0.0

    @property
    def reached(self) -> bool | None:
        if self.target is None or not self.values:
            return None
        return self.value <= self.target if self.unit == "ms" else self.value >= self.target

    def row(self) -> dict[str, Any]:
        shown = {True: "yes", False: "NO", None: "-"}[self.reached]
        spread = f"{min(self.values):.4g}-{max(self.values):.4g}" if self.values else "-"
        value = f"{self.value:,.0f}" if self.unit == "/s" else f"{self.value:.2f}"
        target = "-" if self.target is None else f"{self.target:,g}"
        return {
            "what": self.name,
            "unit": self.unit,
            "median": value,
            "of": spread,
            "target": target,
            "reached": shown,
            "note": self.note,
        }


@dataclass(frozen=True)
class Subject:
    """The cluster, and the leader of a partition."""

    file: ClusterFile
    asked: str
    """RESP address of the node that receives the requests."""
    tag: str
    """Hash tag of the keys that this node leads."""
    config: ClientConfig


def run_suite(*, data_dir: Path | None, runs: int, seconds: float, only: str, out: Path) -> list[Measured]:
    """Run the suite, print it, and write it. Raises ConfigError if no line is to be measured."""
    with peers.scratch() as folder, _cluster(data_dir, folder) as file:
        subject = _on_loop(lambda: _subject(file))
        # First the floor: it begins with as little data as the store.
        found = [*_beside_floor(subject, runs, seconds, only), *_ours(subject, runs, seconds, only)]
    if not found:
        raise ConfigError(f"no line that can be measured here holds {only!r} in its name")
    ratios = []
    if not only:
        ratios = _beside_peers({each.name: each for each in found}, runs, seconds)
    report = [*found, *ratios]
    print(as_table([each.row() for each in report]))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": _machine(), "lines": [_document(each) for each in report]}, indent=2))
    print(f"\nfigures in {out}")
    return report


LINES: tuple[tuple[str, Line, float | None], ...] = (
    ("SET, 50 connections, led by the asked node", Line("set", 50, tag="tag"), 20_000),
    ("SET, 50 connections, pipeline 16, led by the asked node", Line("set", 50, pipeline=16, tag="tag"), 100_000),
    ("GET, 50 connections, led by the asked node", Line("get", 50, tag="tag"), 70_000),
    ("SET, 50 connections, random keys", Line("set", 50), 14_000),
    ("SET, 50 connections, pipeline 16, random keys", Line("set", 50, pipeline=16), 80_000),
    ("GET, 50 connections, random keys", Line("get", 50), 50_000),
    ("GET, 50 connections, pipeline 16, random keys", Line("get", 50, pipeline=16), None),
)
WIDE = "SET, 1,000 connections, 1 KB, random keys"
ASYNC = "AsyncClient put, 1,000 in flight, 1 KB"
EMPTY = "a gRPC server that does nothing: unary Get, 64 in flight"
REDIS = "Redis, appendfsync always"
REDIS_REFERENCE = {("set", 1): 66_500, ("set", 16): 435_000, ("get", 1): 100_000}
"""(Command, pipeline) → operations per second of Redis on the machine for which the targets were set. A target
divided by this figure is a target for any machine."""
SINGLE = "SET, 1 connection: p50, led by the asked node"
FLOORS = {"the floor": False, "the floor with lookup": True}
FLOOR_LINES: tuple[tuple[str, Line], ...] = (
    (SINGLE, Line("set", 1, tag="tag")),
    *((name, line) for name, line, _ in LINES if (line.command, line.pipeline) != ("get", 16)),
)
ETCD = "etcd, three nodes: put, 1,000 in flight, 1 KB"


def _ours(subject: Subject, runs: int, seconds: float, only: str) -> Iterator[Measured]:
    for measured, once in _lines(subject, seconds):
        if only in measured.name:
            yield _repeat(measured, runs, once)


def _lines(subject: Subject, seconds: float) -> Iterator[tuple[Measured, Callable[[], float]]]:
    """Return each line with the function that measures it once; without redis-benchmark, only the lines of our own
    clients."""
    if peers.is_installed("redis-benchmark"):
        yield from _redis_lines(subject, seconds)
    else:
        print("redis-benchmark (Debian: redis-tools) is not installed: its lines are left out", file=sys.stderr)
    for kind in ("put", "get"):
        load = LoadSpec(seconds=seconds, in_flight=1_000, value_bytes=1_024, mix=((kind, 1),), keys=1_000_000)
        measured = Measured(ASYNC.replace("put", kind))
        yield measured, partial(_async_client, subject, load, measured)
    for method, target in (("Put", 2_500.0), ("Get", 4_000.0)):
        yield (
            Measured(f"unary gRPC {method}, 64 in flight", target=target),
            partial(_unary, subject, method, seconds),
        )


def _redis_lines(subject: Subject, seconds: float) -> Iterator[tuple[Measured, Callable[[], float]]]:
    for name, line, target in LINES:
        yield Measured(name, target=target), partial(_rate, subject, line, seconds)
    single = Measured(SINGLE, "ms", 0.8)
    yield single, lambda: _redis(subject, Line("set", 1, tag="tag"), seconds).p50_ms
    yield Measured(WIDE), partial(_rate, subject, Line("set", 1_000, 1_024), seconds)


def _rate(subject: Subject, line: Line, seconds: float) -> float:
    return _redis(subject, line, seconds).per_s


def _requests_per_s(line: Line, address: str, requests: int) -> float:
    return run_line(line, address, requests).per_s


def _unary(subject: Subject, method: str, seconds: float) -> float:
    address = next(node.grpc for node in subject.file.nodes if node.resp == subject.asked)
    return _unary_calls(address, method, subject.tag, seconds)


def _unary_calls(address: str, method: str, tag: str, seconds: float) -> float:
    return float(_on_loop(lambda: calls_per_second(address, method, tag, in_flight=64, seconds=seconds)))


def _redis(subject: Subject, line: Line, seconds: float) -> Figure:
    """Run redis-benchmark for about `seconds`. A short run finds the number of requests for that."""
    line = line._replace(tag=subject.tag if line.tag else "")
    return run_for(line, subject.asked, seconds)


def _async_client(subject: Subject, load: LoadSpec, measured: Measured) -> float:
    async def main() -> float:
        async with AsyncClient(subject.config) as client:
            found = await run_load(client, load)
        if found.errors:
            measured.note = f"errors: {dict(found.errors)}"
            print(measured.note, file=sys.stderr)
        return found.rate

    return float(_on_loop(main))


def _beside_floor(subject: Subject, runs: int, seconds: float, only: str) -> list[Measured]:
    """Yield the lines of the store and of the floors, and the ratios. Lines of the store alone need no floor."""
    lines = [each for each in FLOOR_LINES if not only or (only in f"floor: {each[0]}" and "floor" in only)]
    if not lines or not peers.is_installed("redis-benchmark"):
        return []
    found: list[Measured] = []
    leaders = _on_loop(lambda: _spread(subject))
    tag = next(f"t{number}" for number in count() if MURMUR3.token_of(b"t%d" % number) % PROCESSES == 0)
    with peers.scratch() as folder, ExitStack() as stack:
        asked = {"the store": (subject.asked, subject.tag)}
        for place, (floor, is_looking_up) in enumerate(FLOORS.items()):
            running = stack.enter_context(peers.floor(folder / str(place), is_looking_up=is_looking_up))
            asked[floor] = running.doors[0], tag
        for name, line in lines:
            found += _in_turn(name, line, asked, runs, seconds)
    if leaders != _on_loop(lambda: _leaders(subject)):
        print("leaders have moved: the ratios to the floor do not count", file=sys.stderr)
        for each in found:
            each.note = "leaders have moved: does not count"
    return found


def _in_turn(name: str, line: Line, asked: dict[str, tuple[str, str]], runs: int, seconds: float) -> Iterator[Measured]:
    """Measure one line at the store and at the floors in turn, so that other work of the machine slows all alike."""
    lines = {who: (line._replace(tag=tag if line.tag else ""), address) for who, (address, tag) in asked.items()}
    (store, at), *_ = lines.values()
    requests = requests_for(store, at, seconds)
    figures: dict[str, list[float]] = {who: [] for who in asked}
    turns = list(asked)
    for _ in range(runs):
        for who in turns:
            each, address = lines[who]
            figure = run_line(each, address, requests)
            figures[who].append(figure.p50_ms if name == SINGLE else figure.per_s)
        turns.reverse()  # nobody always comes after the same one, which may have left work behind
    for who, values in figures.items():
        yield _told(Measured(f"floor: {name}: {who}", "ms" if name == SINGLE else "/s", values=values))
    for floor in FLOORS:
        ratios = [ours / theirs for ours, theirs in zip(figures["the store"], figures[floor], strict=True)]
        yield _told(Measured(f"floor: {name}: the store / {floor}", "x", values=ratios))


def _beside_peers(ours: dict[str, Measured], runs: int, seconds: float) -> list[Measured]:
    """Yield the lines of Redis and etcd on this machine while our own cluster is down, and the ratios."""
    found: list[Measured] = []
    with peers.scratch() as folder, peers.empty_grpc(folder) as address:
        found.append(_repeat(Measured(EMPTY), runs, lambda: _unary_calls(address, "Get", "empty", seconds)))
    if peers.is_installed("redis-server", "redis-benchmark"):
        with peers.scratch() as folder, peers.redis(folder) as port:
            found += _beside_redis(ours, f"127.0.0.1:{port}", runs)
    if peers.is_installed("etcd", "etcdctl"):
        with peers.scratch() as folder, peers.etcd(folder) as addresses:
            stub = _repeat(Measured(f"{ETCD}, a stub client"), runs, lambda: _etcd(addresses, seconds))
            print("etcdctl check perf --load=xl takes a minute", file=sys.stderr)
            checked = Measured(
                "etcd, three nodes: etcdctl check perf --load=xl", values=[etcd_load.check_perf(addresses)]
            )
        found += [stub, checked]
        best = max(stub.value, checked.value)
        for name in (WIDE, ASYNC):
            if name in ours and best:
                found.append(Measured(f"{name}: times etcd's", "x", 6.0, [ours[name].value / best]))
    return found


def _beside_redis(ours: dict[str, Measured], address: str, runs: int) -> Iterator[Measured]:
    for (command, pipeline), reference in REDIS_REFERENCE.items():
        name = f"{REDIS}: {command.upper()}, 50 connections, pipeline {pipeline}"
        line, requests = Line(command, 50, pipeline=pipeline), 100_000 * pipeline
        redis = _repeat(Measured(name), runs, partial(_requests_per_s, line, address, requests))
        yield redis
        for our_name, our_line, target in LINES:
            if (our_line.command, our_line.pipeline) == (command, pipeline) and target is not None:
                ratio = ours[our_name].value / redis.value
                yield Measured(f"{our_name}: times Redis's", "x", round(target / reference, 2), [ratio])


def _etcd(addresses: list[str], seconds: float) -> float:
    return _on_loop(lambda: etcd_load.puts_per_second(addresses, in_flight=1_000, value_bytes=1_024, seconds=seconds))


def _repeat(measured: Measured, runs: int, once: Callable[[], float]) -> Measured:
    for _ in range(runs):
        measured.values.append(once())
    return _told(measured)


def _told(measured: Measured) -> Measured:
    print(f"{measured.name}: {measured.value:,.4g} {measured.unit}", file=sys.stderr, flush=True)
    return measured


async def _subject(file: ClusterFile) -> Subject:
    config = ClientConfig(endpoints=tuple(node.grpc for node in file.nodes))
    async with AsyncClient(config) as client:
        for number in range(1_000):
            tag = f"t{number}"
            leader = client.cluster.leader_of(client.cluster.partition_of(b"{%b}" % tag.encode()))
            node = next((each for each in file.nodes if each.grpc == leader), None)
            if node is not None:
                return Subject(file, node.resp, tag, config)
    raise RuntimeError("no partition has a leader")


async def _leaders(subject: Subject) -> dict[str, str]:
    """Return the leader of each partition."""
    async with AsyncClient(subject.config) as client:
        return {each: client.cluster.leader_of(each) for each in client.cluster.partitions()}


async def _spread(subject: Subject) -> dict[str, str]:
    """Return the leaders once each node leads one partition, as in the floor. After a while, return the leaders as
    they are."""
    until = time.monotonic() + SPREAD_S
    while len(set((leaders := await _leaders(subject)).values())) < len(leaders):
        if time.monotonic() > until:
            print(f"not each node leads one partition, as in the floor: {leaders}", file=sys.stderr)
            break
        await asyncio.sleep(0.5)
    return leaders


@contextmanager
def _cluster(data_dir: Path | None, folder: Path) -> Iterator[ClusterFile]:
    if data_dir is not None:
        yield LocalCluster(data_dir).load()
        return
    cluster = LocalCluster(folder / "data", lambda text: print(text, file=sys.stderr))
    try:
        yield peers.up_on_free_ports(cluster, OFFSETS)
    finally:
        cluster.down()  # also what `up` had started before it raised


def _on_loop(work: Callable[[], Any]) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        async def main() -> Any:
            return await work()

        return runner.run(main())


def _document(measured: Measured) -> dict[str, Any]:
    return {**asdict(measured), "median": measured.value, "reached": measured.reached}


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
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=path_word, default=Path("reports/bench.json"))
    words = parser.parse_args()
    if words.runs < 1 or not 0 < words.seconds < inf:
        parser.error(f"expected 1 run or more, of more than 0 seconds each, got {words.runs} of {words.seconds:g} s")
    try:
        run_suite(**vars(words))
    except ConfigError as error:
        print(f"suite: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
