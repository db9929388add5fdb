"""Measure the cost of an operation: calls of Python and C, wake-ups, reads and writes of the kernel, syncs and
processor time.

    python -m loadtest.budget [--only TEXT] [--layers] [--out FILE]

A three-node cluster runs in a scratch folder. Each load goes to the node that leads the partition of its keys, once for
processor time, and once with the calls of the nodes' event loops counted. Counts depend on how busy the machine is only
through the number of operations in one entry. The nodes' work in the same time without a load is subtracted. Counts are
divided by operations, and by the log entries that contain the operations. `BUDGET` has the limits: a change that spends
less lowers them. The exit code is 1 if a load exceeds its limit.

The line `idle` shows nodes without requests: each node's share of a processor, its wake-ups, and its calls per second,
by layer. The share is that of all threads; wake-ups and calls are the event loop's. It is measured first, because after
a load, state is flushed and trimmed for a while. `--only idle` measures nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import psutil
import uvloop

from kvstore.cli.output import as_table
from kvstore.client import AsyncClient, ClientConfig
from kvstore.devcluster.layout import ClusterFile, NodePlace
from kvstore.devcluster.local import LocalCluster
from kvstore.errors import ConfigError
from kvstore.loadtest.generator.options import path_word
from kvstore.loadtest.loads import closed_loop
from kvstore.loadtest.resp import AsyncRespConnection, ReplyError, connect
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc.channels import channel_options
from loadtest.bench import peers
from loadtest.figures import keep

FILE_S = 10.0
STANDARD = "standard library"
VALUE = b"x" * 100
CONNECT_S, REPLY_S = 5.0, 60.0
Connect = Callable[[str], Awaitable[AsyncRespConnection]]
connect_plainly = partial(connect, timeout_s=CONNECT_S)


@dataclass(frozen=True)
class Load:
    """`operations` in total, divided among the connections, `pipeline` at a time on each. The commands "put" and
    "get" use one AsyncClient, and "Put" and "Get" make unary calls on one channel, with as many operations in flight as
    there are connections."""

    name: str
    command: str
    connections: int
    pipeline: int
    operations: int
    budget: tuple[float, float] | None = None
    """Maximum calls per operation of the leader and of a follower. None where the figure depends on how many
    operations share an entry."""
    is_forwarded: bool = False
    """True if the requests go to the follower, which forwards them to the leader."""
    is_random: bool = False
    """True if the keys are spread over all partitions, as most applications' are. The "leader" is then the asked node
    and the "follower" another one; each of them leads a part of the keys."""


BUDGET = (
    Load("SET, 1 connection", "SET", 1, 1, 400, (360, 205)),
    Load("SET, 50 connections", "SET", 50, 1, 5_000),
    Load("SET, 50 connections, pipeline 16", "SET", 50, 16, 16_000, (14, 5)),
    Load("SET, 50 connections, forwarded", "SET", 50, 1, 5_000, is_forwarded=True),
    Load("SET, 50 connections, random keys", "SET", 50, 1, 5_000, is_random=True),
    Load("SET, 50 connections, pipeline 16, forwarded", "SET", 50, 16, 16_000, (8, 16), is_forwarded=True),
    Load("put, AsyncClient, 50 in flight", "put", 50, 1, 5_000),
    Load("put, AsyncClient, 1,000 in flight", "put", 1_000, 1, 20_000, (18, 7)),
    Load("GET, 1 connection", "GET", 1, 1, 400, (35, 5)),
    Load("GET, 50 connections", "GET", 50, 1, 10_000),
    Load("GET, 50 connections, pipeline 16", "GET", 50, 16, 16_000, (12, 1)),
    Load("GET, 50 connections, forwarded", "GET", 50, 1, 10_000, is_forwarded=True),
    Load("get, AsyncClient, 50 in flight", "get", 50, 1, 10_000, (12, 1)),
    Load("Put, unary gRPC, 50 in flight", "Put", 50, 1, 5_000),
    Load("Get, unary gRPC, 50 in flight", "Get", 50, 1, 5_000),
)


ATTEMPTS_MAX, LED_S_MAX = 3, 60.0
SHOWN_CALLS_MIN = 0.005
"""Calls per operation below which `--layers` omits a function."""
IDLE = "idle"
IDLE_S, SETTLE_S = 30.0, 15.0
"""Seconds for which an idle cluster is observed, once for processor time and once for calls; and seconds that a new
cluster has to come to rest."""
IDLE_CALLS_PER_S = 2_600
"""Maximum calls per second of an idle node. The watchdog, the probes of disks and the comparison of dates take about
300 of them."""


@dataclass
class Idleness:
    """The cost of one process while there are no requests."""

    node: str
    cpu_share: float
    wake_ups_per_s: float
    calls_per_s: dict[str, float]
    """Calls per second, by layer."""
    functions: Counter[str]
    """Total calls, by function."""

    @property
    def is_within(self) -> bool:
        return sum(self.calls_per_s.values()) <= IDLE_CALLS_PER_S

    def row(self) -> dict[str, Any]:
        return {
            "load": IDLE,
            "role": self.node,
            "CPU %": round(self.cpu_share * 100, 2),
            "wake-ups/s": round(self.wake_ups_per_s, 1),
            "calls/s": round(sum(self.calls_per_s.values())),
            "budget": IDLE_CALLS_PER_S,
        }


@dataclass
class Cost:
    """The cost of one load at one process."""

    load: str
    role: str
    operations: int
    budget: float | None
    """Maximum calls per operation."""
    entries: int
    calls: Counter[str] = field(default_factory=Counter)
    """Calls by layer."""
    functions: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0
    wake_ups: int = 0
    kernel: int = 0
    """Number of reads and writes of the kernel."""
    syncs: int = 0

    @property
    def calls_per_operation(self) -> float:
        return sum(self.calls.values()) / self.operations

    @property
    def is_within(self) -> bool:
        return self.budget is None or self.calls_per_operation <= self.budget

    def row(self) -> dict[str, Any]:
        calls, entries = sum(self.calls.values()), self.entries
        return {
            "load": self.load,
            "role": self.role,
            "calls/op": round(self.calls_per_operation, 1),
            "budget": self.budget,
            "calls/entry": round(calls / entries, 1) if entries else None,
            "ops/entry": round(self.operations / entries, 1) if entries else None,
            "CPU us/op": round(self.cpu_s / self.operations * 1e6, 1),
            "wake-ups/op": round(self.wake_ups / self.operations, 2),
            "reads+writes/op": round(self.kernel / self.operations, 2),
            "syncs/entry": round(self.syncs / entries, 2) if entries else None,
        }


class Counted(LocalCluster):
    """A cluster whose nodes count their calls on request."""

    def _command(self, node: NodePlace) -> list[str]:
        _, _, _, *rest = super()._command(node)
        return [sys.executable, "-m", "loadtest.bench.counted_node", str(self.counts_of(node.id)), *rest]

    def counts_of(self, node: str) -> Path:
        return self.data_dir / f"{node}.calls"

    def begin(self) -> None:
        for node in self.load().nodes:
            self.counts_of(node.id).unlink(missing_ok=True)
            os.kill(node.pid or 0, signal.SIGUSR1)

    def end(self, node: NodePlace) -> Counter[str]:
        """Return the node's counts since `begin`: calls by function, including the calls of C functions."""
        os.kill(node.pid or 0, signal.SIGUSR2)
        until = time.monotonic() + FILE_S
        while not self.counts_of(node.id).exists():
            if time.monotonic() > until:
                raise TimeoutError(f"{node.id} does not say what it has counted")
            time.sleep(0.01)
        return Counter(json.loads(self.counts_of(node.id).read_text()))


def layer_of(function: str) -> str:
    """Return the layer of a function: its folder of kvstore/, or the library that it belongs to."""
    _, inside, path = function.rpartition("/kvstore/")
    if not inside:
        return STANDARD
    folder = path.partition(":")[0].rpartition("/")[0]
    return folder or "kvstore"


async def run_load(load: Load, address: str, tag: str, connect: Connect = connect_plainly) -> None:
    """Run a load by the Redis protocol. Raises RuntimeError if anything is refused, ConnectionError if the server
    closes a connection."""
    rounds = load.operations // (load.connections * load.pipeline)
    verb, rest = (b"GET", ()) if load.command == "GET" else (b"SET", (VALUE,))
    prefix = b"" if load.is_random else b"{%b}" % tag.encode()

    async def connection(number: int) -> None:
        made = await connect(address)
        for turn in range(rounds):
            first = (number * rounds + turn) * 16
            commands = [(verb, b"%b%d" % (prefix, first + each), *rest) for each in range(load.pipeline)]
            for reply in await made.ask_all(commands, timeout_s=REPLY_S):
                if isinstance(reply, ReplyError):
                    raise RuntimeError(f"{load.name}: {reply}")
        made.close()

    await closed_loop(iter(range(load.connections)), load.connections, connection)


async def run_calls(load: Load, endpoints: tuple[str, ...], tag: str) -> None:
    """Run a load by an AsyncClient. Raises StoreError."""
    prefix = b"{%b}" % tag.encode()
    async with AsyncClient(ClientConfig(endpoints=endpoints)) as client:

        async def one(number: int) -> None:
            key = b"%b%d" % (prefix, number)
            await (client.get(key) if load.command == "get" else client.put(key, VALUE))

        await closed_loop(iter(range(load.operations)), load.connections, one)


async def run_unary(load: Load, address: str, tag: str) -> None:
    """Run a load by unary gRPC calls. Raises grpc.aio.AioRpcError."""
    prefix = b"{%b}" % tag.encode()
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub = kv_pb2_grpc.KVStub(channel)

        async def one(number: int) -> None:
            key = b"%b%d" % (prefix, number)
            if load.command == "Get":
                await stub.Get(kv_pb2.GetRequest(key=key), timeout=REPLY_S)
            else:
                await stub.Put(kv_pb2.PutRequest(key=key, value=VALUE), timeout=REPLY_S)

        await closed_loop(iter(range(load.operations)), load.connections, one)


class Budget:
    """Measures one load after the other on one cluster."""

    def __init__(self, cluster: Counted, tag: str, partition: str) -> None:
        self._cluster, self._tag, self._partition = cluster, tag, partition

    def measure(self, load: Load) -> list[Cost]:
        """Return the costs of the leader and of one follower. Measures again if the leader changes meanwhile. Raises
        RuntimeError if the leader changes each time, or if nobody leads."""
        for _ in range(ATTEMPTS_MAX):
            lead = self._lead()
            found = self._measure(load, lead)
            if found and self._lead() == lead:
                return found
        raise RuntimeError(f"the lead of partition {self._partition} goes from node to node")

    def _lead(self) -> NodePlace:
        """Return the node that leads the partition. Raises RuntimeError if nobody leads it within LED_S_MAX."""
        until = time.monotonic() + LED_S_MAX
        while time.monotonic() < until:
            for node in self._cluster.load().nodes:
                if self._leading(node) is not None:
                    return node
            time.sleep(0.1)
        raise RuntimeError(f"nobody leads partition {self._partition}")

    def _measure(self, load: Load, lead: NodePlace) -> list[Cost]:
        """Return the costs; nothing if `lead` does not lead until the end."""
        follower = next(node for node in self._cluster.load().nodes if node.id != lead.id)
        both = {"leader": lead, "follower": follower}
        asked = follower if load.is_forwarded else lead
        self._run(load, asked)
        before = {role: self._spent(node) for role, node in both.items()}
        self._run(load, asked)
        after = {role: self._spent(node) for role, node in both.items()}
        if self._leading(lead) is None:
            return []
        began, entries = time.monotonic(), self._entries(load)
        counted = self._counted(lambda: self._run(load, asked))
        took_s = time.monotonic() - began
        if self._leading(lead) is None:
            return []
        entries = self._entries(load) - entries
        idle = self._counted(lambda: time.sleep(took_s))
        found = []
        for (role, node), most in zip(both.items(), load.budget or (None, None), strict=True):
            cost = Cost(load.name, role, load.operations, most, 0 if load.command.upper() == "GET" else entries)
            cost.functions = counted[node.id] - idle[node.id]
            for function, calls in cost.functions.items():
                cost.calls[layer_of(function)] += calls
            cost.cpu_s, cost.wake_ups, cost.kernel, cost.syncs = (
                b - a for a, b in zip(before[role], after[role], strict=True)
            )
            found.append(cost)
        return found

    def idle(self, seconds: float) -> list[Idleness]:
        """Return the cost of each idle node."""
        nodes = self._cluster.load().nodes
        before = {node.id: scheduled(node) for node in nodes}
        time.sleep(seconds)
        spent = {node.id: [b - a for a, b in zip(before[node.id], scheduled(node), strict=True)] for node in nodes}
        counted = self._counted(lambda: time.sleep(seconds))
        found = []
        for node in nodes:
            layers: Counter[str] = Counter()
            for function, calls in counted[node.id].items():
                layers[layer_of(function)] += calls
            cpu_s, wake_ups = spent[node.id]
            per_s = {layer: round(calls / seconds, 1) for layer, calls in layers.most_common()}
            found.append(Idleness(node.id, cpu_s / seconds, wake_ups / seconds, per_s, counted[node.id]))
        return found

    def _counted(self, work: Callable[[], object]) -> dict[str, Counter[str]]:
        """Return the calls of each node's functions, of Python and of C, while `work` runs."""
        self._cluster.begin()
        work()
        return {node.id: self._cluster.end(node) for node in self._cluster.load().nodes}

    def _run(self, load: Load, asked: NodePlace) -> None:
        if load.command in ("put", "get"):
            endpoints = tuple(node.grpc for node in self._cluster.load().nodes)
            uvloop.run(run_calls(load, endpoints, self._tag))
        elif load.command in ("Put", "Get"):
            uvloop.run(run_unary(load, asked.grpc, self._tag))
        else:
            uvloop.run(run_load(load, asked.resp, self._tag))

    def _spent(self, node: NodePlace) -> tuple[float, int, int, int]:
        process = psutil.Process(node.pid)
        with process.oneshot():
            times, switches, io = process.cpu_times(), process.num_ctx_switches(), process.io_counters()
        kernel = io.read_count + io.write_count
        return times.user + times.system, switches.voluntary, kernel, status(node)["bookie"]["syncs"]

    def _entries(self, load: Load) -> int:
        """Return the number of entries that the leaders of the load's keys have appended."""
        leads = [status(node)["partitions"] for node in self._cluster.load().nodes]
        return sum(
            each["leading"]["entries"]
            for node in leads
            for partition, each in node.items()
            if each.get("leading") and (load.is_random or partition == self._partition)
        )

    def _leading(self, node: NodePlace) -> dict[str, Any] | None:
        """Return the node's report on the partition that it leads; None if it does not lead it."""
        found: dict[str, Any] | None = status(node)["partitions"].get(self._partition, {}).get("leading")
        return found


def scheduled(node: NodePlace) -> tuple[float, int]:
    """Return the processor time of all threads in seconds, and how often the event loop has slept. The time is exact
    to the nanosecond, because an idle node takes only a few ticks of the clock in a minute."""
    tasks = list(Path(f"/proc/{node.pid}/task").iterdir())
    cpu_s = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    return cpu_s, psutil.Process(node.pid).num_ctx_switches().voluntary


def status(node: NodePlace) -> dict[str, Any]:
    """Return the status page of a node."""
    with urlopen(f"http://{node.http}/", timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


async def _tagged(file: ClusterFile) -> tuple[str, str]:
    """Return a hash tag, and the partition of its keys."""
    async with AsyncClient(ClientConfig(endpoints=tuple(node.grpc for node in file.nodes))) as client:
        return "budget", str(client.cluster.partition_of(b"{budget}"))


@contextmanager
def running_budget() -> Iterator[Budget]:
    """Run a cluster in a scratch folder, and stop it afterwards."""
    with peers.kvstore(Counted) as (cluster, file):
        yield Budget(cluster, *asyncio.run(_tagged(file)))


def _show_layers(cost: Cost) -> None:
    per = cost.entries or cost.operations
    rows = [{"layer": name, "calls": round(calls / per, 1)} for name, calls in cost.calls.most_common()]
    print(f"\n{cost.load}, {cost.role}: calls per {'entry' if cost.entries else 'operation'}\n{as_table(rows)}\n")
    for name, calls in cost.functions.most_common(400):
        if calls / per < SHOWN_CALLS_MIN:
            break
        print(f"  {calls / per:7.2f}  {name.rpartition('/kvstore/')[2] or name}")


def _show_idle_layers(idle: list[Idleness]) -> None:
    for each in idle:
        rows = [{"layer": layer, "calls/s": calls} for layer, calls in each.calls_per_s.items()]
        print(f"\n{IDLE}, {each.node}\n{as_table(rows)}\n")
        for name, calls in each.functions.most_common(60):
            print(f"  {calls / IDLE_S:7.2f}  {name.rpartition('/kvstore/')[2] or name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--layers", action="store_true", help="also by layer and by function")
    parser.add_argument("--out", type=path_word, default=Path("reports/budget.json"))
    options = parser.parse_args()
    loads = [load for load in BUDGET if options.only in load.name]
    if not loads and options.only not in IDLE:
        sys.exit(f"budget: no load holds {options.only!r} in its name")
    idle: list[Idleness] = []
    try:
        with running_budget() as budget:
            if options.only in IDLE:
                time.sleep(SETTLE_S)
                idle = budget.idle(IDLE_S)
            costs = [cost for load in loads for cost in budget.measure(load)]
    except ConfigError as error:
        sys.exit(f"budget: {error}")
    if costs:
        print(as_table([cost.row() for cost in costs]))
    if idle:
        print(as_table([each.row() for each in idle]))
    if options.layers:
        for cost in costs:
            _show_layers(cost)
        _show_idle_layers(idle)
    rows = [cost.row() | {"layers": dict(cost.calls)} for cost in costs]
    rows += [each.row() | {"layers": each.calls_per_s} for each in idle]
    keep(options.out, rows)
    if not (all(each.is_within for each in costs) and all(each.is_within for each in idle)):
        sys.exit("a load takes more calls than its budget")


if __name__ == "__main__":
    main()
