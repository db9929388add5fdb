"""Users of a store that answers after half a second, for three of them; and users that are started by hand. Prints
their results.

It is a separate process: Locust patches the standard library for gevent, which must not affect other tests.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

import gevent
from gevent.event import Event
from locust.env import Environment

from kvstore.client import Client, Level
from kvstore.loadtest.generator.endpoints import Stopwatch
from kvstore.loadtest.generator.expectations import Expectations
from kvstore.loadtest.generator.grpc_user import GrpcUser
from kvstore.loadtest.generator.resp_user import RespUser
from kvstore.loadtest.generator.users import PacedUser, RunContext, record
from kvstore.loadtest.generator.values import WrongValue
from kvstore.loadtest.generator.workloads import Draws, Keyspace, workloads_of
from kvstore.loadtest.report.recorder import Recorder

ANSWER_S, PER_S, OPERATIONS = 0.5, 10.0, 3
SILENT_S = 0.3
HOG_S = 0.2
FOR_EVER_S = 600.0


class SlowEndpoint:
    """Returns a wrong value for every second read."""

    name = "slow"

    def __init__(self) -> None:
        self._reads = 0
        self.watch = Stopwatch()

    def read(self, key: bytes) -> int:
        self.watch.mark_sent()
        gevent.sleep(ANSWER_S)  # the store's answer takes this long
        self.watch.mark_received()
        self._reads += 1
        if self._reads % 2 == 0:
            raise WrongValue(f"{key!r} is not what it was")
        return 1

    def close(self) -> None:
        pass


class SlowUser(PacedUser):
    def open_endpoint(self, session: RunContext, number: int) -> Any:
        return SlowEndpoint()


class SilentEndpoint:
    """Its first read receives an answer; later ones receive nothing and fail."""

    name = "silent"

    def __init__(self, silent_s: float) -> None:
        self.watch, self._silent_s = Stopwatch(), silent_s
        self.begun = Event()

    def read(self, key: bytes) -> int:
        self.watch.mark_sent()
        self.watch.mark_received()
        self.begun.set()
        gevent.sleep(self._silent_s)  # the store is silent
        raise OSError("nothing was received")

    def close(self) -> None:
        pass


class SilentUser(PacedUser):
    silent_s = SILENT_S

    def open_endpoint(self, session: RunContext, number: int) -> Any:
        return SilentEndpoint(self.silent_s)


class WaitingUser(SilentUser):
    silent_s = FOR_EVER_S


def environment_of(recorder: Recorder, *, workloads: str = "ycsb-c", per_s: float = 1_000.0) -> Environment:
    environment = Environment(user_classes=[SlowUser], stop_timeout=5)
    vars(environment)["kvstore_session"] = RunContext(
        client=Client("kv://127.0.0.1:9"),  # never opened
        resp=["a:1", "b:1", "c:1"],
        level=Level.LINEARIZABLE,
        draws=[Draws(workload, 10) for workload in workloads_of(workloads)],
        keyspace=Keyspace(b"p/", 10, 1),
        expectations=Expectations(1),
        recorder=recorder,
        rate_per_user=per_s,
        seed=1,
    )
    return environment


def stalled() -> dict[str, Any]:
    """Return the records of one user."""
    recorder = Recorder()
    environment = environment_of(recorder, per_s=PER_S)
    environment.events.request.add_listener(partial(record, recorder))
    late_s: list[float] = []
    are_done = Event()

    def note(context: dict[str, float], **_: Any) -> None:
        late_s.append(context["late_s"])
        if len(late_s) == OPERATIONS:
            are_done.set()

    environment.events.request.add_listener(note)
    runner = environment.create_local_runner()
    runner.start(1, 1)
    are_done.wait()
    runner.quit()
    tally = recorder.tallies["slow", "read"]
    return {
        "due": sum(cell.due for cell in recorder.cells.values()),
        "done": tally.responses.get_total_count(),
        "response_max_ms": tally.responses.get_max_value() / 1000,
        "service_max_ms": tally.services.get_max_value() / 1000,
        "late_min_ms": min(late_s[1:]) * 1000,  # of those that waited; the machine may delay one
        "errors": tally.errors,
        "wrong": recorder.wrong,
        "error_counts": [[*key, count] for key, count in recorder.error_counts.items()],
    }


def started() -> dict[str, Any]:
    """Return the workload and the first node of each user, and the first number that it draws."""
    environment = environment_of(Recorder(), workloads="ycsb-a,ycsb-b,ycsb-c")
    kinds: dict[str, type[PacedUser]] = {"grpc": GrpcUser, "resp": RespUser}
    found: dict[str, Any] = {kind: [] for kind in kinds}
    drawn = []
    for _ in range(9):
        for name, kind in kinds.items():
            user = kind(environment)
            user.on_start()
            operations: Any = user._operations
            found[name].append([operations._draws.workload.name, getattr(operations.endpoint, "_next", None)])
            drawn.append(operations._random.random())
    return found | {"drawn": drawn}


def silent_user(recorder: Recorder, kind: type[SilentUser] = SilentUser) -> SilentUser:
    user = kind(environment_of(recorder))
    user.on_start()
    return user


def killed() -> dict[str, int]:
    """Return the records of an operation whose user was killed."""
    recorder = Recorder()
    user = silent_user(recorder, WaitingUser)
    endpoint = user._operations.endpoint
    assert isinstance(endpoint, SilentEndpoint)
    operation = gevent.spawn(user.operation)
    endpoint.begun.wait()
    operation.kill()
    cells = recorder.cells.values()
    return {name: sum(getattr(cell, name) for cell in cells) for name in ("due", "done", "errors")}


class HoggedUser(SlowUser):
    """Another thread of the process uses the processor when the operation is due."""

    def operation(self) -> None:
        until = time.time() + HOG_S
        while time.time() < until:
            pass
        super().operation()


def late_of_a_hogged_one_ms() -> float:
    recorder = Recorder()
    environment = environment_of(recorder)
    environment.events.request.add_listener(partial(record, recorder))
    user = HoggedUser(environment)
    user.on_start()
    user.operation()
    return float(recorder.late.get_max_value() / 1000)


def failed_after_s() -> float:
    user = silent_user(Recorder())
    found: dict[str, float] = {}
    user.environment.events.request.add_listener(lambda context, **_: found.update(context))
    user.operation()
    return found["ended"] - found["intended"]


if __name__ == "__main__":
    figures = stalled() | started() | {"killed": killed(), "failed_after_s": failed_after_s()}
    figures["hogged_late_ms"] = late_of_a_hogged_one_ms()
    sys.stdout.write(json.dumps(figures))
