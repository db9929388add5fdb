"""What `locust -f loadtest/locustfile.py` runs: users of both doors, one shape, and the wiring of a run.

    locust -f loadtest/locustfile.py --headless --workload ycsb-b --rate 1000 --seconds 60 [GrpcUser] [RespUser]

See README.md beside this file. Exit codes: 0 as it must be, 1 not so (the report and the last lines say why), 2 wrong
usage or no cluster, 3 spoiled by its own machine.
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
from typing import Any

import locust.runners
import locust.stats
from grpc.experimental import gevent as grpc_gevent
from locust import LoadTestShape, events
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from kvstore.client import Client
from kvstore.errors import StoreError
from loadtest.generator.conductor import Conductor
from loadtest.generator.expectations import Expectations
from loadtest.generator.grpc_user import GrpcUser
from loadtest.generator.last_reports import LastReports
from loadtest.generator.options import Options, add_options, options_of
from loadtest.generator.resp_user import RespUser
from loadtest.generator.users import Session, record
from loadtest.generator.values import new_run, writer_of
from loadtest.generator.workloads import INSERTED_MAX, Draws, Keyspace
from loadtest.report.recorder import Recorder

__all__ = ["GrpcUser", "RespUser", "TargetShape"]

grpc_gevent.init_gevent()
REPORT_S = 1.0
"""Of a worker: the timeline is drawn by the second."""
locust.runners.WORKER_REPORT_INTERVAL = REPORT_S
locust.stats.bucket_response_time = lambda response_time: round(response_time, 1)
STOP_S = 10.0
"""A user that is told to stop finishes its operation: one that was torn away might hold others up."""
KEY = "kvstore"
"""Of our part in what workers report."""


class TargetShape(LoadTestShape):
    """Asks the run's conductor how many users there should be."""

    abstract = False
    _last_reports: LastReports | None = None
    """Once the run is over, of a master. A single process stops its users itself, and waits for them."""

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        conductor: Conductor = self.runner.environment.kvstore_conductor
        now, running = time.time(), self.runner.user_count
        if not isinstance(self.runner, MasterRunner):
            return conductor.target(now, running)
        conductor.note_workers(self.runner.worker_count)
        if self._last_reports is None:
            wanted = conductor.target(now, running)
            if wanted is not None:
                return wanted
            self._last_reports = LastReports(now, running, stop_s=STOP_S, report_s=REPORT_S)
        return self._last_reports.target(now, running)


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
        conductor.load_records(writer_of(new_run(), 0))
    except (ValueError, OSError, StoreError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        sys.exit(2)
    if isinstance(environment.runner, MasterRunner):
        _listen_to_workers(environment)


@events.test_start.add_listener
def on_test_start(environment: Environment, **_: Any) -> None:
    """The master's is first, and tells the workers from when on it counts, and the number of the run."""
    if not isinstance(environment.runner, WorkerRunner):
        environment.parsed_options.counted_from = environment.kvstore_conductor.start()
        environment.parsed_options.kvstore_run = new_run()
    if isinstance(environment.runner, MasterRunner):
        return
    environment.kvstore_recorder.counted_from = environment.parsed_options.counted_from
    worker = max(0, getattr(environment.runner, "worker_index", 0))
    options = options_of(environment.parsed_options)
    run = environment.parsed_options.kvstore_run
    environment.kvstore_session = _session(options, environment.kvstore_recorder, run, worker)


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


def _session(options: Options, recorder: Recorder, run: int, worker: int) -> Session:
    writer = writer_of(run, worker)
    return Session(
        client=None if options.is_redis_only else Client(options.client_config()).open(),
        resp=options.resp_nodes(),
        level=options.read_level,
        draws=[Draws(each, options.keys) for each in options.workloads],
        keyspace=Keyspace(options.prefix.encode(), options.keys, writer),
        expectations=Expectations(writer, keys_max=2 * options.keys + INSERTED_MAX),  # records and registers
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
