"""A node as a process: reads its configuration, opens the real ports and listeners, and runs until it receives SIGTERM
or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvstore.bookie import BookieState
from kvstore.env.beat import BEAT_S
from kvstore.env.certificates import CHECK_S, Certificates
from kvstore.env.death.port import UNPROVEN
from kvstore.env.death.watch import death_watch
from kvstore.env.disk import lock_dir
from kvstore.env.events import end_task, wait_within
from kvstore.env.files.private import private_folder
from kvstore.env.liveness.port import Liveness
from kvstore.env.liveness.watchdog import Watchdog
from kvstore.env.log_output import Output, open_log
from kvstore.env.ports import Env, Nursery
from kvstore.env.real import end_process, end_within, real_env, run
from kvstore.env.secret import ClusterSecret, read_secret
from kvstore.errors import ConfigError, MetadataUnavailable, MetadataUnknown, StoreError, Unavailable
from kvstore.meta.bookie_summary import BookieSummary, read_summary
from kvstore.meta.connect import Store, connect
from kvstore.meta.snapshots import all_snapshots
from kvstore.os_errors import is_passing, reason_of
from kvstore.rpc.http.messages import HttpRequest
from kvstore.server.access.audit import AuditLog
from kvstore.server.access.http_authenticator import HttpAuthenticator
from kvstore.server.app import Node
from kvstore.server.composition import serve
from kvstore.server.config import NodeConfig, Role
from kvstore.server.engines import Engines
from kvstore.server.feed.pins import PinKeeper
from kvstore.server.gateway.gateway import Gateway
from kvstore.server.grpc.access_admin import AccessAdmin
from kvstore.server.grpc.listener import GrpcListener
from kvstore.server.grpc.transaction_admin import TransactionAdmin
from kvstore.server.http.last_snapshot import LastSnapshot
from kvstore.server.http.listener import HttpListener
from kvstore.server.status.slow_report import slow_report
from kvstore.server.supervisor import Supervisor, supervisor_of
from kvstore.server.tracing.open import backend_of_calls, traced_pages
from kvstore.server.ui.dashboard import Dashboard
from kvstore.server.ui.details import DetailPages, NodeDetails
from kvstore.server.ui.key_pages import KeyPages
from kvstore.server.ui.local import (
    AUDIT,
    CLIENTS,
    ROWS_MAX,
    SLOW,
    TRANSACTIONS,
    audit_report,
    clients_report,
    oldest_of,
)
from kvstore.server.ui.pages import Pages
from kvstore.types import PartitionId

log = logging.getLogger(__name__)

START_AGAIN_S = 0.5
FILES_MIN = 1_024
"""Minimum number of open files: about 800 for the connections of all listeners, the rest for journals and engines."""
NO_SPACE_RETRY_S = 5.0
"""Delay between attempts to start while the disk is full or the process lacks descriptors or memory."""
T = TypeVar("T")

STOP_TIMEOUT_S = 12.0
"""Maximum time for a graceful stop. A handover takes less; after this time the process is ended."""
END_S = 10.0
"""Maximum time from the end of the node to the end of its process."""


def run_node(config: NodeConfig, *, is_supervised: bool = False) -> None:
    """Run a node until SIGTERM or SIGINT. `is_supervised`: it shares standard error with other processes of its
    machine, so its log lines name it. Raises ConfigError, OSError."""
    supervisor = supervisor_of(os.environ)
    try:
        _run_process(config, supervisor, is_supervised=is_supervised)
    except BaseException as error:
        if supervisor is not None:
            supervisor.report_end(error)
        raise


def _run_process(config: NodeConfig, supervisor: Supervisor | None, *, is_supervised: bool) -> None:
    config = replace(config, data_dir=config.data_dir.absolute())
    secret = read_secret(config.secret_file)
    private_folder(config.data_dir)
    output = _opened_log(config, is_shared=is_supervised)
    lock = lock_dir(config.data_dir)
    files = raise_file_limit()
    try:
        run(_run(replace(config, limits=config.limits.within(files)), secret, output, supervisor))
    except BaseException as error:
        log.critical("node=%s ended with an error: %r", config.id, error)
        raise
    finally:
        lock.close()
        end_within(END_S)
        logging.shutdown()


def _opened_log(config: NodeConfig, *, is_shared: bool = False) -> Output:
    """Open the log. Falls back to standard error if its disk accepts no file now. Raises OSError if the disk fails
    otherwise."""
    try:
        return open_log(config.log_output, process=config.id, directory=config.log_dir, is_shared=is_shared)
    except OSError as error:
        if not is_passing(error):
            raise
        output = open_log(config.log_output, process=config.id, is_shared=is_shared)
        log.warning("logging to standard error instead: %s", reason_of(error, str(config.log_dir)))
        return output


class ProcessTls:
    """The state of TLS in this process, for its own pages and the node's report."""

    def __init__(self, certificates: Certificates, env: Env) -> None:
        self._certificates, self._env = certificates, env
        self.fault = certificates.fault

    @property
    def mode(self) -> str:
        return self._certificates.tls.mode.value

    @property
    def left_s(self) -> float:
        """Seconds until the certificate expires; negative after that."""
        return self._certificates.left_s

    @property
    def is_failing(self) -> bool:
        return self._certificates.is_failing

    @property
    def plain_connections(self) -> int:
        """Number of connections without TLS since the start, at all ports."""
        return self._certificates.plain + self._env.transport.statistics()["connections_plain_total"]


class Process:
    """The node's process as the HTTP endpoint shows it while the node starts, runs and stops."""

    def __init__(self, config: NodeConfig, env: Env, certificates: Certificates | None, output: Output) -> None:
        self._config, self._env, self.certificates, self.output = config, env, certificates, output
        self.tls = None if certificates is None else ProcessTls(certificates, env)
        self.node: Node | None = None
        self.watchdog: Watchdog
        self.http: HttpListener
        self.waits_for = ""
        """The condition that the start is waiting for; empty if none."""
        self.snapshots: LastSnapshot | None = None
        self._audit = AuditLog(env.clock.now, env.clock.date_ms, env.audit)
        """The audit log, used until the node has started."""

    def note_refused(self, request: HttpRequest, error: StoreError) -> None:
        """Record in the audit log a request that the HTTP listener refused."""
        address, call = request.remote or "?", f"HTTP {request.method[:20]} {request.path[:100]}"
        if self.node is None:
            self._audit.refused("", address, call, error)
        else:
            self.node.access.refused("", address, call, error)

    def not_live(self) -> list[str]:
        return [f"no metadata session because {failure}"] if (failure := self.watchdog.failure) else []

    def not_ready(self) -> list[str]:
        if self.node is None:
            return [f"starting: waiting for {self.waits_for}" if self.waits_for else "starting"]
        return self.node.not_ready()

    async def unserved(self) -> Sequence[str]:
        return await self.node.unserved() if self.node is not None else []

    def leaderless(self) -> list[PartitionId]:
        return self.node.leaderless() if self.node is not None else []

    def bookie_state(self) -> BookieState | None:
        if Role.BOOKIE not in self._config.plays:
            return None
        return BookieState(is_running=False) if self.node is None else self.node.bookie_state()

    def bookie_space(self) -> tuple[int, int]:
        if self.node is None or self.node.bookie is None:
            raise Unavailable("the bookie is starting; retry once /api/v1/bookie/is_ready answers 200")
        return self.node.bookie.space()

    async def cluster_info(self) -> BookieSummary:
        if self.node is None:
            raise Unavailable("the node is starting; retry once /readyz answers 200")
        return await read_summary(self.node.store)

    def own_names(self) -> set[str]:
        """Return the host names under which clients and other nodes know this node, the other nodes and the machine. A
        proxy or a tunnel on this machine may lead to another node."""
        own = {self._config.advertised(self._config.http), self._config.http}
        others = self.node.dispatcher.topology.servers.values() if self.node is not None else ()
        hosts = {each.rpartition(":")[0].lower() for each in (*own, *(other.http for other in others))}
        return hosts | {socket.gethostname().lower()}

    def status(self) -> dict[str, Any]:
        if self.node is None:
            return {"id": self._config.id, "pid": os.getpid(), "not_ready": self.not_ready()}
        own: dict[str, Any] = {"pid": os.getpid()}
        if self.certificates is not None:
            own["certificate_expires"] = self.certificates.expires
        if self.tls is not None:
            own["tls_mode"], own["connections_plain"] = self.tls.mode, self.tls.plain_connections
        return {**self.node.status(), **own}

    def statistics(self) -> dict[str, Any]:
        own: dict[str, float] = {
            "ready": not self.not_ready(),
            **self._env.transport.statistics(),
            **self.output.statistics(),
        }
        own |= self.watchdog.statistics()
        found: dict[str, Any] = {"process": own}
        if self.certificates is not None:
            found["process"] |= self.certificates.statistics()
        if self.node is None:
            return found
        found["process"] |= self.node.process_statistics()
        if self.snapshots is not None:
            found["process"] |= self.snapshots.statistics()
        histograms = self.node.histograms()
        return found | {part: {**table, **histograms.get(part, {})} for part, table in self.node.statistics().items()}


async def _run(config: NodeConfig, secret: ClusterSecret, output: Output, supervisor: Supervisor | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_callback_failed)
    for which in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(which, stop.set)
    certificates = Certificates(config.tls) if config.tls.serves else None
    env = real_env(config.data_dir, name=config.id, on_error=_task_failed, tls=certificates, others=config.outside)
    _follow_certificates(certificates, env, loop)
    watchdog = Watchdog(end_process, str(config.data_dir))
    death = death_watch(config.tls)
    env = replace(env, liveness=watchdog, audit=output.audit, death=death or UNPROVEN)
    if death is not None:
        env.nursery.spawn(death.run(), name="death watch")
    env.nursery.spawn(_beat(watchdog, env), name="beat")
    process = Process(config, env, certificates, output)
    process.watchdog = watchdog
    if supervisor is not None:
        env.nursery.spawn(supervisor.follow(process.not_ready, stop, lambda: not watchdog.failure), name="supervisor")
    wants_certificate = (
        config.tls.verify_clients and not config.tls.admits_plain
    )  # a plain connection shows no certificate
    http = process.http = HttpListener(
        process,
        env.transport,
        env.beat,
        wants_certificate=wants_certificate,
        connections_max=config.limits.http_connections_max,
        note_refused=process.note_refused,
        known=env.known,
    )
    http.own_names = process.own_names
    if config.tls.admits_plain:
        log.warning(
            "[tls] mode is prefer: the node accepts connections without TLS, and connects without TLS to nodes that "
            "have none"
        )
    await http.open(config.http)
    try:
        while not stop.is_set():
            try:
                await _serve(config, secret, env, process, stop)
            except (MetadataUnavailable, MetadataUnknown) as error:
                log.warning("lost the metadata store while starting, retrying: %s", error)
                await asyncio.sleep(START_AGAIN_S)
            except OSError as error:
                if not is_passing(error):
                    raise
                why = reason_of(error, str(config.data_dir), has_inodes=env.disk.free_files() > 0)
                log.warning("the node cannot start yet, retrying every %g s: %s (%s)", NO_SPACE_RETRY_S, why, error)
                process.waits_for = why
                await wait_within(stop, NO_SPACE_RETRY_S)
    finally:
        await http.close()
        await env.nursery.close()
        watchdog.close()


async def _beat(watchdog: Watchdog, env: Env) -> None:
    """Prove to the watchdog that the event loop is running."""
    while True:
        watchdog.beat()
        await env.beat.pause(BEAT_S)


def _follow_certificates(certificates: Certificates | None, env: Env, loop: asyncio.AbstractEventLoop) -> None:
    """Check the certificate files every few seconds, and at once on SIGHUP. SIGHUP must not end a node without
    certificates either, because an operator may signal all nodes."""
    hung_up = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hung_up.set)
    if certificates is None:
        return

    async def follow() -> None:
        certificates.warn()
        while True:
            await wait_within(hung_up, CHECK_S)
            hung_up.clear()
            certificates.poll()
            certificates.warn()

    env.nursery.spawn(follow(), name="certificates")


async def _serve(config: NodeConfig, secret: ClusterSecret, env: Env, process: Process, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        store = await _connect(config, env.nursery, stack, process, stop)
        if store is None:
            return
        engines = Engines(env.disk, config.partition, end_process)
        serving = serve(
            config,
            env=env,
            store=store,
            secret=secret,
            engines=engines,
            open_listeners=partial(_open_listeners, process.certificates),
        )
        node = await started_or_none(env.nursery, stack, serving, stop)
        if node is None:
            return
        node.resident_bytes, node.cpu_s = _resident_bytes, _cpu_s
        node.engine_statistics = engines.statistics
        node.log_output, node.tls = process.output, process.tls
        authenticator = process.http.authenticator = HttpAuthenticator(node.access, node.logins)
        process.http.traced = traced_pages(node.env.traces)
        process.node = node
        process.watchdog.start()
        process.watchdog.watch_disk("")
        process.snapshots = snapshots = LastSnapshot(node.env, store)
        snapshots.start()
        gateway = None
        if Role.SERVER in config.plays:
            gateway = process.http.gateway = _gateway(node, authenticator)
            node.surveyor.snapshot, node.surveyor.disk = snapshots.statistics, partial(_disk_of, config.data_dir)
            limit_s = config.server.snapshot_age_max_s
            node.surveyor.snapshot_age_max_s = lambda: limit_s if snapshots.is_read else 0.0
            pins = PinKeeper(node.env, node)
            stack.push_async_callback(pins.close)
            process.http.dashboard = dashboard = _dashboard(node, store, pins, process.http.pages, authenticator)
            dashboard.start()
        await stop.wait()
        loop.call_later(STOP_TIMEOUT_S, end_process, f"not stopped within {STOP_TIMEOUT_S} s")
        if gateway is not None:
            gateway.close()
        if process.http.dashboard is not None:
            process.http.dashboard.close()
            process.http.dashboard = None
        await snapshots.close()


def _dashboard(node: Node, store: Store, pins: PinKeeper, pages: Pages, authenticator: HttpAuthenticator) -> Dashboard:
    clock = node.env.clock
    transactions = TransactionAdmin(node, clock, lambda changed: None)
    details = NodeDetails(
        pins=pins.listed,
        access=AccessAdmin(store, node.access, clock.date_ms, clock.passed_ms).read,
        snapshots=partial(all_snapshots, store),
    )
    node.surveyor.details = {
        TRANSACTIONS: lambda: oldest_of(transactions.standing()),
        CLIENTS: lambda: clients_report(
            node.resp.shown_clients(ROWS_MAX + 1),
            {**node.resp.statistics(), **node.streams.statistics(), **node.endpoint_histograms()},
        ),
        SLOW: partial(slow_report, node.env.slow),
        AUDIT: lambda: audit_report(node.audit.recent),
    }
    backend = backend_of_calls(node.env.traces, node.dispatcher, "http")
    keys = KeyPages(clock, node.id, backend, node.scans, authenticator, pages)
    return Dashboard(clock, node.surveyor, pages, DetailPages(node.surveyor, node.ledger_survey, details, pages), keys)


async def started_or_none(
    nursery: Nursery, stack: AsyncExitStack, what: AbstractAsyncContextManager[T], stop: asyncio.Event
) -> T | None:
    """Enter the context. If `stop` is set before that is done, leave it and return None. A start may wait forever, for
    a ring or for the end of another process with the same id."""
    settled = asyncio.Event()
    started: list[T] = []
    failed: list[Exception] = []

    async def start() -> None:
        try:
            started.append(await stack.enter_async_context(what))
        except Exception as error:  # noqa: BLE001 - raised by the caller
            failed.append(error)
        settled.set()

    async def wait_for_stop() -> None:
        await stop.wait()
        settled.set()

    starting = nursery.spawn(start(), name="start")
    stopping = nursery.spawn(wait_for_stop(), name="stop while starting")
    try:
        await settled.wait()
    finally:
        await end_task(stopping)
        if not starting.done():
            log.info("stopped while starting")
            asyncio.get_running_loop().call_later(STOP_TIMEOUT_S, end_process, f"not stopped within {STOP_TIMEOUT_S} s")
            await end_task(starting)
    if failed:
        raise failed[0]
    return started[0] if started else None


def _gateway(node: Node, authenticator: HttpAuthenticator) -> Gateway:
    """Create the gateway for HTTP clients. It shares operations, feeds and limits with the other endpoints."""
    batches = node.streams.sessions.batches
    connections_max = node.config.limits.http_connections_max
    backend = backend_of_calls(node.env.traces, node.dispatcher, "http")
    gateway = Gateway(node.env, backend, node.id, node.feeds, batches, authenticator, connections_max, node.scans)
    others = node.endpoint_histograms
    node.endpoint_histograms = lambda: {**others(), **gateway.statistics()}
    return gateway


async def _connect(
    config: NodeConfig, nursery: Nursery, stack: AsyncExitStack, process: Process, stop: asyncio.Event
) -> Store | None:
    """Return the metadata store once it answers, or None if the node is stopped first. The exit stack closes it. Raises
    MetadataDenied."""
    process.waits_for = "the metadata store"
    while not stop.is_set():
        try:
            store = await started_or_none(nursery, stack, _connected(config, process.watchdog), stop)
        except MetadataUnavailable as error:
            log.warning("%s; retrying", error)
        else:
            process.waits_for = ""
            return store
    return None


@asynccontextmanager
async def _connected(config: NodeConfig, liveness: Liveness) -> AsyncIterator[Store]:
    login = config.metadata_login()
    store = await connect(config.metadata_address, tls=config.metadata_tls, login=login, liveness=liveness)
    try:
        yield store
    finally:
        await store.close()


async def _open_listeners(certificates: Certificates | None, node: Node, stack: AsyncExitStack) -> None:
    """Open the listeners for operations other than Redis."""
    if Role.SERVER not in node.config.plays:
        return
    listener = GrpcListener(node.env, node.backend_of("grpc"), node.id, node, node.config.limits.grpc_connections_max)
    await listener.open(node.config.grpc, certificates)
    stack.push_async_callback(listener.close)
    node.endpoint_histograms = listener.histograms
    node.on_serving.append(listener.set_serving)


def _task_failed(name: str, error: BaseException) -> None:
    """End the process, because an unexpected error has ended a task and the task's invariants no longer hold."""
    end_process(f"task {name} failed: {error!r}")


def _callback_failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle an error of an event-loop callback. An error of this package's code ends the process, as for a task. An
    error in a connection's own callback only costs the connection."""
    error = context.get("exception")
    ours = isinstance(error, BaseException) and "protocol" not in context and _is_from_here(error)
    loop.default_exception_handler(context)
    if ours:
        end_process(f"a callback failed: {error!r}")


def _is_from_here(error: BaseException) -> bool:
    """Return True if this package's code, or code that it called, raised the error."""
    package = str(Path(__file__).parent.parent)
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename.startswith(package) for frame in frames)


def _disk_of(path: Path) -> tuple[int, int]:
    """Return the total and free bytes of the disk; zeros if they are unknown."""
    try:
        found = os.statvfs(path)
    except OSError:
        return 0, 0
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _cpu_s() -> tuple[float, float]:
    times = os.times()
    return times.user, times.system


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def raise_file_limit() -> int:
    """Raise the limit of open files as far as possible and return it; each connection needs one. Raises ConfigError if
    the limit is so low that clients could take the files that journals need."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES_MIN:
        raise ConfigError(f"expected a limit of at least {FILES_MIN} open files, got {hard}; raise it (`ulimit -n`)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20
