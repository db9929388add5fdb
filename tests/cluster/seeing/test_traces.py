"""Traces of three real nodes at a real collector: one write, from the endpoint down to the bookies."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.request import Request, urlopen

import grpc
import pytest

from kvstore.proto import kv_pb2, kv_pb2_grpc
from tests.cluster.harness import Cluster, running_cluster
from tests.collector import Collector, Seen, collecting
from tests.waiting import wait_until_blocking

pytestmark = [pytest.mark.cluster]
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"
BOOKIES = 3


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Collector]]:
    """Nodes that sample every operation."""
    with collecting() as (collector, endpoint):
        settings = (f"tracing.endpoint={endpoint}", "tracing.sample_ratio=1")
        with running_cluster(tmp_path_factory.mktemp("traces"), partitions=1, settings=settings) as cluster:
            yield cluster, collector


def wait_spans(collector: Collector, trace: str, *, named: str, count: int) -> list[Seen]:
    found: list[Seen] = []

    def are_there() -> bool:
        found[:] = [each for each in collector.trace(trace) if each.name == named]
        return len(found) >= count

    wait_until_blocking(are_there, what=f"{count} spans {named!r}")
    return found


def test_forwarded_write_is_one_trace_down_to_the_bookies(traced: tuple[Cluster, Collector]) -> None:
    cluster, collector = traced
    (leader,) = cluster.wait_led().values()
    follower = next(node for node in cluster.ids if node != leader)
    with cluster.redis(follower) as client:
        client.set(b"customers/4711", b"secret value")

    def roots() -> list[Seen]:
        return [each for each in collector.spans if each.name == "redis PUT" and each.node == follower]

    wait_until_blocking(roots, what="the span of the endpoint")
    (root,) = roots()
    bookies = wait_spans(collector, root.trace, named="bookie add", count=BOOKIES)
    wait_until_blocking(lambda: "?" not in collector.path(bookies[0]), what="all spans above it")
    way = [f"{follower} redis PUT", f"{follower} link"]
    way += [f"{leader} {name}" for name in ("peer PUT", "leader", "log append", "bookie add")]
    assert [collector.path(each) for each in bookies] == [way] * BOOKIES
    assert len({each.attributes["bookie"] for each in bookies}) == BOOKIES
    assert len(collector.trace(root.trace)) == len(way) - 1 + BOOKIES
    assert all(each.began_ns <= each.ended_ns and not each.error for each in collector.trace(root.trace))
    assert "customers" not in repr(collector.spans)
    assert "secret" not in repr(collector.spans)


def test_trace_keeps_the_parent_of_a_grpc_call(traced: tuple[Cluster, Collector]) -> None:
    cluster, collector = traced
    (leader,) = cluster.wait_led().values()
    with grpc.insecure_channel("{}:{}".format(*cluster.address(leader, "grpc"))) as channel:
        stub = kv_pb2_grpc.KVStub(channel)
        stub.Put(kv_pb2.PutRequest(key=b"k", value=b"v"), metadata=[("traceparent", TRACEPARENT)], timeout=60)
        for flags in ("00", "01"):  # the first is said not to be sampled, and is not, whatever the ratio
            other = f"00-{'a' * 31}{flags[1]}-{SPAN}-{flags}"
            stub.Get(kv_pb2.GetRequest(key=b"k"), metadata=[("traceparent", other)], timeout=60)
    bookies = wait_spans(collector, TRACE, named="bookie add", count=BOOKIES)
    (call,) = wait_spans(collector, TRACE, named="kvstore.v1.KV/Put", count=1)
    assert call.parent == SPAN
    names = ("kvstore.v1.KV/Put", "PUT", "leader", "log append", "bookie add")
    assert collector.path(bookies[0]) == ["?", *(f"{leader} {name}" for name in names)]
    wait_spans(collector, f"{'a' * 31}1", named="GET", count=1)
    assert collector.trace(f"{'a' * 31}0") == []


def test_trace_keeps_the_parent_of_an_http_request(traced: tuple[Cluster, Collector]) -> None:
    cluster, collector = traced
    host, port = cluster.address("n1", "http")
    trace = "b" * 32
    headers = {"traceparent": f"00-{trace}-{SPAN}-01"}
    with urlopen(Request(f"http://{host}:{port}/healthz", headers=headers), timeout=60) as answer:
        assert answer.read() == b"ok\n"
    (found,) = wait_spans(collector, trace, named="GET /healthz", count=1)
    assert (found.node, found.parent) == ("n1", SPAN)


def test_nodes_count_sampled_and_sent_traces(traced: tuple[Cluster, Collector]) -> None:
    cluster, _ = traced

    def sent() -> float:
        lines = cluster.http("n1", "/metrics").decode().splitlines()
        return sum(
            float(each.split()[1]) for each in lines if each.startswith("kvstore_server_traces_spans_exported_total")
        )

    wait_until_blocking(lambda: sent() > 0, what="spans that n1 has sent")
