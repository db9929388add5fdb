"""What `locust -f loadtest/locustfile.py` runs: users of both doors, one shape, and the wiring of a run.

    locust -f loadtest/locustfile.py --headless --workload ycsb-b --rate 1000 --seconds 60 [GrpcUser] [RespUser]

See README.md beside this file. Exit codes: 0 as it must be, 1 not so (the report and the last lines say why), 2 wrong
usage or no cluster.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
"""Read once, when gRPC is imported. With fork support one in fifteen of the commands of a chaos run died at birth."""

import sys
import time
from argparse import ArgumentParser
from collections.abc import Mapping
from functools import partial
from random import SystemRandom
from typing import Any

import locust.runners
import locust.stats
from grpc.experimental import gevent as grpc_gevent
from locust import LoadTestShape, events
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from kvstore.client import Client
from kvstore.errors import StoreError
from loadtest.conductor import Conductor
from loadtest.expectations import Expectations
from loadtest.grpc_user import GrpcUser
from loadtest.options import Options, add_options, options_of
from loadtest.recorder import Recorder
from loadtest.resp_user import RespUser
from loadtest.users import Session, record
from loadtest.workloads import Draws, Keyspace

__all__ = ["GrpcUser", "RespUser", "TargetShape"]

grpc_gevent.init_gevent()
locust.runners.WORKER_REPORT_INTERVAL = 1.0  # the timeline is drawn by the second
locust.stats.bucket_response_time = lambda response_time: round(response_time, 1)
STOP_S = 10.0
"""A user that is told to stop finishes its operation: one that was torn away might hold others up."""
KEY = "kvstore"
"""Of our part in what workers report."""


class TargetShape(LoadTestShape):
    """Asks the run's conductor how many users there should be."""

    abstract = False

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        conductor: Conductor = self.runner.environment.kvstore_conductor
        if isinstance(self.runner, MasterRunner):
            conductor.note_workers(self.runner.worker_count)
        return conductor.target(time.time(), self.runner.user_count)


@events.init_command_line_parser.add_listener
def on_parser(parser: ArgumentParser) -> None:
    add_options(parser)


@events.init.add_listener
def on_init(environment: Environment, **_: Any) -> None:
    environment.stop_timeout = max(environment.stop_timeout or 0.0, STOP_S)
    environment.kvstore_recorder = recorder = Recorder()
    environment.events.request.add_listener(partial(record, recorder))
    if isinstance(environment.runner, WorkerRunner):
        _report_to_master(environment)
        return
    try:
        options = options_of(environment.parsed_options)
        for workload in options.workloads:
            Draws(workload, 1)  # so that a wrong one is told now
        _check_doors(environment, options)
        environment.kvstore_conductor = conductor = Conductor(options, recorder)
        conductor.load_records(new_writer())
    except (ValueError, OSError, StoreError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        sys.exit(2)
    if isinstance(environment.runner, MasterRunner):
        _listen_to_workers(environment)


@events.test_start.add_listener
def on_test_start(environment: Environment, **_: Any) -> None:
    """The master's is first, and tells the workers from when on it counts."""
    if not isinstance(environment.runner, WorkerRunner):
        environment.parsed_options.counted_from = environment.kvstore_conductor.start()
    if isinstance(environment.runner, MasterRunner):
        return
    environment.kvstore_recorder.counted_from = environment.parsed_options.counted_from
    worker = max(0, getattr(environment.runner, "worker_index", 0))
    options = options_of(environment.parsed_options)
    environment.kvstore_session = _session(options, environment.kvstore_recorder, worker)


@events.test_stop.add_listener
def on_test_stop(environment: Environment, **_: Any) -> None:
    session: Session | None = getattr(environment, "kvstore_session", None)
    if session is not None and session.client is not None:
        session.client.close()


@events.quitting.add_listener
def on_quitting(environment: Environment, **_: Any) -> None:
    if not isinstance(environment.runner, WorkerRunner):
        conductor: Conductor = environment.kvstore_conductor
        conductor.faults += map(_told, environment.runner.exceptions.values() if environment.runner else ())
        doors = ",".join(sorted(each.__name__ for each in environment.user_classes))
        environment.process_exit_code = conductor.finish(doors=doors)
    else:
        environment.process_exit_code = 0


def _check_doors(environment: Environment, options: Options) -> None:
    """Raises ValueError if a user's door is not named."""
    if RespUser in environment.user_classes and not options.resp_nodes():
        raise ValueError("RespUser wants --resp with --store, or a local cluster's --data-dir")
    if GrpcUser in environment.user_classes and options.is_redis_only:
        raise ValueError("GrpcUser wants --store beside --resp; name RespUser to use the Redis door only")


def _told(broken: Mapping[str, Any]) -> str:
    """What broke users here or in a worker, as Locust counts it."""
    where = broken["traceback"].strip().splitlines()[-2:]
    return f"users broke, {broken['count']} times: {broken['msg']} ({' '.join(map(str.strip, where))})"


def new_writer() -> int:
    """Another one for each process and run: values of an earlier run are still there."""
    return SystemRandom().getrandbits(63) | 1


def _session(options: Options, recorder: Recorder, worker: int) -> Session:
    writer = new_writer()
    return Session(
        client=None if options.is_redis_only else Client(options.client_config()).open(),
        resp=options.resp_nodes(),
        level=options.read_level,
        draws=[Draws(each, options.keys) for each in options.workloads],
        keyspace=Keyspace(options.prefix.encode(), options.keys, writer),
        expectations=Expectations(writer, is_fresh=options.level != "stale"),
        recorder=recorder,
        rate_per_user=options.rate_per_user,
        seed=options.seed * 1_000 + worker,
    )


def _report_to_master(environment: Environment) -> None:
    def on_report(data: dict[str, Any], **_: Any) -> None:
        data[KEY] = environment.kvstore_recorder.take()

    environment.events.report_to_master.add_listener(on_report)


def _listen_to_workers(environment: Environment) -> None:
    def on_report(data: dict[str, Any], **_: Any) -> None:
        if KEY in data:
            environment.kvstore_recorder.merge(data[KEY])

    environment.events.worker_report.add_listener(on_report)
