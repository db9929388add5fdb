"""Readers of pinned splits against servers that fail in every way: the result is complete and in order, or an error."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.client import feed as feed_module
from kvstore.client.core.config import ClientConfig
from kvstore.client.feed import FeedReader
from kvstore.client.pinned import pins
from kvstore.client.pinned import read as read_module
from kvstore.client.pinned.pins import PinnedPartition, PinnedStore, Split, pin_store, renew_pin, rotated
from kvstore.client.pinned.read import read_pinned
from kvstore.devcluster.zookeeper import free_port
from kvstore.env.clock import Unjudged
from kvstore.env.library_env import library_env
from kvstore.env.tls import Tls
from kvstore.errors import (
    InvalidRequest,
    NoSuchPin,
    NotAuthenticated,
    NotCaughtUp,
    OutcomeUnknown,
    Overloaded,
    StoreError,
    Unavailable,
)
from kvstore.partition.state import rows
from kvstore.proto import data_pb2, data_pb2_grpc, feed_pb2, feed_pb2_grpc, pinned_page
from kvstore.ring.hashing import MURMUR3
from kvstore.rpc import workers
from kvstore.rpc.login import Login
from kvstore.rpc.status import DETAILS_KEY, details_of
from kvstore.types import EntryId, LedgerId, Position
from tests.beside import beside
from tests.waiting import PATIENCE_S

KEYS = sorted((b"key%d" % number for number in range(40)), key=partial(rows.data_key, MURMUR3))
ROW_KEYS = [rows.data_key(MURMUR3, key) for key in KEYS]
POSITION = Position(LedgerId(3), EntryId(5))
PAGE = 4
NOBODY = "127.0.0.1:9"


class Replica(data_pb2_grpc.DataServicer, feed_pb2_grpc.FeedServicer):
    """Returns pages of four keys, and fails after `good` of them."""

    def __init__(self, threads: ThreadPoolExecutor, port: int = 0) -> None:
        self.good, self.failure = 1_000, StoreError("")
        self.heal = False
        """True to fail only once."""
        self.requests: list[data_pb2.ReadPinnedRequest] = []
        self.logins: list[str] = []
        self.asked: list[str] = []
        """Names of pins."""
        self.clusters: list[str] = []
        """Clusters that requests were meant for."""
        self.pinned = data_pb2.PinResponse(id="x", deadline_ms=1, ring_version=1)
        self._server = grpc.server(threads)
        data_pb2_grpc.add_DataServicer_to_server(self, self._server)
        feed_pb2_grpc.add_FeedServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        self._server.start()

    def fail_after(self, pages: int, failure: StoreError, *, heal: bool = False) -> None:
        self.good, self.failure, self.heal = pages, failure, heal

    def ReadPinned(self, request: data_pb2.ReadPinnedRequest, context: Any) -> Iterator[data_pb2.PinnedPage]:
        self.requests.append(request)
        self.logins += [value for name, value in context.invocation_metadata() if name == "authorization"]
        left = [key for key in ROW_KEYS if key > request.after]
        good = self.good
        for place in range(0, len(left), PAGE):
            if place // PAGE >= good:
                if self.heal:
                    self.good = 1_000
                _abort(context, self.failure)
            keys = left[place : place + PAGE]
            row = rows.encode_record(b"v", 1, 1, 1, 0)
            yield pinned_page.encode(keys, [row] * len(keys), 0, keys[-1], ends=keys[-1] == ROW_KEYS[-1])

    def Pin(self, request: data_pb2.PinRequest, context: Any) -> data_pb2.PinResponse:
        self.asked.append(request.id)
        self.clusters.append(request.cluster)
        if self.good == 0:
            _abort(context, self.failure)
        return self.pinned

    def Renew(self, request: data_pb2.RenewRequest, context: Any) -> data_pb2.RenewResponse:
        self.clusters.append(request.cluster)
        if self.good == 0:
            _abort(context, self.failure)
        return data_pb2.RenewResponse(deadline_ms=7)

    def Positions(self, request: feed_pb2.PositionsRequest, context: Any) -> feed_pb2.PositionsResponse:
        if self.good == 0:
            if self.heal:
                self.good = 1_000
            _abort(context, self.failure)
        return feed_pb2.PositionsResponse()

    def Hold(self, request: feed_pb2.HoldRequest, context: Any) -> feed_pb2.HoldResponse:
        _abort(context, self.failure)
        return feed_pb2.HoldResponse()

    def close(self) -> None:
        self._server.stop(0).wait()


def _abort(context: Any, error: StoreError) -> None:
    code, message, details = details_of(error)
    context.set_trailing_metadata(((DETAILS_KEY, details),))
    context.abort(code, message)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(12) as threads:
        yield threads


@pytest.fixture
def replicas(threads: ThreadPoolExecutor) -> Iterator[list[Replica]]:
    made = [Replica(threads) for _ in range(3)]
    yield made
    for each in made:
        each.close()


class FewLooks(Unjudged):
    """A clock that is past the deadline after some readings: after some rounds through the servers, however long these
    take."""

    def __init__(self) -> None:
        self._left = 12

    def now(self) -> float:
        self._left -= 1
        return 0.0 if self._left >= 0 else 2 * PATIENCE_S

    def wall_ms(self) -> int:
        return 0


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pins, feed_module):
        monkeypatch.setattr(module, "library_env", lambda name: replace(library_env(name), clock=FewLooks()))


class Pages(Replica):
    """Returns pages of a MiB."""

    COUNT = 96

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.given = 0
        super().__init__(threads)

    def ReadPinned(self, request: data_pb2.ReadPinnedRequest, context: Any) -> Iterator[data_pb2.PinnedPage]:
        row = rows.encode_record(bytes(1 << 20), 1, 1, 1, 0)
        for number in range(self.COUNT):
            self.given += 1
            key = b"%06d" % number
            yield pinned_page.encode([key], [row], 0, key, ends=number == self.COUNT - 1)


def split_of(replicas: list[Replica]) -> Split:
    return Split("pin", "p1", POSITION, 0, (1 << 32) - 1, tuple(each.address for each in replicas), 40, 400)


def keys_of(split: Split, **options: Any) -> list[bytes]:
    return [row.key for page in read_pinned(split, **options) for row in page.rows()]


def test_read_sends_its_login(replicas: list[Replica]) -> None:
    login = Login("ann", b"secret")
    assert keys_of(split_of(replicas), login=login) == KEYS
    assert replicas[0].logins == [login.header]


def test_read_asks_only_the_first_replica(replicas: list[Replica]) -> None:
    assert keys_of(split_of(replicas), keys_only=True, prefix=b"k") == KEYS
    (asked,) = replicas[0].requests
    assert (asked.id, asked.partition, asked.ledger, asked.entry) == ("pin", "p1", 3, 5)
    assert (asked.start, asked.end, asked.keys_only) == (b"k", b"l", True)
    assert replicas[1].requests == replicas[2].requests == []


@pytest.mark.parametrize(
    "failure",
    [NoSuchPin("x"), NotCaughtUp("x"), Overloaded("x"), Unavailable("x"), OutcomeUnknown("x"), NotAuthenticated("x")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("pages", [0, 1, 7])
def test_another_replica_continues_behind_the_last_page(
    replicas: list[Replica], failure: StoreError, pages: int
) -> None:
    replicas[0].fail_after(pages, failure)
    assert keys_of(split_of(replicas)) == KEYS
    assert replicas[1].requests[0].after == (ROW_KEYS[pages * PAGE - 1] if pages else b"")


def test_replica_without_the_pin_is_skipped(replicas: list[Replica]) -> None:
    replicas[0].close()
    assert keys_of(split_of(replicas)) == KEYS


def test_replicas_may_fail_repeatedly_while_pages_come(replicas: list[Replica]) -> None:
    for each in replicas:
        each.fail_after(1, Unavailable("x"))
    assert keys_of(split_of(replicas), patience_s=0.01) == KEYS


def test_replica_is_asked_again_when_all_have_failed(replicas: list[Replica]) -> None:
    for each in replicas:
        each.fail_after(0, Unavailable("x"), heal=True)
    assert keys_of(split_of(replicas)) == KEYS


def test_read_fails_at_once_when_no_replica_keeps_the_pin(replicas: list[Replica]) -> None:
    for each in replicas:
        each.fail_after(0, NoSuchPin("gone"))
    with pytest.raises(NoSuchPin, match="gone"):
        keys_of(split_of(replicas), patience_s=1e9)
    assert [len(each.requests) for each in replicas] == [1, 1, 1]


def test_rejected_login_is_final_only_when_all_replicas_reject_it(replicas: list[Replica]) -> None:
    cluster = ClientConfig(endpoints=tuple(each.address for each in replicas), timeout_s=PATIENCE_S)
    replicas[0].fail_after(0, NotAuthenticated("who?"))
    assert renew_pin(cluster, "x", ttl_s=1.0) == 7
    with FeedReader(cluster) as feed:
        assert feed.positions() == []
        for each in replicas:
            each.fail_after(0, NotAuthenticated("who?"))
        for call in (feed.positions, lambda: renew_pin(cluster, "x", ttl_s=1.0), lambda: keys_of(split_of(replicas))):
            with pytest.raises(NotAuthenticated, match="who"):
                call()


def test_read_fails_when_no_replica_answers_for_long(replicas: list[Replica]) -> None:
    for each in replicas:
        each.fail_after(2, Unavailable("busy"))
    pages = read_pinned(split_of(replicas), patience_s=0.3)
    next(pages)
    for each in replicas:
        each.fail_after(0, Unavailable("busy"))
    next(pages)
    with pytest.raises(Unavailable, match="busy"):
        list(pages)


def test_permanent_error_is_not_retried_at_other_replicas(replicas: list[Replica]) -> None:
    replicas[0].fail_after(0, InvalidRequest("wrong"))
    with pytest.raises(InvalidRequest):
        keys_of(split_of(replicas))
    assert replicas[1].requests == []


def test_stream_that_ends_before_the_last_page_is_not_the_end(
    replicas: list[Replica], threads: ThreadPoolExecutor
) -> None:
    whole: Callable[..., Iterator[data_pb2.PinnedPage]] = replicas[0].ReadPinned

    def cut(request: data_pb2.ReadPinnedRequest, context: Any) -> Iterator[data_pb2.PinnedPage]:
        yield next(whole(request, context))

    broken = Replica.__new__(Replica)
    broken.ReadPinned = cut  # type: ignore[method-assign]
    server = grpc.server(threads)
    data_pb2_grpc.add_DataServicer_to_server(broken, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    split = split_of(replicas[1:])
    assert keys_of(Split(**{**_fields(split), "replicas": (address, *split.replicas)})) == KEYS
    server.stop(0).wait()


def test_call_that_begins_too_late_makes_no_method_of_a_closed_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC crashes the process if a method is made for a closed channel."""
    made, begins = list[bool](), list[Callable[[], object]]()

    class Channel:
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

        def method(self, *_: Any, **__: Any) -> Callable[..., None]:
            made.append(self.is_closed)
            return lambda *_, **__: None

        unary_unary = unary_stream = method

    def late(function: Callable[[], object], wait_s: float) -> None:
        """Run the function later: the process was stopped before a thread could run it."""
        begins.append(function)
        raise workers.Late

    monkeypatch.setattr(read_module, "open_channel", lambda *_: Channel())
    monkeypatch.setattr(workers, "run", late)
    with pytest.raises(Unavailable, match="hangs"):
        keys_of(replace(split_of([]), replicas=(NOBODY,)), patience_s=-1.0)
    for begin in begins:
        begin()
    assert made
    assert not any(made)


def test_read_without_replicas_fails() -> None:
    with pytest.raises(NoSuchPin, match="no replica is known"):
        keys_of(split_of([]))


# ── plans ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def partition(name: str, spans: tuple[tuple[int, int], ...], ends: tuple[int, ...] = ()) -> PinnedPartition:
    return PinnedPartition(name, POSITION, 9, 9, spans, ("a:1", "b:1", "c:1"), 90, 900, ends, 1)


def test_splits_cover_a_partition_without_overlap_and_can_be_pickled() -> None:
    store = PinnedStore("pin", 1, 1, (partition("p1", ((10, 50), (70, 99)), (30, 80)), partition("p2", ())), MURMUR3)
    splits = pickle.loads(pickle.dumps(store)).splits()
    assert [(each.partition, each.first, each.last) for each in splits] == [
        ("p1", 10, 30),
        ("p1", 31, 80),
        ("p1", 81, 99),
    ]
    assert [each.rows for each in splits] == [30, 30, 30]


def test_followers_are_asked_in_turn_and_the_leader_last() -> None:
    assert [rotated(("a", "b", "leader"), number) for number in range(3)] == [
        ("a", "b", "leader"),
        ("b", "a", "leader"),
        ("a", "b", "leader"),
    ]
    assert rotated(("leader",), 3) == ("leader",)


def test_pin_is_requested_at_the_next_server_when_the_first_fails(replicas: list[Replica]) -> None:
    replicas[0].fail_after(0, Unavailable("x"))
    replicas[1].pinned.partitions.add(partition="p1", first_tokens=[0], last_tokens=[(1 << 32) - 1])
    cluster = "kv://" + ",".join(each.address for each in replicas)
    assert [each.partition for each in pin_store(cluster, ttl_s=1).partitions] == ["p1"]
    (first,), (second,) = replicas[0].asked, replicas[1].asked
    assert first == second != "", "otherwise the first server, which may have pinned, holds the logs for nothing"


def test_ended_pin_is_reported_although_a_server_is_down(replicas: list[Replica]) -> None:
    """Otherwise nobody would start over: the last error would be that the last server is down."""
    replicas[0].fail_after(0, NoSuchPin("ended"))
    replicas[1].fail_after(0, Unavailable("not led"))
    servers = [NOBODY, replicas[0].address, replicas[1].address, NOBODY]
    with pytest.raises(NoSuchPin, match="ended"):
        renew_pin("kv://" + ",".join(servers), "pin", ttl_s=1)
    assert renew_pin(f"kv://{NOBODY},{replicas[0].address},{replicas[2].address}", "pin", ttl_s=1) == 7


def test_starting_server_is_waited_for(threads: ThreadPoolExecutor) -> None:
    """A refused connection fails at once. With one address, such as a load balancer's, each restart ended all jobs."""
    port, late = free_port(), list[Replica]()
    try:
        with beside(lambda over: (over.wait(0.3), late.append(Replica(threads, port)))):
            assert renew_pin(f"127.0.0.1:{port}", "pin", ttl_s=1, timeout_s=PATIENCE_S) == 7
    finally:
        late[0].close()


def test_refusal_behind_an_unknown_outcome_leaves_it_unknown(replicas: list[Replica]) -> None:
    """The error said that nothing was done, although the first server may have made the pin."""
    replicas[0].fail_after(0, OutcomeUnknown("p1 did not answer"))
    replicas[1].fail_after(0, InvalidRequest("it knows no such request"))
    config = ClientConfig(endpoints=tuple(each.address for each in replicas[:2]))
    with pytest.raises(OutcomeUnknown, match="p1 did not answer"):
        pin_store(config, ttl_s=1, timeout_s=PATIENCE_S)
    with FeedReader(config) as feed, pytest.raises(OutcomeUnknown, match="p1 did not answer"):
        feed.hold("h", {"p1": 0}, 1.0)
    with FeedReader(config) as feed, pytest.raises(InvalidRequest):
        feed.positions()


@pytest.mark.usefixtures("few_rounds")
@pytest.mark.parametrize("turn", [1, -1])
def test_unknown_outcome_counts_more_than_a_rejected_login(replicas: list[Replica], turn: int) -> None:
    """The error said that nothing was done, although the pin may hold the log."""
    replicas[0].fail_after(0, OutcomeUnknown("p1 did not answer"))
    replicas[1].fail_after(0, NotAuthenticated("its table is old"))
    addresses = tuple(each.address for each in replicas[:2])[::turn]
    config = ClientConfig(endpoints=addresses, timeout_s=PATIENCE_S, silence_s=PATIENCE_S)
    with pytest.raises(OutcomeUnknown, match="p1 did not answer"):
        pin_store(config, ttl_s=1, timeout_s=PATIENCE_S)
    with FeedReader(config) as feed, pytest.raises(OutcomeUnknown, match="p1 did not answer"):
        feed.hold("h", {"p1": 0}, 1.0)


@pytest.mark.usefixtures("few_rounds")
@pytest.mark.parametrize("turn", [1, -1])
def test_answer_of_a_server_that_accepts_the_login_counts_more(replicas: list[Replica], turn: int) -> None:
    replicas[0].fail_after(0, Unavailable("p2 is not led"))
    replicas[1].fail_after(0, NotAuthenticated("its table is old"))
    addresses = (*(each.address for each in replicas[:2]), NOBODY)[::turn]
    config = ClientConfig(endpoints=addresses, timeout_s=PATIENCE_S, silence_s=PATIENCE_S)
    with pytest.raises(Unavailable, match="p2 is not led"):
        renew_pin(config, "pin", ttl_s=1, timeout_s=PATIENCE_S)
    with FeedReader(config) as feed, pytest.raises(Unavailable, match="p2 is not led"):
        feed.positions()
    with pytest.raises(NotAuthenticated):
        renew_pin(replace(config, endpoints=(replicas[1].address, NOBODY)), "pin", ttl_s=1, timeout_s=PATIENCE_S)


def test_feed_reader_continues_with_the_present_login(replicas: list[Replica]) -> None:
    with FeedReader(f"kv://{replicas[0].address}") as feed:
        feed.positions()
        replicas[0].fail_after(0, NotAuthenticated("the token has expired"), heal=True)
        feed.positions()
        replicas[0].fail_after(0, NotAuthenticated("the user is removed"))
        with pytest.raises(NotAuthenticated):
            feed.positions()


def test_pin_is_requested_in_the_configured_cluster(replicas: list[Replica]) -> None:
    replicas[0].pinned.partitions.add(partition="p1", first_tokens=[0], last_tokens=[(1 << 32) - 1])
    pin_store(replicas[0].address, ttl_s=1, identity="c1")
    renew_pin(replicas[0].address, "pin", ttl_s=1, identity="c1")
    assert replicas[0].clusters == ["c1", "c1"]


def test_missing_certificate_file_counts_as_an_unreachable_server(tmp_path: Path) -> None:
    """Secrets are rewritten while jobs run, and must not end them."""
    config = ClientConfig(endpoints=(NOBODY,), timeout_s=0.1, tls=Tls(ca=tmp_path / "ca.pem"))
    for call in (
        lambda: renew_pin(config, "pin", ttl_s=1, timeout_s=0.1),
        lambda: keys_of(replace(split_of([]), replicas=(NOBODY,), tls=config.tls), patience_s=0.0),
        lambda: FeedReader(config).positions(),
    ):
        with pytest.raises(Unavailable, match=f"{NOBODY}: .*No such file"):
            call()


def test_pin_without_a_token_is_not_a_pin(replicas: list[Replica]) -> None:
    replicas[0].pinned.partitions.add(partition="p1", first_tokens=[1], last_tokens=[(1 << 32) - 1])
    with pytest.raises(OutcomeUnknown, match="nobody owns tokens 00000000 to 00000000"):
        pin_store(replicas[0].address, ttl_s=1)


def _fields(split: Split) -> dict[str, Any]:
    return {name: getattr(split, name) for name in Split.__slots__}


def test_slow_reader_has_few_pages_buffered(threads: ThreadPoolExecutor) -> None:
    """gRPC would buffer more and more of them."""
    replica, ahead = Pages(threads), 0
    try:
        for number, _ in enumerate(read_pinned(split_of([replica])), 1):
            if number in (32, 56, 80):
                threading.Event().wait(0.5)
            ahead = max(ahead, replica.given - number)
    finally:
        replica.close()
    assert ahead <= 5
