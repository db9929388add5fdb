"""Whether Locust, `kvstore bench` and redis-benchmark say the same of one cluster: `python -m loadtest.agreement`.

All three load the Redis door of one node, Locust and `kvstore bench` also the gRPC door, in turn and at the same load:
a closed loop of as many operations in flight over as many connections, on the same 10,000 evenly drawn keys of 19 bytes
with values of 100. Compared is the median service time, from the send to the receipt: a program in Python also takes
time between two operations, which would count as the store's in a rate or in a time from the intended start.

Every program is run against a server that does next to nothing, too: Redis in memory, and a dictionary behind gRPC.
What it shows there is its own time, OWN MS. APART is how far two programs are apart, LEFT how far beside their own
time. Exit code 1 if both are more than 15 % of the figure at the Redis door; at the other one `kvstore bench` sends
over a stream and Locust call by call, which is not the same to the store. Who asks has a processor, who answers the
others.
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
"""Locust reads what Locust wrote, and judges it: the others write elsewhere, to keys of the same length."""
REDIS, BENCH, LOCUST = "redis-benchmark", "kvstore bench", "locust"


class Load(NamedTuple):
    """What all programs are asked for."""

    command: str
    """`set` or `get`."""
    in_flight: int
    seconds: float


class Figure(NamedTuple):
    p50_ms: float
    per_s: float


class Subject(NamedTuple):
    """Where a node listens. `grpc` empty: it has a Redis door only."""

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
        parser.error("want more than 0 of each")
    if not peers.is_installed("redis-server", "redis-benchmark"):
        sys.exit("agreement: redis-server and redis-benchmark are not installed (Debian: redis-server, redis-tools)")
    with ExitStack() as stack:
        folder = stack.enter_context(peers.scratch())
        stack.enter_context(processors.awake())
        with processors.on(processors.of_answerers()):
            cluster = stack.enter_context(running_cluster(folder / "cluster"))
            redis = f"127.0.0.1:{stack.enter_context(peers.redis(folder / 'redis', is_synced=False))}"
            memory = stack.enter_context(peers.memory_grpc(folder / "memory"))
        node = cluster.local.load().nodes[0]
        stack.enter_context(processors.on(processors.of_askers()))
        rows = [
            row
            for command in WORKLOADS
            for door, idle in (("resp", Subject(redis, "")), ("grpc", Subject("", memory)))
            for row in compare(
                door,
                Load(command, arguments.in_flight, arguments.seconds),
                (Subject(node.resp, node.grpc), idle),
                arguments.rounds,
                folder,
            )
        ]
    print(as_table([_shown(row) for row in rows]))
    sys.exit(any(map(is_too_far, rows)))


def compare(
    door: str, load: Load, subjects: tuple[Subject, Subject], rounds: int, folder: Path
) -> Iterator[dict[str, Any]]:
    """A row for each program. All take turns, and the best round of each counts: what else the machine does only ever
    adds to a time."""
    programs = programs_of(door, folder)
    taken: dict[tuple[str, int], list[Figure]] = {}
    for _ in range(rounds):
        for place, subject in enumerate(subjects):
            for name, program in programs.items():
                taken.setdefault((name, place), []).append(program(subject, load))
                print(f"agreement: {load.command} {door} {name}: {taken[name, place][-1]}", file=sys.stderr)
    yield from judged({"operation": load.command, "door": door}, list(programs), taken)


def judged(
    head: Mapping[str, Any], names: list[str], taken: Mapping[tuple[str, int], list[Figure]]
) -> Iterator[dict[str, Any]]:
    """Each program beside the first one: of the store (0), and of the server that does nothing (1)."""
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
    """Whether figures of the same requests disagree, and the programs' own times do not explain it."""
    return row["door"] == "resp" and bool(min(abs(row["apart"]), abs(row["left"])) > APART_MAX)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    percent = {name: f"{row[name]:+.1%}" for name in ("apart", "left")}
    return {**row, **percent, "": "TOO FAR" if is_too_far(row) else "ok"}


def programs_of(door: str, folder: Path) -> dict[str, Program]:
    """The first is what the others are compared with."""
    locust = lambda subject, load: run_user(door, subject, load, folder)  # noqa: E731
    bench = lambda subject, load: run_bench(door, subject, load)  # noqa: E731
    return {REDIS: redis_benchmark, BENCH: bench, LOCUST: locust} if door == "resp" else {BENCH: bench, LOCUST: locust}


def redis_benchmark(subject: Subject, load: Load) -> Figure:
    line = redis_lines.Line(
        load.command, load.in_flight, value_bytes=VALUE_BYTES, prefix=PREFIXES[load.command], keys=KEYS
    )
    requests = max(100, int(load.seconds * redis_lines.run_line(line, subject.resp, 1000).per_s))
    found = redis_lines.run_line(line, subject.resp, requests)
    return Figure(found.p50_ms, found.per_s)


def run_bench(door: str, subject: Subject, load: Load) -> Figure:
    command = [
        *(sys.executable, "-m", "kvstore", "bench", "run", "--json", "--mix", MIXES[load.command]),
        *("--in-flight", str(load.in_flight), "--seconds", str(load.seconds), "--warmup", "0"),
        *("--keys", str(KEYS), "--prefix", PREFIXES[load.command], "--value-bytes", str(VALUE_BYTES)),
        *(("--resp", subject.resp) if door == "resp" else ("--server", subject.grpc)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    row = json.loads(done.stdout)["latencies"][0]
    return Figure(float(row["service_p50_ms"]), float(row["per_s"]))


def run_user(door: str, subject: Subject, load: Load, folder: Path) -> Figure:
    """Locust. Its users are always late, which makes them a closed loop."""
    report = folder / "agreement.html"
    always_late = 1_000_000.0 / load.in_flight
    store = ("--store", f"kv://{subject.grpc}") if subject.grpc else ()
    options = [
        *("--workload", WORKLOADS[load.command], "--keys", str(KEYS), "--keys-by", "uniform"),
        *("--value-size", str(VALUE_BYTES), "--rate", "1000000", "--rate-per-user", str(always_late)),
        *("--seconds", str(load.seconds), "--warmup", "0"),  # a warm-up would hide all: what is due then
        *("--report", str(report), *store),
        *(("--resp", subject.resp, "RespUser") if door == "resp" else ("GrpcUser",)),
    ]
    code = run_locust([*options, "--data-dir", str(folder)], is_quiet=True)
    if code:
        raise RuntimeError(f"locust ended with {code}")
    total = json.loads(report.with_suffix(".json").read_bytes())["total"]
    return Figure(float(total["service_p50_ms"]), float(total["per_s"]))


if __name__ == "__main__":
    main()
