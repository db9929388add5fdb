"""Wrong options are refused together before anything runs; right ones reach workers as plain values."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.client import Level
from kvstore.loadtest.generator.options import Options, add_options, options_of
from kvstore.loadtest.generator.pacing import BURSTS, EVEN, POISSON


def parsed(*words: str) -> Options:
    parser = ArgumentParser()
    add_options(parser)
    values = parser.parse_args(words)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(vars(values))) == vars(values), "workers get them as msgpack"
    return options_of(values)


def with_option(name: str, number: str) -> Options:
    values: dict[str, Any] = {name.replace("-", "_"): float(number)}
    return Options(**values)


def test_without_options_there_are_defaults() -> None:
    assert parsed() == Options()


def test_options_keep_the_given_values() -> None:
    given = parsed(
        "--rate", "50", "--no-preload", "--level", "stale", "--workload", "cas,scans", "--baseline", "b.json"
    )
    assert (given.rate, given.preload, given.read_level, given.baseline) == (50.0, False, Level.STALE, Path("b.json"))
    assert [each.name for each in given.workloads] == ["cas", "scans"]


def test_knee_is_looked_for_with_even_begins_and_bursts_stay_bursts() -> None:
    found = [each.arrivals for each in parsed("--shape", "knee", "--workload", "ycsb-a,write-bursts").workloads]
    assert found == [EVEN, BURSTS]
    assert parsed("--workload", "ycsb-a").workloads[0].arrivals == POISSON


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"--rate: .*--keys: .*--warmup: .*--shape: .*--level: "):
        parsed("--rate", "0", "--keys", "-1", "--warmup", "99", "--shape", "round", "--level", "any")


@pytest.mark.parametrize("name", ["errors-max", "achieved-min"])
@pytest.mark.parametrize("given", ["5", "-0.1", "nan", "inf"])
def test_share_is_between_none_and_all(name: str, given: str) -> None:
    """5 would be 500 %: such a run could never fail, and with nan neither."""
    with pytest.raises(ValueError, match=f"--{name}: expected 0 to 1, got {given}"):
        with_option(name, given)


@pytest.mark.parametrize("name", ["rate", "rate-per-user", "seconds", "warmup"])
@pytest.mark.parametrize("given", ["inf", "nan"])
def test_number_is_finite(name: str, given: str) -> None:
    with pytest.raises(ValueError, match=f"--{name}: expected .*got {given}"):
        with_option(name, given)


@pytest.mark.parametrize(
    ("name", "given"), [("rate", 1e9), ("keys", 10**9), ("resp", "localhost"), ("resp", "a:1,"), ("resp", "a:99999")]
)
def test_options_that_fail_during_a_run_are_refused_before_it(name: str, given: Any) -> None:
    values: dict[str, Any] = {name: given}
    with pytest.raises(ValueError, match=f"--{name}: .*got"):
        Options(**values)


@pytest.mark.parametrize("given", ["x.json", "", "."])
def test_report_and_its_figures_need_different_paths(given: str) -> None:
    with pytest.raises(ValueError, match="--report: expected an HTML file"):
        parsed("--report", given)


def test_paths_are_checked_before_a_run_and_no_file_is_left(tmp_path: Path) -> None:
    baseline = tmp_path / "baseline.json"
    baseline.write_text("{}")
    given = parsed("--report", str(tmp_path / "new" / "x.html"), "--baseline", str(baseline))
    given.check_paths()
    assert list((tmp_path / "new").iterdir()) == []


def test_earlier_report_stays_until_there_is_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "x.html").write_text("as it was")
    parsed("--report", str(tmp_path / "x.html")).check_paths()
    assert (tmp_path / "x.html").read_text() == "as it was"


def test_report_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    with pytest.raises(ValueError, match=r"--report: cannot write .*x\.json: Is a directory"):
        parsed("--report", str(tmp_path / "x.html")).check_paths()


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_unreadable_baseline_is_reported_with_a_remedy(text: str | None, tmp_path: Path) -> None:
    baseline = tmp_path / "baseline.json"
    if text is not None:
        baseline.write_text(text)
    with pytest.raises(ValueError, match=r"--baseline: .*baseline\.json.*pass --baseline '' to compare with none"):
        parsed("--report", str(tmp_path / "x.html"), "--baseline", str(baseline)).check_paths()


def test_pulse_is_taken_on_the_disk_of_a_local_store(tmp_path: Path) -> None:
    local = ("--data-dir", str(tmp_path))
    assert parsed(*local).pulse_folder == tmp_path
    assert parsed(*local, "--store", "kv://a:1").pulse_folder == Path("reports")
    assert parsed("--data-dir", str(tmp_path / "none")).pulse_folder == Path("reports")


def test_local_cluster_lists_its_endpoints(tmp_path: Path) -> None:
    nodes = [{"id": "n1", "grpc": "127.0.0.1:1", "resp": "127.0.0.1:2"}, {"id": "n2", "grpc": "a:3", "resp": "a:4"}]
    (tmp_path / "cluster.json").write_text(json.dumps({"nodes": nodes}))
    given = parsed("--data-dir", str(tmp_path))
    assert given.client_config().endpoints == ("127.0.0.1:1", "a:3")
    assert given.resp_nodes() == ["127.0.0.1:2", "a:4"]


def test_connection_options_of_a_secure_cluster_are_used(tmp_path: Path) -> None:
    """The endpoint is not called without TLS for the duration of a run."""
    (tmp_path / "cluster.json").write_text(json.dumps({"nodes": [], "secure": True}))
    for read in (Options.client_config, Options.resp_nodes):
        with pytest.raises(ValueError, match=r"is secure; run `. client.env`, name GrpcUser, .* --store 'kvs://"):
            read(parsed("--data-dir", str(tmp_path)))


def test_another_cluster_has_the_named_endpoints() -> None:
    given = parsed("--store", "kv://a:1", "--resp", "a:2,b:2")
    assert given.client_config().endpoints == ("a:1",)
    assert given.resp_nodes() == ["a:2", "b:2"]
    assert parsed("--store", "kv://a:1").resp_nodes() == []


@pytest.mark.parametrize("option", ["--store", "--resp"])
@pytest.mark.parametrize("address", ["kv://anna:hidden@h:7401", "anna:hidden@h:1", "kv://anna:hi/dden@h:7401"])
def test_no_password_is_in_the_report(option: str, address: str) -> None:
    with pytest.raises(ValueError, match=f"{option}: expected no user or password here") as refused:
        parsed(option, address)
    assert "hi" not in str(refused.value).replace("whi", "").replace("this", "").replace("here", "")


def test_missing_cluster_is_reported_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kvstore up"):
        parsed("--data-dir", str(tmp_path)).client_config()
