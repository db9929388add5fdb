"""Check that Locust, `kvstore bench` and redis-benchmark agree about one cluster: `python -m loadtest.agreement`.

All three load the Redis listener of one node; Locust and `kvstore bench` also load the gRPC listener. They run in turn
with the same closed loop: as many operations in flight, as many connections, the same 10,000 evenly drawn keys of 19
bytes with values of 100 bytes. The median service time is compared, from the send to the receipt. A program in Python
also takes time between two operations, which a rate or a time from the intended start would count as the store's.

Every program also runs against a server that does almost nothing: Redis in memory, and a dictionary behind gRPC. The
result there is the program's own time, OWN MS. APART is the difference of two programs, LEFT the difference without
their own times. The exit code is 1 if both exceed 15 % of the figure at the Redis listener. At the gRPC listener
`kvstore bench` uses a stream and Locust single calls, which is different work for the store. The client has one
processor, the servers have the others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.cli.output import as_table
from kvstore.loadtest.run import run_locust
from loadtest.bench import peers, processors, redis_lines
from tests.cluster.harness import running_cluster

APART_MAX = 0.15
KEYS, VALUE_BYTES = 10_000, 100
WORKLOADS = {"set": "writes", "get": "ycsb-c"}
MIXES = {"set": "put=1", "get": "get=1"}
PREFIXES = {"set": "misc/r/", "get": "load/r/"}
"""Keys of the other programs have the same length as Locust's, but are not Locust's, because Locust checks the
values that it reads."""
REDIS, BENCH, LOCUST = "redis-benchmark", "kvstore bench", "locust"


class Load(NamedTuple):
    """The load that all programs make."""

    command: str
    """`set` or `get`."""
    in_flight: int
    seconds: float


class Figure(NamedTuple):
    p50_ms: float
    per_s: float


class Subject(NamedTuple):
    """A node's addresses. `grpc` is empty for a server with only a Redis listener."""

    resp: str
    grpc: str


Program = Callable[[Subject, Load], Figure]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    parser.add_argument("--in-flight", type=int, default=1, help="operations under way at a time")
    parser.add_argument("--rounds", type=int, default=3, help="in which every program runs once")
    arguments = parser.parse_args()
    if arguments.seconds <= 0 or arguments.in_flight < 1 or arguments.rounds < 1:
        parser.error("expected more than 0 of each")
    if not peers.is_installed("redis-server", "redis-benchmark"):
        sys.exit("agreement: redis-server and redis-benchmark are not installed (Debian: redis-server, redis-tools)")
    with ExitStack() as stack:
        folder = stack.enter_context(peers.scratch())
        stack.enter_context(processors.awake())
        with processors.on(processors.of_answerers()):
            cluster = stack.enter_context(running_cluster(folder / "cluster"))
            redis = stack.enter_context(peers.redis(folder / "redis", is_synced=False)).addresses[0]
            memory = stack.enter_context(peers.memory_grpc(folder / "memory"))
        node = cluster.local.load().nodes[0]
        stack.enter_context(processors.on(processors.of_askers()))
        rows = [
            row
            for command in WORKLOADS
            for endpoint, idle in (("resp", Subject(redis, "")), ("grpc", Subject("", memory)))
            for row in compare(
                endpoint,
                Load(command, arguments.in_flight, arguments.seconds),
                (Subject(node.resp, node.grpc), idle),
                arguments.rounds,
                folder,
            )
        ]
    print(as_table([_shown(row) for row in rows]))
    sys.exit(any(map(is_too_far, rows)))


def compare(
    endpoint: str, load: Load, subjects: tuple[Subject, Subject], rounds: int, folder: Path
) -> Iterator[dict[str, Any]]:
    """Return a row for each program. All take turns, and the best round of each counts, because other work of the
    machine only adds time."""
    programs = programs_of(endpoint, folder)
    taken: dict[tuple[str, int], list[Figure]] = {}
    for _ in range(rounds):
        for place, subject in enumerate(subjects):
            for name, program in programs.items():
                taken.setdefault((name, place), []).append(program(subject, load))
                print(f"agreement: {load.command} {endpoint} {name}: {taken[name, place][-1]}", file=sys.stderr)
    yield from judged({"operation": load.command, "endpoint": endpoint}, list(programs), taken)


def judged(
    head: Mapping[str, Any], names: list[str], taken: Mapping[tuple[str, int], list[Figure]]
) -> Iterator[dict[str, Any]]:
    """Compare each program with the first one: at the store (0), and at the server that does nothing (1)."""
    p50 = {key: min(figure.p50_ms for figure in figures) for key, figures in taken.items()}
    first = names[0]
    for name in names:
        beyond = p50[name, 0] - p50[name, 1], p50[first, 0] - p50[first, 1]
        yield {
            **head,
            "by": name,
            "p50_ms": round(p50[name, 0], 3),
            "per_s": round(max(figure.per_s for figure in taken[name, 0])),
            "own_ms": round(p50[name, 1], 3),
            "apart": round(p50[name, 0] / p50[first, 0] - 1, 3),
            "left": round((beyond[0] - beyond[1]) / p50[first, 0], 3),
        }


def is_too_far(row: Mapping[str, Any]) -> bool:
    """Return True if figures of the same requests disagree by more than the programs' own times explain."""
    return row["endpoint"] == "resp" and bool(min(abs(row["apart"]), abs(row["left"])) > APART_MAX)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    percent = {name: f"{row[name]:+.1%}" for name in ("apart", "left")}
    return {**row, **percent, "": "TOO FAR" if is_too_far(row) else "ok"}


def programs_of(endpoint: str, folder: Path) -> dict[str, Program]:
    """Return the programs. The others are compared with the first."""
    locust = lambda subject, load: run_user(endpoint, subject, load, folder)  # noqa: E731
    bench = lambda subject, load: run_bench(endpoint, subject, load)  # noqa: E731
    return (
        {REDIS: redis_benchmark, BENCH: bench, LOCUST: locust} if endpoint == "resp" else {BENCH: bench, LOCUST: locust}
    )


def redis_benchmark(subject: Subject, load: Load) -> Figure:
    line = redis_lines.Line(
        load.command, load.in_flight, value_bytes=VALUE_BYTES, prefix=PREFIXES[load.command], keys=KEYS
    )
    found = redis_lines.run_for(line, subject.resp, load.seconds)
    return Figure(found.p50_ms, found.per_s)


def run_bench(endpoint: str, subject: Subject, load: Load) -> Figure:
    command = [
        *(sys.executable, "-m", "kvstore", "bench", "run", "--json", "--mix", MIXES[load.command]),
        *("--in-flight", str(load.in_flight), "--seconds", str(load.seconds), "--warmup", "0"),
        *("--keys", str(KEYS), "--prefix", PREFIXES[load.command], "--value-bytes", str(VALUE_BYTES)),
        *(("--resp", subject.resp) if endpoint == "resp" else ("--server", subject.grpc)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    row = json.loads(done.stdout)["latencies"][0]
    return Figure(float(row["service_p50_ms"]), float(row["per_s"]))


def run_user(endpoint: str, subject: Subject, load: Load, folder: Path) -> Figure:
    """Run Locust. Its users are always late, which makes them a closed loop."""
    report = folder / "agreement.html"
    always_late = 1_000_000.0 / load.in_flight
    store = ("--store", f"kv://{subject.grpc}") if subject.grpc else ()
    options = [
        *("--workload", WORKLOADS[load.command], "--keys", str(KEYS), "--keys-by", "uniform"),
        *("--value-size", str(VALUE_BYTES), "--rate", "1000000", "--rate-per-user", str(always_late)),
        *("--seconds", str(load.seconds), "--warmup", "0"),  # a warm-up would hide all: what is due then
        *("--report", str(report), *store),
        *(("--resp", subject.resp, "RespUser") if endpoint == "resp" else ("GrpcUser",)),
    ]
    code = run_locust([*options, "--data-dir", str(folder)], is_quiet=True)
    if code:
        raise RuntimeError(f"locust ended with {code}")
    total = json.loads(report.with_suffix(".json").read_bytes())["total"]
    return Figure(float(total["service_p50_ms"]), float(total["per_s"]))


if __name__ == "__main__":
    main()
