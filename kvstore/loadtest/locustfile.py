"""The Locust file of kvstore: users of both endpoints, one load shape, and the setup of a run.

    kvstore-loadtest --workload ycsb-b --rate 1000 --seconds 60 [GrpcUser] [RespUser]

See docs/how-to/run-load-tests.md. A custom Locust file imports everything from this one and adds users. Exit codes:
see run.py.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
"""gRPC reads this once, at import. With fork support, one in fifteen child processes of a chaos run died at startup."""

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
from kvstore.loadtest.generator.expectations import Expectations
from kvstore.loadtest.generator.grpc_user import GrpcUser
from kvstore.loadtest.generator.interrupts import interrupt_main_greenlet
from kvstore.loadtest.generator.last_reports import LastReports
from kvstore.loadtest.generator.options import Options, add_options, options_of
from kvstore.loadtest.generator.own_user import OwnUser, own_users
from kvstore.loadtest.generator.resp_user import RespUser
from kvstore.loadtest.generator.sidecar_client import SidecarClient
from kvstore.loadtest.generator.users import RunContext, record
from kvstore.loadtest.generator.values import WrongValue, new_run, writer_of
from kvstore.loadtest.generator.workloads import INSERTED_MAX, Draws, Keyspace
from kvstore.loadtest.report.goals import unknown
from kvstore.loadtest.report.recorder import Recorder
from kvstore.loadtest.report.spoiled import EXIT

__all__ = ["GrpcUser", "OwnUser", "RespUser", "TargetShape", "WrongValue"]

grpc_gevent.init_gevent()
REPORT_S = 1.0
"""Interval in seconds at which workers report. The timeline has a resolution of one second."""
locust.runners.WORKER_REPORT_INTERVAL = REPORT_S
locust.stats.bucket_response_time = lambda response_time: round(response_time, 1)
STOP_S = 10.0
"""Seconds that a stopped user has to finish its operation. An operation that is killed may hold up others."""
WEB_HOST = "127.0.0.1"
"""Address of Locust's pages unless --web-host names another one."""
_verdicts: list[str] = []
"""The verdict of the run of this process, to be printed as the last line."""
KEY = "kvstore"
"""Key of our part of a worker's report."""


class TargetShape(LoadTestShape):
    """Asks the run's conductor how many users there should be."""

    abstract = False
    _last_reports: LastReports | None = None
    """Set on a master once the run is over. A single process stops its own users and waits for them."""

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
        """Prepare for another run. Called by Locust."""
        super().reset_time()
        self._last_reports = None


@events.init_command_line_parser.add_listener
def on_parser(parser: ArgumentParser) -> None:
    add_options(parser)
    # Anyone who can reach the pages can load the cluster.
    parser.set_defaults(web_host=WEB_HOST)


@events.init.add_listener
def on_init(environment: Environment, **_: Any) -> None:
    interrupt_main_greenlet()
    environment.stop_timeout = max(environment.stop_timeout or 0.0, STOP_S)
    environment.kvstore_recorder = recorder = Recorder()
    environment.events.request.add_listener(partial(record, recorder))
    environment.kvstore_sidecar = _sidecar_or_none(environment)
    if isinstance(environment.runner, WorkerRunner):
        _report_to_master(environment)
        return
    environment.kvstore_conductor, environment.kvstore_codes = None, []
    try:
        options = _checked(environment)
        if environment.kvstore_sidecar is not None:
            environment.kvstore_sidecar.wait_started()
        if environment.web_ui is None:  # else each of its runs is prepared when it starts
            environment.kvstore_conductor = _prepared(environment, options)
    except (ValueError, OSError, StoreError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        if environment.kvstore_sidecar is not None:
            environment.kvstore_sidecar.close()
        sys.exit(2)
    if isinstance(environment.runner, MasterRunner):
        _listen_to_workers(environment)


@events.test_start.add_listener
def on_test_start(environment: Environment, **_: Any) -> None:
    """Start a run. The master runs this first, then sends workers the start of the measured time and the run id."""
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
    session: RunContext | None = getattr(environment, "kvstore_session", None)
    if session is not None:
        environment.kvstore_recorder.beside = None
        for each in (session.client, session.sidecar):
            if each is not None:
                each.close()
        environment.kvstore_session = None
    if not environment.parsed_options.headless:  # a worker has its master's options
        environment.kvstore_sidecar = environment.kvstore_sidecar or _sidecar_or_none(environment)  # for the next run
    if environment.web_ui is not None and not isinstance(environment.runner, WorkerRunner):
        _finish(environment)


@events.quitting.add_listener
def on_quitting(environment: Environment, **_: Any) -> None:
    if environment.kvstore_sidecar is not None:
        environment.kvstore_sidecar.close()
    if isinstance(environment.runner, WorkerRunner):
        environment.process_exit_code = 0
        return
    if environment.web_ui is None:
        _finish(environment)
    codes: list[int] = environment.kvstore_codes
    environment.process_exit_code = next((code for code in (2, 1, EXIT) if code in codes), 0)


@events.quit.add_listener
def on_quit(**_: Any) -> None:
    """Print the verdict last, after Locust's own tables."""
    for line in _verdicts:
        print(line, file=sys.stderr, flush=True)
    _verdicts.clear()


def _checked(environment: Environment) -> Options:
    """Return the checked options. Raises ValueError, OSError."""
    options = options_of(environment.parsed_options)
    for workload in options.workloads:
        Draws(workload, 1)  # fails now if the workload is invalid
    _check_endpoints(environment, options)
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
    """Prepare a run that was started from Locust's web pages: its own options, its own report, no state of the run
    before. Errors are shown on the pages, too."""
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
    """Write the report of the run that has ended and keep its exit code. Does nothing for a run that is finished."""
    conductor: Conductor | None = environment.kvstore_conductor
    environment.kvstore_conductor = None
    if conductor is None:
        return
    conductor.faults += map(_failure_of, environment.runner.exceptions.values() if environment.runner else ())
    endpoints = ",".join(sorted(each.__name__ for each in environment.user_classes))
    environment.kvstore_codes.append(conductor.finish(endpoints=endpoints))
    _verdicts.append(conductor.verdict)
    if environment.web_ui is not None:
        on_quit()


def _check_endpoints(environment: Environment, options: Options) -> None:
    """Raise ValueError if a user's endpoint is not named, a custom user is invalid, or a goal names no operation."""
    own = own_users(environment.user_classes)
    for each in own:
        if fault := each.fault_or_none():
            raise ValueError(fault)
    if fault := unknown(options.goals.p99_ms, [name for each in own for name in each.operations]):
        raise ValueError(fault)
    if own and options.is_redis_only:
        raise ValueError(f"{own[0].__name__} needs --store in addition to --resp, or the --data-dir of a local cluster")
    if RespUser in environment.user_classes and not options.resp_nodes():
        raise ValueError("RespUser needs --resp in addition to --store, or the --data-dir of a local cluster")
    if GrpcUser in environment.user_classes and options.is_redis_only:
        raise ValueError("GrpcUser needs --store in addition to --resp; name RespUser to use only the Redis endpoint")


def _failure_of(broken: Mapping[str, Any]) -> str:
    """Describe an exception that broke users here or in a worker, in the form in which Locust counts it."""
    where = broken["traceback"].strip().splitlines()[-2:]
    return f"users failed {broken['count']} times: {broken['msg']} ({' '.join(map(str.strip, where))})"


def _sidecar_or_none(environment: Environment) -> SidecarClient | None:
    """Return a new sidecar for the next run, or None if no user of this process needs one."""
    is_master = isinstance(environment.runner, MasterRunner)
    return SidecarClient() if GrpcUser in environment.user_classes and not is_master else None


def _open_session(environment: Environment) -> None:
    """Open the session of a run. Raises StoreError. Runs share only the recorder, which is reset."""
    recorder: Recorder = environment.kvstore_recorder
    recorder.begin(0.0)
    environment.kvstore_session = session = _session(environment)
    if (sidecar := session.sidecar) is not None:
        recorder.beside = lambda: (sidecar.processor_s, sidecar.queued_s)


def _session(environment: Environment) -> RunContext:
    options = options_of(environment.parsed_options)
    worker = max(0, getattr(environment.runner, "worker_index", 0))
    writer = writer_of(environment.parsed_options.kvstore_run, worker)
    sidecar: SidecarClient | None = None
    if GrpcUser in environment.user_classes and not options.is_redis_only:
        sidecar, environment.kvstore_sidecar = environment.kvstore_sidecar or SidecarClient(), None
        sidecar.open(options.cluster)
    return RunContext(
        client=Client(options.client_config()).open() if own_users(environment.user_classes) else None,
        sidecar=sidecar,
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
