"""The Locust file of kvstore: users of both endpoints, one shape, and the wiring of a run.

    kvstore-loadtest --workload ycsb-b --rate 1000 --seconds 60 [GrpcUser] [RespUser]

See docs/how-to/run-load-tests.md. A file of one's own imports all of this one and adds users. Exit codes: see run.py.
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
from dataclasses import replace
from functools import partial
from typing import Any

import locust.runners
import locust.stats
from grpc.experimental import gevent as grpc_gevent
from locust import LoadTestShape, events
from locust.env import Environment
from locust.runners import STATE_INIT, MasterRunner, WorkerRunner

from kvstore.client import Client
from kvstore.errors import StoreError
from kvstore.loadtest.generator.conductor import Conductor
from kvstore.loadtest.generator.courier import Courier
from kvstore.loadtest.generator.expectations import Expectations
from kvstore.loadtest.generator.grpc_user import GrpcUser
from kvstore.loadtest.generator.interrupts import interrupt_main_greenlet
from kvstore.loadtest.generator.last_reports import LastReports
from kvstore.loadtest.generator.options import Options, add_options, options_of
from kvstore.loadtest.generator.own_user import OwnUser, own_users
from kvstore.loadtest.generator.resp_user import RespUser
from kvstore.loadtest.generator.users import Session, record
from kvstore.loadtest.generator.values import WrongValue, new_run, writer_of
from kvstore.loadtest.generator.workloads import INSERTED_MAX, Draws, Keyspace
from kvstore.loadtest.report.goals import unknown
from kvstore.loadtest.report.recorder import Recorder
from kvstore.loadtest.report.spoiled import EXIT

__all__ = ["GrpcUser", "OwnUser", "RespUser", "TargetShape", "WrongValue"]

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
        environment = self.runner.environment
        if environment.web_ui is not None and self.runner.state == STATE_INIT and environment.kvstore_conductor is None:
            environment.kvstore_conductor = _prepared_or_none(environment)
        conductor: Conductor | None = environment.kvstore_conductor
        if conductor is None:
            return None
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

    def reset_time(self) -> None:
        """Locust says that another run begins."""
        super().reset_time()
        self._last_reports = None


@events.init_command_line_parser.add_listener
def on_parser(parser: ArgumentParser) -> None:
    add_options(parser)


@events.init.add_listener
def on_init(environment: Environment, **_: Any) -> None:
    interrupt_main_greenlet()
    environment.stop_timeout = max(environment.stop_timeout or 0.0, STOP_S)
    environment.kvstore_recorder = recorder = Recorder()
    environment.events.request.add_listener(partial(record, recorder))
    environment.kvstore_courier = _courier_or_none(environment)
    if isinstance(environment.runner, WorkerRunner):
        _report_to_master(environment)
        return
    environment.kvstore_conductor, environment.kvstore_codes = None, []
    try:
        options = _checked(environment)
        if environment.kvstore_courier is not None:
            environment.kvstore_courier.wait_started()
        if environment.web_ui is None:  # else each of its runs is prepared when it starts
            environment.kvstore_conductor = _prepared(environment, options)
    except (ValueError, OSError, StoreError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        if environment.kvstore_courier is not None:
            environment.kvstore_courier.close()
        sys.exit(2)
    if isinstance(environment.runner, MasterRunner):
        _listen_to_workers(environment)


@events.test_start.add_listener
def on_test_start(environment: Environment, **_: Any) -> None:
    """The master's is first, and tells the workers from when on it counts, and the number of the run."""
    if not isinstance(environment.runner, WorkerRunner):
        conductor: Conductor | None = environment.kvstore_conductor
        if conductor is None:
            return
        environment.parsed_options.kvstore_run = new_run()
        if not isinstance(environment.runner, MasterRunner):
            _open_session(environment)  # before the run begins
        environment.parsed_options.counted_from = conductor.start()
    if isinstance(environment.runner, WorkerRunner):
        _open_session(environment)
    environment.kvstore_recorder.counted_from = environment.parsed_options.counted_from


@events.test_stop.add_listener
def on_test_stop(environment: Environment, **_: Any) -> None:
    session: Session | None = getattr(environment, "kvstore_session", None)
    if session is not None:
        environment.kvstore_recorder.beside = None
        for each in (session.client, session.courier):
            if each is not None:
                each.close()
        environment.kvstore_session = None
    if not environment.parsed_options.headless:  # of a worker, what its master was told
        environment.kvstore_courier = environment.kvstore_courier or _courier_or_none(environment)  # for another run
    if environment.web_ui is not None and not isinstance(environment.runner, WorkerRunner):
        _finish(environment)


@events.quitting.add_listener
def on_quitting(environment: Environment, **_: Any) -> None:
    if environment.kvstore_courier is not None:
        environment.kvstore_courier.close()
    if isinstance(environment.runner, WorkerRunner):
        environment.process_exit_code = 0
        return
    if environment.web_ui is None:
        _finish(environment)
    codes: list[int] = environment.kvstore_codes
    environment.process_exit_code = next((code for code in (2, 1, EXIT) if code in codes), 0)


def _checked(environment: Environment) -> Options:
    """Return the checked options. Raises ValueError, OSError."""
    options = options_of(environment.parsed_options)
    for workload in options.workloads:
        Draws(workload, 1)  # so that a wrong one is told now
    _check_doors(environment, options)
    return options


def _prepared(environment: Environment, options: Options) -> Conductor:
    """Return the conductor of the run that is about to start. Raises ValueError, OSError, StoreError."""
    own = own_users(environment.user_classes)
    conductor = Conductor(options, environment.kvstore_recorder)
    conductor.load_records(
        writer_of(new_run(), 0),
        has_records=len(own) < len(environment.user_classes),
        prepare=[each.prepare for each in own],
    )
    return conductor


def _prepared_or_none(environment: Environment) -> Conductor | None:
    """The same for a run that the pages have asked for: with their options, a report of its own, and nothing of the
    run before. What is wrong is shown there too."""
    environment.kvstore_recorder.begin(0.0)
    try:
        options = _checked(environment)
        number = len(environment.kvstore_codes) + 1
        if number > 1:
            options = replace(options, report=options.report.with_stem(f"{options.report.stem}-{number}"))
        return _prepared(environment, options)
    except (ValueError, OSError, StoreError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        assert environment.runner is not None
        environment.runner.log_exception("loadtest", f"the run was not started: {error}", "")
        return None


def _finish(environment: Environment) -> None:
    """Write the report of the run that has ended, and keep its exit code. Once for each run."""
    conductor: Conductor | None = environment.kvstore_conductor
    environment.kvstore_conductor = None
    if conductor is None:
        return
    conductor.faults += map(_told, environment.runner.exceptions.values() if environment.runner else ())
    doors = ",".join(sorted(each.__name__ for each in environment.user_classes))
    environment.kvstore_codes.append(conductor.finish(doors=doors))


def _check_doors(environment: Environment, options: Options) -> None:
    """Raises ValueError if a user's door is not named, a user of one's own is wrong, or a goal is of no operation."""
    own = own_users(environment.user_classes)
    for each in own:
        if fault := each.fault_or_none():
            raise ValueError(fault)
    if fault := unknown(options.goals.p99_ms, [name for each in own for name in each.operations]):
        raise ValueError(fault)
    if own and options.is_redis_only:
        raise ValueError(f"{own[0].__name__} wants --store beside --resp, or a local cluster's --data-dir")
    if RespUser in environment.user_classes and not options.resp_nodes():
        raise ValueError("RespUser wants --resp with --store, or a local cluster's --data-dir")
    if GrpcUser in environment.user_classes and options.is_redis_only:
        raise ValueError("GrpcUser wants --store beside --resp; name RespUser to use the Redis door only")


def _told(broken: Mapping[str, Any]) -> str:
    """Describe an exception that broke users here or in a worker, as Locust counts it."""
    where = broken["traceback"].strip().splitlines()[-2:]
    return f"users broke, {broken['count']} times: {broken['msg']} ({' '.join(map(str.strip, where))})"


def _courier_or_none(environment: Environment) -> Courier | None:
    """One that waits for the next run, where there are users for it."""
    is_master = isinstance(environment.runner, MasterRunner)
    return Courier() if GrpcUser in environment.user_classes and not is_master else None


def _open_session(environment: Environment) -> None:
    """Raises StoreError. With another run's session nothing is shared but the recorder, which begins anew."""
    recorder: Recorder = environment.kvstore_recorder
    recorder.begin(0.0)
    environment.kvstore_session = session = _session(environment)
    if (courier := session.courier) is not None:
        recorder.beside = lambda: (courier.processor_s, courier.queued_s)


def _session(environment: Environment) -> Session:
    options = options_of(environment.parsed_options)
    worker = max(0, getattr(environment.runner, "worker_index", 0))
    writer = writer_of(environment.parsed_options.kvstore_run, worker)
    courier: Courier | None = None
    if GrpcUser in environment.user_classes and not options.is_redis_only:
        courier, environment.kvstore_courier = environment.kvstore_courier or Courier(), None
        courier.open(options.cluster)
    return Session(
        client=Client(options.client_config()).open() if own_users(environment.user_classes) else None,
        courier=courier,
        resp=options.resp_nodes(),
        level=options.read_level,
        draws=[Draws(each, options.keys) for each in options.workloads],
        keyspace=Keyspace(options.prefix.encode(), options.keys, writer),
        expectations=Expectations(writer, keys_max=2 * options.keys + INSERTED_MAX),  # records and registers
        recorder=environment.kvstore_recorder,
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
