"""Slow and sampled transactions: where their time went (docs/how-to/find-slow-operations.md)."""

from __future__ import annotations

from kvstore.env.slow_log import hash_of
from kvstore.env.traces import TraceSpan
from kvstore.partition.leading.traced import TracedSink
from kvstore.partition.state.commands import Prepare, Put, Result, Sink
from tests.partition.several_partitions import Several, transact


class Span(TraceSpan):
    """A span that keeps its children."""

    traceparent = ""

    def __init__(self, name: str, **attributes: str | int) -> None:
        self.name, self.attributes = name, attributes
        self.began_s = 0.0
        self.children: list[Span] = []
        self.errors: list[str] = []
        """The error of each end of the span."""

    def child(self, name: str, began_s: float | None = None, **attributes: str | int) -> Span:
        self.children.append(Span(name, **attributes))
        return self.children[-1]

    def end(self, ended_s: float | None = None, error: str = "") -> None:
        self.errors.append(error)


class Unread(Sink):
    def complete(self, token: int, result: Result | Exception) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""


def test_slow_transaction_reports_time_until_prepared_and_decided() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    home, participant = s.partitions
    home.wait(0.06)
    participant.acknowledge()
    home.wait(0.07)
    home.acknowledge()
    (found,) = [each for each in home.slow.latest() if each.operation == "transaction"]
    assert (found.at, found.key, found.partition, found.operations) == ("leader", hash_of(a), "p1", 2)
    assert {name: round(part, 2) for name, part in found.parts.items()} == {"prepare": 0.06, "decide": 0.07}


def test_transaction_that_is_dropped_after_long_is_slow() -> None:
    s = Several()
    s.holds = lambda op: op.__class__ is Prepare
    s.submit(transact(Put(s.key(0), b"1"), Put(s.key(1), b"2")))
    s.wait(2.1)
    (found,) = [each for each in s.partitions[0].slow.latest() if each.operation == "transaction"]
    assert {name: round(part, 1) for name, part in found.parts.items()} == {"prepare": 2.0, "decide": 0.0}


def test_quick_transaction_is_not_slow() -> None:
    s = Several()
    s.do(transact(Put(s.key(0), b"1"), Put(s.key(1), b"2")))
    assert s.partitions[0].slow.latest() == []


def test_sampled_transaction_has_a_span_for_each_step() -> None:
    s = Several(3)
    span = Span("TRANSACT")
    op = transact(Put(s.key(0), b"1"), Put(s.key(1), b"2"), Put(s.key(2), b"3"))
    s.partitions[0].leader.submit((op,), TracedSink(Unread(), span), (1,))
    s.run()
    steps = [(each.name, each.attributes["partition"]) for each in span.children if each.name in ("prepare", "decide")]
    assert steps == [("prepare", "p2"), ("prepare", "p3"), ("decide", "p1")]
    assert all(each.errors == [""] for each in span.children)
