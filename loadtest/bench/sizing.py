"""Measure the cost of a number of partitions: memory, processors, load of the metadata store, latencies, restarts.

    python -m loadtest.bench.sizing [--partitions 3,30,100,300] [--keys 100000] [--value-bytes 1000] [--out FILE]

For each number a cluster of three nodes is founded in a scratch folder, each with a replica of every partition.
Measured are: memory, processor time, and size and load of the metadata store without traffic; the maximum memory of a
node while 48 connections put new keys; p99 of SET and GET by redis-benchmark with 50 connections to one node; the time
until others lead all partitions of a killed node, and the load of that on the metadata store; and the time to stop and
start all processes. Times depend on the state of the machine, so compare only rows of one run.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvstore.cli.output import as_table
from kvstore.devcluster.layout import ClusterFile, NodePlace, UpOptions
from kvstore.devcluster.local import LocalCluster
from kvstore.devcluster.zookeeper import four_letters
from kvstore.errors import Unavailable
from kvstore.loadtest.generator.options import path_word
from loadtest.bench import peers
from loadtest.bench.processors import spent_s
from loadtest.bench.redis_lines import Line, run_for
from loadtest.bytes_per_key import Puts, metrics_of, put_all
from loadtest.figures import keep

QUIET_S, SETTLE_MAX_S, PAUSE_S = 12.0, 120.0, 15.0
"""A cluster is at rest when nothing has been written to its metadata store for QUIET_S: after a start, leads first
return to the nodes that the ring prefers. SETTLE_MAX_S is the maximum wait for that, and PAUSE_S the time for which the
cluster at rest is observed."""
START_S, TAKEOVER_S, POLL_S = 600, 120.0, 0.2


def measure(partitions: int, puts: Puts, seconds: float) -> dict[str, Any]:
    """Found a cluster and return its row of figures."""
    row: dict[str, Any] = {"partitions": partitions}
    with peers.scratch() as folder:
        cluster = LocalCluster(folder / "data", lambda text: print(text, file=sys.stderr))
        try:
            file, row["founded_s"] = timed(lambda: founded(cluster, partitions))
            row["settled_s"] = settled(file)
            row |= at_rest(file)
            row |= under_writes(file, puts)
            row |= latencies(file, puts, seconds)
            row |= after_a_kill(file, partitions)
            cluster.down()
            _, row["restart_s"] = timed(lambda: started(cluster))
        finally:
            cluster.down()
    return row


def founded(cluster: LocalCluster, partitions: int) -> ClusterFile:
    """Found the cluster, however long that takes."""
    with suppress(Unavailable):  # not ready after a minute; its processes run on
        return peers.up_on_free_ports(cluster, partitions=partitions)
    cluster.wait_ready(START_S)
    return cluster.load()


def started(cluster: LocalCluster) -> ClusterFile:
    """Start the cluster again, however long that takes."""
    with suppress(Unavailable):
        return cluster.up(UpOptions(data_dir=cluster.data_dir))
    cluster.wait_ready(START_S)
    return cluster.load()


def timed(work: Callable[[], ClusterFile]) -> tuple[ClusterFile, float]:
    began = time.monotonic()
    found = work()
    return found, round(time.monotonic() - began, 1)


def settled(file: ClusterFile) -> float:
    """Wait until the cluster is at rest, or for SETTLE_MAX_S; return how long it took."""
    began = since = time.monotonic()
    writes = -1
    while (now := time.monotonic()) - since < QUIET_S and now - began < SETTLE_MAX_S:
        if (found := _store_counts(file)["writes"]) != writes:
            writes, since = found, now
        time.sleep(POLL_S)
    return round(since - began, 1)


def at_rest(file: ClusterFile) -> dict[str, Any]:
    """Return the memory and processor time of a node and of the metadata store, and the requests to that store."""
    before, began = _counts(file), time.monotonic()
    time.sleep(PAUSE_S)
    after, took = _counts(file), time.monotonic() - began
    spent = {name: (after[name] - before[name]) / took for name in before}
    return {
        "node_mb": _mean(file, "VmRSS"),
        "threads": _mean(file, "Threads", unit=1),
        "node_cpu_percent": round(100 * spent["nodes"] / len(file.nodes), 2),
        "store_cpu_percent": round(100 * spent["store"], 2),
        "znodes": after["znodes"],
        "watches": after["watches"],
        "store_requests_per_s": round(spent["requests"], 1),
        "store_writes_per_s": round(spent["writes"], 2),
    }


def under_writes(file: ClusterFile, puts: Puts) -> dict[str, Any]:
    """Return the maximum memory of any node during writes, and the part of the budget that its engines use then."""
    took = put_all(file, puts)
    numbers = [metrics_of(node.http) for node in file.nodes]
    return {
        "puts_per_s": round(puts.keys / took),
        "node_mb_most": max(_status(node, "VmHWM") for node in file.nodes) // 1000,
        "node_mb_after": _mean(file, "VmRSS"),
        "buffer_mb": round(max(each.get("engine_buffer_bytes", 0) for each in numbers) / 1e6, 1),
        "flushes_for_memory": round(sum(each.get("engine_flushes_for_memory_total", 0) for each in numbers)),
    }


def latencies(file: ClusterFile, puts: Puts, seconds: float) -> dict[str, Any]:
    """Return p50 and p99 of SET and GET of existing keys."""
    found: dict[str, Any] = {}
    for command in ("set", "get"):
        line, endpoint = Line(command, 50, prefix="key:", keys=puts.keys), file.nodes[0].resp
        figure = run_for(line, endpoint, seconds)
        found |= {f"{command}_p50_ms": figure.p50_ms, f"{command}_p99_ms": figure.p99_ms}
    return found


def after_a_kill(file: ClusterFile, partitions: int) -> dict[str, Any]:
    """Return the time until other nodes lead everything, and the requests to the metadata store meanwhile."""
    victim, *others = file.nodes
    led = metrics_of(victim.http)["partition_is_leader"]
    before, began = _store_counts(file), time.monotonic()
    if victim.pid is None:
        raise RuntimeError(f"expected node {victim.id} to run, but it has ended")
    os.kill(victim.pid, signal.SIGKILL)
    while sum(metrics_of(node.http).get("partition_is_leader", 0) for node in others) < partitions:
        if time.monotonic() > began + TAKEOVER_S:
            raise TimeoutError(f"partitions without a leader {TAKEOVER_S} s after node {victim.id} was killed")
        time.sleep(POLL_S)
    took, after = time.monotonic() - began, _store_counts(file)
    return {
        "led_by_killed": round(led),
        "takeover_s": round(took, 1),
        "takeover_store_requests": after["requests"] - before["requests"],
        "takeover_store_writes": after["writes"] - before["writes"],
    }


def _counts(file: ClusterFile) -> dict[str, float]:
    return {
        "nodes": sum(spent_s(node.pid or 0) for node in file.nodes),
        "store": spent_s(file.zookeeper_pid or 0),
        **_store_counts(file),
    }


def _store_counts(file: ClusterFile) -> dict[str, int]:
    address = file.zookeeper.partition("/")[0]
    return store_counts(four_letters(address, "mntr"), four_letters(address, "srvr"))


def store_counts(mntr: str, srvr: str) -> dict[str, int]:
    """Return what a ZooKeeper reports about its size and its requests; `writes` counts its transactions. Raises
    RuntimeError if it does not answer."""
    monitor = dict(re.findall(r"^(zk_\w+)\t(\d+)", mntr, re.MULTILINE))
    last = re.search(r"Zxid: (0x[0-9a-f]+)", srvr)
    if last is None or not monitor:
        raise RuntimeError(f"expected the counts of a ZooKeeper, got {mntr[:80]!r} and {srvr[:80]!r}")
    return {
        "znodes": int(monitor["zk_znode_count"]),
        "watches": int(monitor["zk_watch_count"]),
        "requests": int(monitor["zk_packets_received"]),
        "writes": int(last[1], 16),
    }


def _status(node: NodePlace, name: str) -> int:
    with open(f"/proc/{node.pid}/status") as status:
        found = re.search(rf"^{name}:\s+(\d+)", status.read(), re.MULTILINE)
    return int(found[1]) if found else 0


def _mean(file: ClusterFile, name: str, unit: int = 1000) -> int:
    return round(sum(_status(node, name) for node in file.nodes) / len(file.nodes) / unit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", default="3,30,100,300")
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--value-bytes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--out", type=path_word, default=None)
    words = parser.parse_args()
    puts, rows = Puts(words.keys, words.value_bytes, 16, is_same=False), []
    for count in sorted(map(int, words.partitions.split(","))):
        rows.append(measure(count, puts, words.seconds))
        print(rows[-1], file=sys.stderr, flush=True)
    print(as_table([{"": name, **{str(row["partitions"]): row[name] for row in rows}} for name in rows[0]]))
    keep(words.out, rows)


if __name__ == "__main__":
    main()
