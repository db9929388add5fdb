"""The operations that are sampled, the content of their spans, and that nothing is tracked once they are over."""

from __future__ import annotations

import pytest
from opentelemetry.trace import SpanKind

from kvstore.env.slow_log import hash_of
from kvstore.partition.state.commands import Put
from kvstore.server.tracing import spans
from kvstore.server.tracing.spans import NodeTraces, TakenSpan
from tests.server.tracing.kept import Kept, MovedClock, traces

OP = Put(b"key", b"value")


def begin(found: NodeTraces) -> TakenSpan:
    span = found.begin("op", None, SpanKind.SERVER)
    assert span is not None
    return span


def sampled_of(found: NodeTraces, count: int) -> int:
    taken = 0
    for _ in range(count):
        if found.next_among(1):
            found.pass_over(1)
        else:
            taken += 1
            found.sample("redis", OP)
    return taken


@pytest.mark.parametrize(("ratio", "least", "most"), [(0.0, 0, 0), (1.0, 50_000, 50_000), (0.01, 400, 600)])
def test_sampling_follows_the_ratio(ratio: float, least: int, most: int) -> None:
    found = traces(Kept(), ratio)
    assert least <= sampled_of(found, 50_000) <= most
    found.close()


def test_sampled_operations_per_second_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "PER_SECOND_MAX", 3)
    clock = MovedClock()
    found = traces(Kept(), clock=clock)
    assert [found.sample("redis", OP) is not None for _ in range(5)] == [True] * 3 + [False] * 2
    clock.at += 1.0
    assert found.sample("redis", OP) is not None
    found.close()
    assert (found.statistics()["traces_sampled_total"], found.statistics()["traces_left_out_total"]) == (4, 2)


def test_span_has_dates_and_the_hash_of_its_key() -> None:
    kept, clock = Kept(), MovedClock()
    found = traces(kept, clock=clock)
    span = found.sample("redis", OP)
    assert span is not None
    clock.at += 0.5
    inner = span.child("leader", 1_000.25, operations=3)
    inner.end()
    span.end(error="NotLeader")
    span.end()  # a second time counts for nothing
    found.close()
    (leader,), (front,) = kept.named("leader"), kept.named("redis PUT")
    base = 1_700_000_000 * 10**9
    assert (front.start_time, front.end_time) == (base, base + 500_000_000)
    assert (leader.start_time, leader.end_time) == (base + 250_000_000, base + 500_000_000)
    assert dict(front.attributes or {}) == {"key": hash_of(b"key")}
    assert front.status.description == "NotLeader"
    assert kept.path(leader) == ["redis PUT", "leader"]
    assert found.live == 0


def test_only_sampled_parents_are_served() -> None:
    found = traces(Kept())
    parent = f"00-{'a' * 32}-{'b' * 16}-"
    assert found.serve("peer PUT", parent + "00") is None
    assert found.serve("peer PUT", "garbage") is None
    span = found.serve("peer PUT", parent + "01")
    assert span is not None
    assert span.traceparent.startswith(f"00-{'a' * 32}-")
    found.close()


def test_append_has_a_child_for_each_bookie() -> None:
    kept, clock = Kept(), MovedClock()
    found = traces(kept, clock=clock)
    append = begin(found)
    found.stored(7, 41, "b1")
    clock.at += 0.001
    found.stored(7, 41, "b2")
    found.acknowledged(append, 7, 41, 1_000.0)
    append.end()
    clock.at += 0.01
    assert found.live  # one may still arrive
    found.stored(7, 41, "b3")
    found.close()
    took = {
        str((each.attributes or {})["bookie"]): each.end_time - each.start_time for each in kept.named("bookie add")
    }
    assert {name: round(each / 1e6) for name, each in took.items()} == {"b1": 0, "b2": 1, "b3": 11}
    assert all(kept.path(each) == ["op", "bookie add"] for each in kept.named("bookie add"))


def test_entry_is_dropped_when_its_slowest_bookie_takes_too_long() -> None:
    """Otherwise one sampled write would make the node record the answers of every later write."""
    kept, clock = Kept(), MovedClock()
    found = traces(kept, clock=clock)
    append = begin(found)
    found.stored(7, 41, "b1")
    found.acknowledged(append, 7, 41, 1_000.0)
    append.end()
    for entry in range(42, 50):
        found.stored(7, entry, "b1")
    assert found.live == 1  # the entry; later ones are not kept
    clock.at += spans.LATE_S + 0.1
    found.stored(7, 50, "b1")
    assert found.live == 0
    found.stored(7, 41, "b3")
    found.close()
    assert len(kept.named("bookie add")) == 1


def test_kept_entries_are_bounded() -> None:
    found = traces(Kept())
    begin(found)
    for entry in range(2 * spans.ENTRIES_MAX):
        found.stored(7, entry, "b1")
    assert found.live == 1 + spans.ENTRIES_MAX
    found.close()
