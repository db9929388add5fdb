"""Measure the gain and cost of striping: rates, and the delay until the other replicas show a single write.

    python -m loadtest.bench.striping [--quorums 3/3/2,5/3/2] [--nodes 5] [--seconds 4] [--turns 2] [--out FILE]

For each ensemble/write/ack in turn, a cluster runs in a scratch folder. redis-benchmark sends SETs and GETs of 100
bytes over 50 connections to one node. "Shown" is the time from sending a single SET to that node until a GET on a
READONLY connection to each of the other nodes returns its value: the median and the 99th percentile over all other
nodes, including the leader if it is one of them. On one machine all nodes share its disk and processors, so more
bookies are not more disks, and only the ratios between lines are meaningful.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median, quantiles
from typing import Any

from kvstore.cli.output import as_table
from kvstore.config import Setting
from kvstore.devcluster.layout import ClusterFile
from kvstore.devcluster.local import LocalCluster
from kvstore.loadtest.generator.endpoints import Stopwatch
from kvstore.loadtest.generator.options import path_word
from kvstore.loadtest.generator.resp_wire import BlockingRespConnection
from kvstore.types import Quorum
from loadtest.bench import peers
from loadtest.bench.redis_lines import Line, run_for
from loadtest.figures import keep

SINGLE_SETS = 200
SHOWN_S_MAX = 10.0
LINES = {
    "set_c50": Line("set", 50, prefix="key:", keys=100_000),
    "get_c50": Line("get", 50, prefix="key:", keys=100_000),
    "set_c50_p16": Line("set", 50, pipeline=16, prefix="key:", keys=100_000),
}


def measure(quorum: Quorum, nodes: int, seconds: float) -> dict[str, Any]:
    """Return a row of the table, measured on its own cluster."""
    names = ("ensemble", "write", "ack")
    settings = tuple(Setting(f"log.quorum.{name}", getattr(quorum, name)) for name in names)
    with peers.kvstore(LocalCluster, nodes=nodes, replicas=nodes, settings=settings) as (_, file):
        row: dict[str, Any] = {"quorum": f"{quorum.ensemble}/{quorum.write}/{quorum.ack}"}
        row |= _single(file)
        for name, line in LINES.items():
            row[name] = round(run_for(line, file.nodes[0].resp, seconds).per_s)
        return row


def _single(file: ClusterFile) -> dict[str, float]:
    """Return the milliseconds of single SETs until they are answered, and until every other node shows them."""
    endpoints = [
        BlockingRespConnection(node.resp, Stopwatch(), connect_s=SHOWN_S_MAX, patience_s=SHOWN_S_MAX)
        for node in file.nodes
    ]
    for endpoint in endpoints[1:]:
        endpoint.ask(b"READONLY")
    took: list[float] = []
    shown: list[float] = []
    for number in range(SINGLE_SETS):
        began = time.perf_counter()
        endpoints[0].ask(b"SET", b"lone", b"%d" % number)
        took.append(1000 * (time.perf_counter() - began))
        shown += (1000 * each for each in _until_shown(endpoints[1:], b"%d" % number, began))
    for endpoint in endpoints:
        endpoint.close()
    return {
        "set_c1_ms": round(median(took), 2),
        "shown_p50_ms": round(median(shown), 2),
        "shown_p99_ms": round(quantiles(shown, n=100)[98], 2),
        "shown_max_ms": round(max(shown), 1),
    }


def _until_shown(endpoints: Sequence[BlockingRespConnection], wanted: bytes, began: float) -> Iterator[float]:
    """Yield, for each connection, the seconds from `began` until a GET returns the value `wanted`."""
    waiting = list(endpoints)
    while waiting:
        for endpoint in list(waiting):
            is_shown, passed = endpoint.ask(b"GET", b"lone") == wanted, time.perf_counter() - began
            if is_shown:
                waiting.remove(endpoint)
                yield passed
            elif passed > SHOWN_S_MAX:
                raise RuntimeError(f"a replica does not show a write {SHOWN_S_MAX} s after it")


def quorum_of(text: str) -> Quorum:
    """Parse `5/3/2`."""
    ensemble, write, ack = map(int, text.split("/"))
    return Quorum(ensemble, write, ack)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quorums", default="3/3/2,5/3/2")
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=path_word, default=None)
    words = parser.parse_args()
    rows = []
    for _ in range(words.turns):
        for quorum in map(quorum_of, words.quorums.split(",")):
            rows.append(measure(quorum, words.nodes, words.seconds))
            print(rows[-1], file=sys.stderr, flush=True)
    print(as_table(rows))
    keep(words.out, rows)


if __name__ == "__main__":
    main()
