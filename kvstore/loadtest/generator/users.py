"""Locust users with a schedule: each operation is due at its own time, and is measured from that time.

A user performs one operation at a time. Operations that become due meanwhile wait, and their waiting counts as latency.
So a run needs enough users that few are busy at once: the rate of one user times the duration of an operation must stay
well below one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import gevent
from locust import User, task

from kvstore.client import Client, Level
from kvstore.errors import StoreError
from kvstore.loadtest.generator.endpoints import Contended, Endpoint, WorkloadEndpoint, WorkloadOperations
from kvstore.loadtest.generator.expectations import Expectations
from kvstore.loadtest.generator.pacing import Arrivals, begins
from kvstore.loadtest.generator.sidecar_client import SidecarClient
from kvstore.loadtest.generator.values import WrongValue
from kvstore.loadtest.generator.workloads import Draws, Keyspace
from kvstore.loadtest.report.recorder import Recorder
from kvstore.loadtest.resp import ReplyError

OVERDUE_MAX = 100_000
"""Maximum number of operations never begun that a user reports when it stops."""


@dataclass(slots=True, kw_only=True)
class RunContext:
    """The state that the users of one process share during a run."""

    client: Client | None
    """The client of custom users; None if there are none."""
    sidecar: SidecarClient | None = None
    """The client of our own users; None if only Redis endpoints are used."""
    resp: Sequence[str]
    level: Level
    draws: Sequence[Draws]
    keyspace: Keyspace
    expectations: Expectations
    recorder: Recorder
    rate_per_user: float
    seed: int
    users: Counter[str] = field(default_factory=Counter)
    """Number of users started, by class."""

    def number(self, kind: str) -> int:
        """Return the number of another user of this class. Workloads, and for each workload nodes, are used in turn."""
        self.users[kind] += 1
        return self.users[kind] - 1


class UserOperations(Protocol):
    """The operations of one user."""

    @property
    def endpoint(self) -> Endpoint: ...
    @property
    def arrivals(self) -> Arrivals: ...
    def draw(self) -> str:
        """Return the name of the next operation."""
        ...

    def perform(self, operation: str) -> int:
        """Perform an operation. Return the number of bytes sent or received."""
        ...


class Timetable:
    """The start times of one user's operations, in wall clock."""

    def __init__(self, begins_at: Iterator[float]) -> None:
        self._begins = begins_at
        self.due = next(begins_at)

    def following(self) -> None:
        self.due = next(self._begins)

    def overdue(self, now: float) -> Iterator[float]:
        """Yield the due times up to now, at most OVERDUE_MAX."""
        for _ in range(OVERDUE_MAX):
            if self.due > now:
                return
            yield self.due
            self.following()


class PacedUser(User):
    """A user that draws operations and performs them through its endpoint when they are due."""

    abstract = True

    def open_endpoint(self, session: RunContext, number: int) -> WorkloadEndpoint:
        """Return the endpoint of a user; `number` counts the users of the class."""
        raise NotImplementedError

    def operations_of(self, session: RunContext, number: int, random: Random) -> UserOperations:
        """Return the operations of this user."""
        draws = session.draws[number % len(session.draws)]
        return WorkloadOperations(self.open_endpoint(session, number), draws, session.keyspace, random)

    def on_start(self) -> None:
        session: RunContext = self.environment.kvstore_session
        kind = type(self).__name__
        number = session.number(kind)
        random = Random(f"{session.seed} {kind} {number}")
        self._recorder = session.recorder
        self._operations = self.operations_of(session, number, random)
        self._free_at = 0.0
        self._timetable = Timetable(begins(self._operations.arrivals, session.rate_per_user, time.time(), random))
        gevent.sleep(self.wait_time())

    def on_stop(self) -> None:
        self._recorder.abandoned(self._timetable.overdue(time.time()))
        self._operations.endpoint.close()

    def wait_time(self) -> float:
        return max(0.0, self._timetable.due - time.time())

    @task
    def operation(self) -> None:
        """Perform one operation, however late."""
        endpoint, operation = self._operations.endpoint, self._operations.draw()
        intended = self._timetable.due
        could_begin = max(intended, self._free_at)
        self._timetable.following()
        endpoint.watch.reset()
        error: Exception | None = None
        length = 0
        try:
            length = self._operations.perform(operation)
            ended = endpoint.watch.received or time.time()
        except (StoreError, ReplyError, Contended, WrongValue, OSError) as failure:
            error, ended = failure, time.time()
        except BaseException:  # the user was killed or is faulty: the operation was due and never done
            self._recorder.abandoned([intended])
            raise
        self._free_at = ended
        sent = endpoint.watch.sent
        self.environment.events.request.fire(
            request_type=endpoint.name,
            name=operation,
            response_time=(ended - intended) * 1000,
            response_length=length,
            exception=error,
            context={
                "intended": intended,
                "ended": ended,
                "service_s": ended - sent,
                "late_s": max(0.0, sent - could_begin),
            },
        )


def record(
    recorder: Recorder,
    *,
    request_type: str,
    name: str,
    response_length: int,
    exception: Exception | None,
    context: dict[str, Any],
    **_: Any,
) -> None:
    """Listen to Locust's `request` event."""
    intended, ended = context["intended"], context["ended"]
    if exception is None:
        recorder.done(
            request_type,
            name,
            intended=intended,
            ended=ended,
            service_s=context["service_s"],
            length=response_length,
            late_s=context["late_s"],
        )
        return
    if isinstance(exception, WrongValue):
        recorder.is_wrong(f"{request_type} {name}: {exception}")
    recorder.failed(request_type, name, kind_of(exception), intended=intended, ended=ended)


def kind_of(error: Exception) -> str:
    """Return the name of the error's class; for the Redis endpoint, also the first word of the error reply."""
    name = type(error).__name__
    return f"{name} {str(error).partition(' ')[0]}" if isinstance(error, ReplyError) else name
