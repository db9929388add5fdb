"""Users of a store that answers after half a second, for a second; prints what was recorded.

A process of its own: Locust patches the standard library for gevent, which no other test should meet.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import gevent
from locust.env import Environment

from kvstore.client import Level
from loadtest.doors import Stopwatch
from loadtest.expectations import Expectations
from loadtest.recorder import Recorder
from loadtest.users import PacedUser, Session, record
from loadtest.values import WrongValue
from loadtest.workloads import Draws, Keyspace, workloads_of

ANSWER_S, RUN_S, PER_S = 0.5, 1.2, 10.0


class SlowDoor:
    """Every second read is wrong."""

    name = "slow"

    def __init__(self) -> None:
        self._reads = 0
        self.watch = Stopwatch()

    def read(self, key: bytes) -> int:
        self.watch.sends()
        gevent.sleep(ANSWER_S)
        self.watch.hears()
        self._reads += 1
        if self._reads % 2 == 0:
            raise WrongValue(f"{key!r} is not what it was")
        return 1

    def close(self) -> None:
        pass


class SlowUser(PacedUser):
    def open_door(self, session: Session, number: int) -> Any:
        return SlowDoor()


def main() -> None:
    recorder = Recorder()
    environment = Environment(user_classes=[SlowUser], stop_timeout=5)
    environment.kvstore_session = Session(
        client=None,
        resp=[],
        level=Level.LINEARIZABLE,
        draws=[Draws(workload, 10) for workload in workloads_of("ycsb-c")],
        keyspace=Keyspace(b"p/", 10, 1),
        expectations=Expectations(1),
        recorder=recorder,
        rate_per_user=PER_S,
        seed=1,
    )
    environment.events.request.add_listener(partial(record, recorder))
    runner = environment.create_local_runner()
    runner.start(1, 1)
    gevent.sleep(RUN_S)
    runner.quit()
    tally = recorder.tallies["slow", "read"]
    figures = {
        "due": sum(cell.due for cell in recorder.cells.values()),
        "done": tally.responses.get_total_count(),
        "response_max_ms": tally.responses.get_max_value() / 1000,
        "service_max_ms": tally.services.get_max_value() / 1000,
        "errors": tally.errors,
        "wrong": recorder.wrong,
        "error_counts": [[*key, count] for key, count in recorder.error_counts.items()],
    }
    sys.stdout.write(json.dumps(figures))


if __name__ == "__main__":
    main()
