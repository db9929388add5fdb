"""Wrong options are refused before anything runs, all at once; right ones travel to workers as plain values."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path

import msgspec
import pytest

from kvstore.client import Level
from loadtest.options import Options, add_options, options_of
from loadtest.pacing import BURSTS, EVEN, POISSON


def parsed(*words: str) -> Options:
    parser = ArgumentParser()
    add_options(parser)
    values = parser.parse_args(words)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(vars(values))) == vars(values), "workers get them as msgpack"
    return options_of(values)


def test_without_options_there_are_defaults() -> None:
    assert parsed() == Options()


def test_options_are_what_was_given() -> None:
    given = parsed(
        "--rate", "50", "--no-preload", "--level", "stale", "--workload", "cas,scans", "--baseline", "b.json"
    )
    assert (given.rate, given.preload, given.read_level, given.baseline) == (50.0, False, Level.STALE, Path("b.json"))
    assert [each.name for each in given.workloads] == ["cas", "scans"]


def test_the_knee_is_looked_for_with_even_begins_and_bursts_stay_bursts() -> None:
    found = [each.arrivals for each in parsed("--shape", "knee", "--workload", "ycsb-a,write-bursts").workloads]
    assert found == [EVEN, BURSTS]
    assert parsed("--workload", "ycsb-a").workloads[0].arrivals == POISSON


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"--rate: .*--keys: .*--warmup: .*--shape: .*--level: "):
        parsed("--rate", "0", "--keys", "-1", "--warmup", "99", "--shape", "round", "--level", "any")


def test_a_local_cluster_tells_its_doors(tmp_path: Path) -> None:
    nodes = [{"id": "n1", "grpc": "127.0.0.1:1", "resp": "127.0.0.1:2"}, {"id": "n2", "grpc": "a:3", "resp": "a:4"}]
    (tmp_path / "cluster.json").write_text(json.dumps({"nodes": nodes}))
    given = parsed("--data-dir", str(tmp_path))
    assert given.client_config().endpoints == ("127.0.0.1:1", "a:3")
    assert given.resp_nodes() == ["127.0.0.1:2", "a:4"]


def test_another_cluster_has_the_doors_that_are_named() -> None:
    given = parsed("--store", "kv://a:1", "--resp", "a:2,b:2")
    assert given.client_config().endpoints == ("a:1",)
    assert given.resp_nodes() == ["a:2", "b:2"]
    assert parsed("--store", "kv://a:1").resp_nodes() == []


def test_no_cluster_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kvstore up"):
        parsed("--data-dir", str(tmp_path)).client_config()
