"""Measure the bytes that a key costs on the disks, by writer, and the memory of the nodes.

    python -m loadtest.bytes_per_key [--keys 200000] [--value-bytes 100] [--pipeline 16] [--same] [--out FILE]

A three-node cluster runs in a scratch folder, and distinct keys are put through the Redis listeners of all its nodes.
Then the program waits until every state is on its disk and nothing is written. The kernel counts the bytes of each
process (/proc/PID/io). It counts pages when they become dirty, whenever they reach the disk, so a page that is written
in two syncs counts twice. The nodes' metrics and the engines' own logs show the writer. One page is added for each
group that a journal syncs, because a group begins and ends within pages; the remainder is small files. Values are
random bytes, which cannot be compressed; with `--same`, one repeated byte.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.request import urlopen

from kvstore.cli.output import as_table
from kvstore.devcluster.layout import ClusterFile, NodePlace
from kvstore.devcluster.local import LocalCluster
from kvstore.loadtest.generator.options import path_word
from kvstore.loadtest.generator.resp_wire import load_records
from loadtest.bench import peers
from loadtest.figures import keep

QUIET_S, POLL_S, SETTLE_S = 10.0, 1.0, 300.0
"""Seconds without writes after which the cluster is quiet; seconds between two checks; maximum seconds to wait."""
CONNECTIONS_EACH = 16
"""Number of connections to each node."""
QUIET_BYTES = 256 << 10
"""Maximum bytes that logs and marks write by themselves in that time."""
ALL, SYNCS = "all", "syncs"
PAGE_BYTES = 4096
_EVENT = re.compile(r"EVENT_LOG_v1 (\{.*\})")
_METRIC = re.compile(r"^kvstore_(\w+?)(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


class Puts(NamedTuple):
    """The keys and values to put."""

    keys: int
    value_bytes: int
    pipeline: int
    is_same: bool
    first: int = 0
    """Number of the first key."""


def put_all(cluster: ClusterFile, puts: Puts) -> float:
    """Put every key once, and return how long it took in seconds. Raises Unavailable if a key is refused."""
    endpoints = [node.resp for node in cluster.nodes for _ in range(CONNECTIONS_EACH)]
    began = time.monotonic()
    with ThreadPoolExecutor(len(endpoints)) as threads:
        list(threads.map(lambda place: _put_some(endpoints, place, puts), range(len(endpoints))))
    return time.monotonic() - began


def _put_some(endpoints: list[str], place: int, puts: Puts) -> None:
    mine, random = range(puts.first + place, puts.first + puts.keys, len(endpoints)), Random(place)
    load_records(
        endpoints[place],
        (
            {b"key:%012d" % number: _value(random, puts) for number in mine[at : at + puts.pipeline]}
            for at in range(0, len(mine), puts.pipeline)
        ),
    )


def _value(random: Random, puts: Puts) -> bytes:
    return b"x" * puts.value_bytes if puts.is_same else random.randbytes(puts.value_bytes)


def written(cluster: ClusterFile, data_dir: Path) -> Counter[str]:
    """Return the bytes written so far by all nodes, by the writer, and the number of syncs of journals."""
    found: Counter[str] = Counter()
    for node in cluster.nodes:
        io = _lines_of(f"/proc/{node.pid}/io")
        found[ALL] += io["write_bytes"] - io["cancelled_write_bytes"]
        metrics = metrics_of(node.http)
        found["journal: records"] += int(metrics["bookie_synced_bytes_total"])
        found["journal: zeroes ahead"] += int(metrics["bookie_filled_bytes_total"])
        found[SYNCS] += int(metrics["bookie_syncs_total"])
    for path in data_dir.rglob("bookie/index/*"):
        found["indexes of full segments"] += path.stat().st_size
    for path in data_dir.rglob("engine/LOG*"):
        text = path.read_text(errors="replace")
        found["engine: its own log"] += len(text)
        found.update(tables_in(text))
    return found


def tables_in(log: str) -> Counter[str]:
    """Return the bytes of the table files that an engine's log names, by the job that made them."""
    found: Counter[str] = Counter()
    jobs: dict[int, str] = {}
    for text in _EVENT.findall(log):
        event = json.loads(text)
        match event["event"]:
            case "flush_started":
                jobs[event["job"]] = "engine: flushes"
            case "compaction_started":
                jobs[event["job"]] = "engine: compaction"
            case "table_file_creation":
                found[jobs.get(event["job"], "engine: flushes")] += event["file_size"]
    return found


def metrics_of(http: str) -> dict[str, float]:
    """Return a node's metrics without their prefix. Metrics of several partitions are added up."""
    with urlopen(f"http://{http}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for name, value in _METRIC.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def wait_quiet(cluster: ClusterFile) -> None:
    """Return when all states are on their disks and nothing is written any more. Raises TimeoutError."""
    until = time.monotonic() + SETTLE_S
    seen, since = -1, time.monotonic()
    while (now := time.monotonic()) - since < QUIET_S:
        if now > until:
            raise TimeoutError(f"still written to after {SETTLE_S} s")
        time.sleep(POLL_S)
        io = sum(_lines_of(f"/proc/{node.pid}/io")["write_bytes"] for node in cluster.nodes)
        if io - seen > QUIET_BYTES or not all(map(_is_synced, cluster.nodes)):
            seen, since = io, time.monotonic()


def _is_synced(node: NodePlace) -> bool:
    metrics = metrics_of(node.http)
    return metrics["partition_durable_seq"] == metrics["partition_seq"]


def memory_mb(cluster: ClusterFile) -> dict[str, float]:
    """Return the megabytes of the nodes and of ZooKeeper: their proportional share, and their resident memory."""
    pids = [*(node.pid for node in cluster.nodes), cluster.zookeeper_pid]
    each = [_lines_of(f"/proc/{pid}/smaps_rollup") for pid in pids]
    found = {}
    for kind in ("Pss", "Rss"):
        found[f"nodes {kind}"] = sum(lines[kind] for lines in each[:-1]) / 1e3
        found[f"ZooKeeper {kind}"] = each[-1][kind] / 1e3
    return found


def _lines_of(path: str) -> dict[str, int]:
    """Return the lines `name: number` of a file of /proc."""
    pairs = (line.split()[:2] for line in Path(path).read_text().splitlines() if ": " in line)
    return {name.rstrip(":"): int(number) for name, number in pairs if number.isdigit()}


def run(puts: Puts) -> dict[str, Any]:
    """Measure, print the figures, and return them."""
    with peers.kvstore(LocalCluster) as (cluster, file):
        wait_quiet(file)
        resting, before = memory_mb(file), written(file, cluster.data_dir)
        seconds = put_all(file, puts)
        wait_quiet(file)
        spent = written(file, cluster.data_dir) - before
        after = memory_mb(file)
    syncs = spent.pop(SYNCS)
    spent["journal: whole pages around groups"] = syncs * PAGE_BYTES
    rest = spent[ALL] - sum(size for what, size in spent.items() if what != ALL)
    per_key = {what: round(size / puts.keys, 1) for what, size in sorted(spent.items())}
    per_key["rest"] = round(rest / puts.keys, 1)
    found: dict[str, Any] = {
        "puts": puts._asdict(),
        "bytes_per_key": per_key,
        "keys_per_s": round(puts.keys / seconds),
        "bytes_per_sync": round(spent["journal: records"] / max(1, syncs)),
        "memory_mb_at_rest": resting,
        "memory_mb_after": after,
    }
    print(as_table([{"written by": what, "bytes per key, all nodes": size} for what, size in per_key.items()]))
    print(f"{found['keys_per_s']:,} keys/s, {found['bytes_per_sync']:,} bytes of records per sync")
    print(
        as_table([{"MB": when, **{k: round(v, 1) for k, v in found[when].items()}} for when in found if "mb" in when])
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=200_000)
    parser.add_argument("--value-bytes", type=int, default=100)
    parser.add_argument("--pipeline", type=int, default=16)
    parser.add_argument("--same", action="store_true")
    parser.add_argument("--out", type=path_word, default=None)
    words = parser.parse_args()
    keep(words.out, run(Puts(words.keys, words.value_bytes, words.pipeline, words.same)))


if __name__ == "__main__":
    main()
