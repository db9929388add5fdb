"""Operations that take too long on another server are notified of their end."""

from __future__ import annotations

from typing import Any

from kvstore.partition.state.commands import Get, Put
from kvstore.server.routing.flight import Flight
from kvstore.server.routing.overdue import CHECKED_MAX, KNOWN_MAX, Overdue, OverdueOperation
from kvstore.server.routing.pending import Pending
from kvstore.server.routing.redirects import WAIT_S
from kvstore.types import PartitionId, ServerId

P0, N1 = PartitionId("p0"), ServerId("n1")
LIMIT_S = 0.1
GET, PUT = Get(b"a"), Put(b"b", b"1")
NOBODY: Any = None


def pending(order: int, op: Any = GET, deadline: float = 0.0) -> Pending:
    return Pending(order, op, NOBODY, order, deadline=deadline)


def test_timely_operation_is_not_reported() -> None:
    overdue, flight = Overdue(LIMIT_S), Flight(N1, 10)
    for step in range(10):
        number = flight.begin(P0, pending(step))
        assert overdue.check(step / 4, {N1: flight}, {}) == []
        flight.end(number)
    assert overdue.check(9.0, {N1: flight}, {}) == []


def test_overdue_operation_is_reported_once_with_minimum_duration() -> None:
    overdue, flight = Overdue(LIMIT_S), Flight(N1, 10)
    number = flight.begin(P0, pending(1, PUT))
    told = [overdue.check(at, {N1: flight}, {}) for at in (1.0, 1.25, 1.5, 1.75)]
    assert told == [[], [], [], []]
    flight.end(number)
    assert overdue.check(2.0, {N1: flight}, {}) == [OverdueOperation("link", P0, PUT, 1.0)]
    assert overdue.check(2.25, {N1: flight}, {}) == []


def test_later_operations_count_from_the_first_check() -> None:
    overdue, flight = Overdue(LIMIT_S), Flight(N1, 10)
    old = flight.begin(P0, pending(1))
    overdue.check(1.0, {N1: flight}, {})
    new = flight.begin(P0, pending(2, PUT))
    overdue.check(1.05, {N1: flight}, {})
    overdue.check(1.12, {N1: flight}, {})
    flight.end(new)
    assert overdue.check(1.14, {N1: flight}, {}) == [], "it was there for 90 ms at most"
    flight.end(old)
    assert overdue.check(1.2, {N1: flight}, {}) == [OverdueOperation("link", P0, GET, 1.0)]


def test_reopened_link_restarts_its_numbers() -> None:
    overdue, first, second = Overdue(LIMIT_S), Flight(N1, 10), Flight(N1, 10)
    first.begin(P0, pending(1))
    overdue.check(1.0, {N1: first}, {})
    overdue.check(1.25, {N1: first}, {})
    second.begin(P0, pending(2, PUT))
    assert overdue.check(1.5, {N1: second}, {}) == [OverdueOperation("link", P0, GET, 1.0)]
    assert overdue.check(1.55, {N1: second}, {}) == []


def test_operation_waiting_for_a_leader_counts_from_arrival() -> None:
    overdue = Overdue(LIMIT_S)
    line = [pending(1, PUT, 5.0 + WAIT_S), pending(2, GET, 5.2 + WAIT_S)]
    assert overdue.check(5.25, {}, {P0: line}) == []
    assert overdue.check(5.26, {}, {P0: line[1:]}) == [OverdueOperation("waiting", P0, PUT, 5.0)]
    assert overdue.check(5.27, {}, {}) == []


def test_only_oldest_operations_are_tracked() -> None:
    overdue, flights = Overdue(LIMIT_S), {}
    for server in range(20):
        flight = flights[ServerId(f"n{server}")] = Flight(ServerId(f"n{server}"), 1_000)
        for order in range(3 * CHECKED_MAX):
            flight.begin(P0, pending(order))
    overdue.check(1.0, flights, {})
    overdue.check(1.25, flights, {})
    assert len(overdue._known) == KNOWN_MAX
    assert len(overdue.check(1.5, {}, {})) == KNOWN_MAX
