"""Sampled operations between two servers: the trace continues where both trace, and the operation is executed in any
case."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from kvstore.env.ports import Env
from kvstore.env.traces import Traces
from kvstore.errors import InvalidRequest, NotLeader
from kvstore.partition.state.commands import Get, Put
from kvstore.server.peer import traced
from kvstore.server.peer.traced import EXPECT, TRACES, expected
from kvstore.server.tracing.backend import ByRatio, TracedBackend
from kvstore.server.tracing.spans import NodeTraces
from kvstore.types import ServerId
from tests.server.servers import Servers, servers
from tests.server.tracing.kept import Kept, traces
from tests.waiting import PATIENCE_S, wait_until

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


class Traced:
    """n1, which samples everything, and n2, which leads the one partition."""

    def __init__(self, cluster: Servers, found: dict[str, NodeTraces], kept: Kept) -> None:
        self.cluster, self.found, self.kept = cluster, found, kept
        self.n1, self.n2 = cluster["n1"], cluster["n2"]
        self.backend = TracedBackend(self.n1.dispatcher, ByRatio(found["n1"], "redis"))

    async def link(self) -> None:
        """Return once n1 has its link to n2."""
        self.backend.behind.submit((Put(b"first", b""),), self.n1.sink, (0,))
        assert [type(each) for each in await self.n1.sink.wait(0)] == [int]

    def paths(self, name: str) -> list[list[str]]:
        for each in self.found.values():
            each.close()
        return [self.kept.path(each) for each in self.kept.named(name)]


@asynccontextmanager
async def two(root: Path, *traced_ones: str) -> AsyncIterator[Traced]:
    kept, found = Kept(), {}

    def traces_of(name: str, env: Env) -> Traces:
        if name not in traced_ones:
            return Traces()
        found[name] = traces(kept, node=name, clock=env.clock, seed=len(found))
        return found[name]

    try:
        async with servers(root, ["n1", "n2"], traces_of=traces_of) as cluster:
            await cluster.lead("p1", "n2")
            both = Traced(cluster, found, kept)
            await both.link()
            yield both
    finally:
        for each in found.values():
            each.close()


async def test_trace_continues_at_the_leader(tmp_path: Path) -> None:
    async with two(tmp_path, "n1", "n2") as both:
        both.backend.submit((Put(b"k", b"v"),), both.n1.sink, (1,))
        both.backend.submit([Put(b"k", b"w"), Put(b"l", b"w")], both.n1.sink, [2, 3])
        assert [type(each) for each in await both.n1.sink.wait(1, 2, 3)] == [int] * 3
        both.backend.submit((Get(b"k"),), both.n1.sink, (4,))
        assert [each[0] for each in await both.n1.sink.wait(4)] == [b"w"]
        way = ["redis PUT", "link", "peer PUT", "leader", "log append"]
        assert both.paths("log append") == [way] * 3
        assert both.paths("peer GET") == [["redis GET", "link", "peer GET"]]
        assert len({each.context.trace_id for each in both.kept.spans}) == 4
        (connection,) = both.n2.peers._connections.values()
        assert (connection.expected, both.found["n1"].live) == ({}, 0)


async def test_server_without_tracing_executes_announced_operations(tmp_path: Path) -> None:
    """As at a server from before announcements: it replies that nobody leads the partition of traces, and nothing
    reads the reply."""
    async with two(tmp_path, "n1") as both:
        for number in range(1, 20):
            both.backend.submit((Put(b"k", b"%d" % number),), both.n1.sink, (number,))
            assert [type(each) for each in await both.n1.sink.wait(number)] == [int]
        assert both.paths("link") == [["redis PUT", "link"]] * 19
        assert both.n1.links.statistics()["peer_links_lost_total"] == 0


async def test_announcements_of_a_frame_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "ANNOUNCED_MAX", 3)
    async with two(tmp_path, "n1", "n2") as both:
        for number in range(1, 9):
            both.backend.submit((Put(b"k", b"%d" % number),), both.n1.sink, (number,))
        assert [type(each) for each in await both.n1.sink.wait(*range(1, 9))] == [int] * 8
        assert len(both.paths("peer PUT")) == 3


async def test_announcement_without_its_operation_is_dropped(tmp_path: Path) -> None:
    """Otherwise each later frame would look for it."""
    async with two(tmp_path, "n1", "n2") as both:
        body = msgspec.msgpack.encode([[1_000_000, PARENT]])
        await both.n1.links.call(ServerId("n2"), TRACES, EXPECT, body, PATIENCE_S)
        (connection,) = both.n2.peers._connections.values()
        assert connection.expected == {1_000_000: PARENT}
        both.backend.behind.submit((Put(b"k", b"v"),), both.n1.sink, (1,))
        await both.n1.sink.wait(1)
        assert connection.expected == {}


async def test_malformed_announcement_is_refused_and_the_link_stays(tmp_path: Path) -> None:
    async with two(tmp_path, "n1", "n2") as both:
        with pytest.raises(InvalidRequest, match="expected numbers of operations and traceparents"):
            await both.n1.links.call(ServerId("n2"), TRACES, EXPECT, b"\xc1", PATIENCE_S)
        with pytest.raises(NotLeader):
            await both.n2.links.call(ServerId("n1"), "nowhere", EXPECT, b"", PATIENCE_S)  # type: ignore[arg-type]
        both.backend.submit((Put(b"k", b"v"),), both.n1.sink, (1,))
        assert [type(each) for each in await both.n1.sink.wait(1)] == [int]
        assert both.n1.links.statistics()["peer_links_lost_total"] == 0


async def test_span_of_a_refused_forwarded_operation_ends_at_the_server(tmp_path: Path) -> None:
    async with two(tmp_path, "n1", "n2") as both:
        both.n2.hosted[next(iter(both.n2.hosted))].is_up = False
        both.backend.submit((Put(b"k", b"v"),), both.n1.sink, (1,))

        async def was_rejected() -> bool:
            return both.found["n2"].sampled > 0

        await wait_until(was_rejected, what="n2 rejects it")
        await both.cluster.lead("p1", "n1")
        assert [type(each) for each in await both.n1.sink.wait(1)] == [int]
        both.paths("link")
        assert both.kept.named("peer PUT")[0].status.description == "NotLeader"
        assert both.found["n2"].live == 0


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode([[1, 2]]), msgspec.msgpack.encode([[-1, "x"]])])
def test_garbage_is_not_an_announcement(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="expected numbers of operations"):
        expected(body, {})


def test_link_keeps_the_latest_announcements_up_to_a_limit() -> None:
    held: dict[int, str] = {}
    for number in range(traced.EXPECTED_MAX + 10):
        held = expected(msgspec.msgpack.encode([[number, PARENT]]), held)
    assert len(held) == traced.EXPECTED_MAX
    assert min(held) == 10


def test_announcement_of_too_many_operations_is_refused() -> None:
    body = msgspec.msgpack.encode([[number, PARENT] for number in range(traced.ANNOUNCED_MAX + 1)])
    with pytest.raises(InvalidRequest, match="expected numbers of operations"):
        expected(body, {})
