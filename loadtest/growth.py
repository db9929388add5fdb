"""How latencies and a restart grow with the number of keys.

    python -m loadtest.growth [--sizes 100000,1000000,10000000] [--partitions 3] [--seconds 10] [--out FILE]

A three-node cluster is started in a scratch folder and filled to one size after the other, with random values of 100
bytes. At each size redis-benchmark sets and gets existing keys over 50 connections to one node. Then all processes
are stopped and started again. The program reports the time until every partition serves, and the memory and disk
space that the keys take. A busy machine lowers the rates, so compare each size with the first one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvstore.cli.output import as_table
from kvstore.devcluster.layout import ClusterFile, UpOptions
from kvstore.devcluster.local import LocalCluster
from kvstore.loadtest.generator.options import path_word
from loadtest.bench import peers
from loadtest.bench.redis_lines import Line, run_for
from loadtest.bytes_per_key import Puts, memory_mb, metrics_of, put_all
from loadtest.figures import keep


def grow(sizes: Sequence[int], partitions: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Return a row for each size."""
    with peers.kvstore(LocalCluster, partitions=partitions) as (cluster, file):
        there = 0
        for size in sizes:
            took = put_all(file, Puts(size - there, 100, 16, is_same=False, first=there))
            row: dict[str, Any] = {"keys": size, "filled_per_s": round((size - there) / took)}
            there = size
            row |= _latencies(file, size, seconds)
            row["rss_mb"] = round(memory_mb(file)["nodes Rss"])
            row |= _engines(file)
            cluster.down()
            row |= _disk(cluster.data_dir, size)
            began = time.monotonic()
            file = cluster.up(UpOptions(data_dir=cluster.data_dir))
            yield row | {"restart_s": round(time.monotonic() - began, 1)}


def _latencies(cluster: ClusterFile, size: int, seconds: float) -> dict[str, float]:
    found = {}
    for command in ("set", "get"):
        line, endpoint = Line(command, 50, prefix="key:", keys=size), cluster.nodes[0].resp
        figure = run_for(line, endpoint, seconds)
        found[f"{command}_per_s"] = round(figure.per_s)
        found |= {f"{command}_p50_ms": figure.p50_ms, f"{command}_p99_ms": figure.p99_ms}
    return found


def _engines(cluster: ClusterFile) -> dict[str, float]:
    """Return the memory that the engines of all nodes use."""
    numbers = [metrics_of(node.http) for node in cluster.nodes]
    return {
        f"{kind}_mb": round(sum(each[f"engine_{kind}_bytes"] for each in numbers) / 1e6, 1)
        for kind in ("index", "block", "buffer")
    }


def _disk(data_dir: Path, keys: int) -> dict[str, int]:
    """Return the bytes on the disks for each key, three copies together: the files of the states, and the log that
    is kept beside them."""
    states, journals = (_allocated(data_dir, folder) for folder in ("partitions", "bookie"))
    return {"state_bytes_per_key": round(states / keys), "log_bytes_per_key": round(journals / keys)}


def _allocated(data_dir: Path, folder: str) -> int:
    return sum(each.stat().st_blocks * 512 for each in data_dir.glob(f"*/{folder}/**/*") if each.is_file())


def relative(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each row with its p99 as a multiple of that of the first row."""
    return [
        row
        | {f"{each}_p99_times": round(row[f"{each}_p99_ms"] / rows[0][f"{each}_p99_ms"], 2) for each in ("set", "get")}
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="100000,1000000,10000000")
    parser.add_argument("--partitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=path_word, default=None)
    words = parser.parse_args()
    rows = []
    for row in grow(sorted(map(int, words.sizes.split(","))), words.partitions, words.seconds):
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    rows = relative(rows)
    print(as_table(rows))
    keep(words.out, rows)


if __name__ == "__main__":
    main()
