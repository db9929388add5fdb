"""Values that no request can carry are refused like the reader's other errors, before a server is asked. Of several
errors the one that a server gave is raised."""

from __future__ import annotations

from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata

from kvstore.client import FeedReader
from kvstore.errors import InvalidRequest, OutcomeUnknown, Unavailable
from kvstore.proto import feed_pb2
from tests.waiting import PATIENCE_S

NOBODY = "kv://127.0.0.1:9?timeout=1ms"


@pytest.mark.parametrize("wrong", [-1, 1 << 63, 1 << 64, "7", 1.5, None, True])
def test_impossible_position_is_refused(wrong: Any) -> None:
    with FeedReader(NOBODY) as feed:
        for given in ({"after": wrong}, {"after": 0, "until": wrong}):
            with pytest.raises(InvalidRequest, match=f"from 0 to {(1 << 63) - 1}, got {wrong!r}"):
                feed.changes("p1", **given)
        with pytest.raises(InvalidRequest, match=f"positions` as .*, got 'p1': {wrong!r}"):
            feed.hold("h", {"p1": wrong}, 1.0)


def test_partition_that_is_not_text_is_refused() -> None:
    numbered: Any = {1: 7}
    with FeedReader(NOBODY) as feed, pytest.raises(InvalidRequest, match="got 1: 7"):
        feed.hold("h", numbered, 1.0)


@pytest.mark.parametrize("name", ["rows_max", "bytes_max", "wait_ms"])
@pytest.mark.parametrize("wrong", [-1, 1 << 32, 0.5])
def test_bound_that_cannot_be_sent_is_refused(name: str, wrong: Any) -> None:
    with FeedReader(NOBODY) as feed, pytest.raises(InvalidRequest, match=f"expected `{name}` to be .*, got {wrong!r}"):
        feed.changes("p1", 0, **{name: wrong})


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), 1e30])
def test_hold_for_an_impossible_time_is_refused(wrong: float) -> None:
    with FeedReader(NOBODY) as feed, pytest.raises(InvalidRequest, match="expected `ttl_s` to be 0 or more"):
        feed.hold("h", {"p1": 0}, wrong)


def test_answer_of_another_cluster_counts_more_than_a_late_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([feed_pb2.PositionsResponse(cluster="theirs")])

    class Stub:
        def Positions(self, request: feed_pb2.PositionsRequest, timeout: float) -> feed_pb2.PositionsResponse:
            for each in answers:
                return each
            raise AioRpcError(StatusCode.DEADLINE_EXCEEDED, Metadata(), Metadata(), "out of time")

    stub = Stub()
    monkeypatch.setattr(FeedReader, "_stub", lambda *_: stub)
    with (
        FeedReader("kv://127.0.0.1:9?timeout=300ms", "ours") as feed,
        pytest.raises(Unavailable, match="'theirs' is another cluster: expected a server of 'ours'"),
    ):
        feed.positions()


def test_hold_in_flight_stays_unknown_when_the_reader_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_of = FeedReader._stub

    class Stub:
        def Hold(self, request: feed_pb2.HoldRequest, timeout: float) -> feed_pb2.HoldResponse:
            monkeypatch.setattr(FeedReader, "_stub", stub_of)
            feed.close()
            raise AioRpcError(StatusCode.CANCELLED, Metadata(), Metadata(), "Channel closed!")

    stub = Stub()
    monkeypatch.setattr(FeedReader, "_stub", lambda *_: stub)
    feed = FeedReader(f"kv://127.0.0.1:9?timeout={PATIENCE_S:g}s")
    with pytest.raises(OutcomeUnknown):
        feed.hold("h", {"p1": 7}, 60.0)
