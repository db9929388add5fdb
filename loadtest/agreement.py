"""Whether Locust, `kvstore bench` and redis-benchmark say the same of one cluster: `python -m loadtest.agreement`.

Each door of a node is loaded by two programs at the same load, closed loop: operations of 100 B on uniformly drawn
keys, as many in flight. redis-benchmark and Locust's RespUser share the Redis door, `kvstore bench run` and Locust's
GrpcUser the gRPC door. Compared is the median time of an operation from its begin: programs in Python also take time
between two operations, which a rate would count as the store's. Exit code 1 if two are further apart than 15 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from kvstore.cli.output import as_table
from kvstore.server.local import LocalCluster
from loadtest import peers, redis_lines
from loadtest.run import run_locust
from tests.cluster.harness import running_cluster

APART_MAX = 0.15
RUNS = 3
KEYS = 10_000
WORKLOADS = {"set": "writes", "get": "ycsb-c"}
MIXES = {"set": "put=100", "get": "get=100"}


class Load(NamedTuple):
    """What all programs are asked for."""

    command: str
    """`set` or `get`."""
    in_flight: int
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run")
    parser.add_argument("--in-flight", type=int, default=1, help="operations under way at a time")
    arguments = parser.parse_args()
    with peers.scratch() as folder, running_cluster(folder) as cluster:
        loads = [Load(command, arguments.in_flight, arguments.seconds) for command in WORKLOADS]
        rows = [row for load in loads for row in compare(cluster.local, load, folder)]
    print(as_table(rows))
    sys.exit(any(abs(row["apart"]) > APART_MAX for row in rows))


def compare(local: LocalCluster, load: Load, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each door; medians of runs that take turns, so that a slow minute of the machine falls on both."""
    doors: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
        "resp": (lambda: redis_benchmark(local, load), lambda: locust(local, load, "RespUser", folder)),
        "grpc": (lambda: bench(local, load), lambda: locust(local, load, "GrpcUser", folder)),
    }
    for door, programs in doors.items():
        taken = [[program() for program in programs] for _ in range(RUNS)]
        plain, of_locust = (median(times) for times in zip(*taken, strict=True))
        names = {"resp": "redis-benchmark", "grpc": "kvstore bench"}
        yield {
            "operation": load.command,
            "door": door,
            "by": names[door],
            "p50_ms": round(plain, 3),
            "locust_p50_ms": round(of_locust, 3),
            "apart": round(of_locust / plain - 1, 3),
        }


def redis_benchmark(local: LocalCluster, load: Load) -> float:
    """Milliseconds."""
    line = redis_lines.Line(load.command, load.in_flight)
    address = local.load().nodes[0].resp
    requests = max(100, int(load.seconds * redis_lines.run_line(line, address, 1000).per_s))
    return redis_lines.run_line(line, address, requests).p50_ms


def bench(local: LocalCluster, load: Load) -> float:
    """Milliseconds."""
    command = [
        *(sys.executable, "-m", "kvstore", "bench", "run", "--json", "--mix", MIXES[load.command]),
        *("--in-flight", str(load.in_flight), "--seconds", str(load.seconds), "--warmup", "0"),
        *("--keys", str(KEYS), "--server", local.load().nodes[0].grpc),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return float(json.loads(done.stdout)["latencies"][0]["p50_ms"])


def locust(local: LocalCluster, load: Load, user: str, folder: Path) -> float:
    """Milliseconds from an operation's actual begin: its users are always late, which makes them a closed loop."""
    node, report = local.load().nodes[0], folder / "agreement.html"
    always_late = 1_000_000.0 / load.in_flight
    code = run_locust(
        local.data_dir,
        [
            *(
                "--workload",
                WORKLOADS[load.command],
                "--keys",
                str(KEYS),
                "--keys-by",
                "uniform",
                "--value-size",
                "100",
            ),
            *("--rate", str(always_late * load.in_flight), "--rate-per-user", str(always_late)),
            *("--seconds", str(load.seconds), "--warmup", "0"),  # a warm-up would hide all: what is due then
            *("--store", f"kv://{node.grpc}", "--resp", node.resp, "--report", str(report), user),
        ],
    )
    if code:
        raise RuntimeError(f"locust ended with {code}")
    return float(json.loads(report.with_suffix(".json").read_bytes())["total"]["service_p50_ms"])


if __name__ == "__main__":
    main()
