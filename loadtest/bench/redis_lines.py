"""Runs redis-benchmark and reads its lines."""

from __future__ import annotations

import csv
import io
import subprocess
from typing import NamedTuple

KEYS = 1_000_000


class Line(NamedTuple):
    """The options of one run of redis-benchmark."""

    command: str
    """`set` or `get`."""
    connections: int
    value_bytes: int = 100
    pipeline: int = 1
    tag: str = ""
    """Hash tag of all keys, so that they belong to one partition; empty: all partitions."""
    prefix: str = ""
    """Prefix of the keys, followed by twelve digits; empty: the keys of redis-benchmark."""
    keys: int = KEYS


class Figure(NamedTuple):
    per_s: float
    p50_ms: float
    p99_ms: float


def run_line(line: Line, address: str, requests: int) -> Figure:
    """Run redis-benchmark against host:port. Raises RuntimeError with its output."""
    host, _, port = address.rpartition(":")
    command = ["redis-benchmark", "-h", host, "-p", port, "-c", str(line.connections), "-n", str(requests)]
    command += ["-r", str(line.keys), "-P", str(line.pipeline), "--csv", *_what(line)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    if done.returncode or not rows or "WARN" in done.stderr.upper() or "ERR" in done.stderr.upper():
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-300:]!r} {done.stderr[-300:]!r}")
    row = rows[0]
    return Figure(float(row["rps"]), float(row["p50_latency_ms"]), float(row["p99_latency_ms"]))


def run_for(line: Line, address: str, seconds: float) -> Figure:
    """Run redis-benchmark for about `seconds`. Raises RuntimeError with its output."""
    return run_line(line, address, requests_for(line, address, seconds))


def requests_for(line: Line, address: str, seconds: float) -> int:
    """Return the number of requests that take about `seconds`, according to a short run."""
    least = max(2_000, 20 * line.connections * line.pipeline)
    return max(least, int(run_line(line, address, least).per_s * seconds))


def _what(line: Line) -> list[str]:
    prefix = f"{{{line.tag}}}:" if line.tag else line.prefix
    if not prefix:
        return ["-d", str(line.value_bytes), "-t", line.command]
    key = f"{prefix}__rand_int__"
    return ["GET", key] if line.command == "get" else ["SET", key, "x" * line.value_bytes]
