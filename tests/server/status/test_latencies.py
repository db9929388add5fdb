"""Latencies of the last minute, computed from histograms that count since the start."""

from __future__ import annotations

from kvstore.env.histogram import Histogram
from kvstore.server.status.latencies import KEEP_S, UNIT_S, WITHIN_S, RecentLatencies


def tables() -> dict[str, dict[str, Histogram]]:
    return {
        "resp_command_s": {name: Histogram(UNIT_S) for name in ("GET", "SET", "DEL")},
        "grpc_call_s": {name: Histogram(UNIT_S) for name in ("Get", "Session")},
        "http_request_s": {name: Histogram(UNIT_S) for name in ("get", "put")},
    }


def test_latencies_cover_only_the_last_minute() -> None:
    recent, found = RecentLatencies(), tables()
    found["resp_command_s"]["GET"].add(1.0)
    assert recent.take(found, 100.0) == []
    found["resp_command_s"]["GET"].add(0.5)
    assert [each.p99_s for each in recent.take(found, 105.0)] == [0.524288]
    for number in range(1, 20):
        found["resp_command_s"]["GET"].add(0.0001)
        last = recent.take(found, 105.0 + number * KEEP_S)
    [latency] = last
    assert (latency.operation, latency.p50_s, latency.p99_s) == ("get", 0.000128, 0.000128)
    assert WITHIN_S <= latency.within_s < WITHIN_S + KEEP_S
    assert 6 <= latency.timed <= 7


def test_latencies_add_up_endpoints_and_quantiles_are_bounds() -> None:
    recent, found = RecentLatencies(), tables()
    recent.take(found, 0.0)
    for _ in range(98):
        found["resp_command_s"]["GET"].add(0.0003)
    for _ in range(2):
        found["grpc_call_s"]["Get"].add(0.1)
    found["resp_command_s"]["SET"].add(0.002)
    found["grpc_call_s"]["Session"].add(0.003)
    found["http_request_s"]["get"].add(0.0003)
    found["http_request_s"]["put"].add(0.002)
    told = {each.operation: each for each in recent.take(found, 5.0)}
    assert (told["get"].p50_s, told["get"].p99_s, told["get"].timed) == (0.000512, 0.131072, 101)
    assert (told["put"].p50_s, told["put"].timed, told["session"].p50_s) == (0.002048, 2, 0.004096)


def test_node_without_endpoints_has_no_latencies() -> None:
    recent = RecentLatencies()
    assert [recent.take({}, now) for now in (0.0, 20.0)] == [[], []]
