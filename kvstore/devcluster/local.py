"""Starts and stops the processes of a local cluster: a real ZooKeeper or etcd, and the nodes. Uses real processes
and real time, and blocks."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from kvstore import config as toml
from kvstore.config import Setting
from kvstore.devcluster import etcd, layout, zookeeper
from kvstore.devcluster.founding import found_access
from kvstore.devcluster.layout import ClusterFile, NodePlace, UpOptions
from kvstore.devcluster.pages import http_ok, is_login_rejected, python_of, refusal, unsettled
from kvstore.devcluster.ports import is_free, taken_message
from kvstore.devcluster.probe import keys_to_ask, probe
from kvstore.devcluster.processes import LOADING_S, arguments_of, has_threads, is_alive, names_place, spawn
from kvstore.devcluster.record import ClusterRecord, Progress, replace_file
from kvstore.devcluster.secure_folder import ADMIN, SecureFolder
from kvstore.devcluster.settings import with_settings
from kvstore.devcluster.store_process import START_TIMEOUT_S, StoreProcess
from kvstore.env.files.private import private_folder
from kvstore.env.secret import make_secret, read_secret
from kvstore.errors import ConfigError, MetadataUnavailable, Unavailable
from kvstore.meta import paths
from kvstore.meta.address import MetadataKind
from kvstore.meta.connect import connect
from kvstore.meta.layout import LayoutStore
from kvstore.meta.login import MetadataLogin, metadata_login_of_environment
from kvstore.meta.registration import RegistrationClient
from kvstore.meta.store import MetadataStore
from kvstore.meta.zookeeper.acls import close_root
from kvstore.places import local_path
from kvstore.ring.hashing import hash_named
from kvstore.ring.ring import Ring
from kvstore.server.cluster import bootstrap
from kvstore.server.cluster.rising import lasts
from kvstore.types import PartitionId, ServerId
from kvstore.wal.config import BookieKind

STOP_TIMEOUT_S = 15
PORTS_TIMEOUT_S = 2
PROBE_TIMEOUT_S = 20
BOOKIES_TIMEOUT_S = 20
SETTLE_TIMEOUT_S = 15
LOGIN_TIMEOUT_S = 2
POLL_S = 0.05
OUTPUT_BYTES_MAX = 1 << 20
"""Maximum bytes of a process's earlier output that are kept when the process is started again."""

START_STORE: dict[MetadataKind, Callable[..., StoreProcess]] = {
    MetadataKind.ZOOKEEPER: zookeeper.start_standalone,
    MetadataKind.ETCD: etcd.start_standalone,
}
FIND_STORE: dict[MetadataKind, Callable[[Path], StoreProcess | None]] = {
    MetadataKind.ZOOKEEPER: zookeeper.find_running,
    MetadataKind.ETCD: etcd.find_running,
}


class LocalCluster:
    """The local cluster in one data directory."""

    def __init__(self, data_dir: Path, progress: Progress = lambda _: None) -> None:
        self.data_dir = local_path(data_dir).resolve()
        self._progress = progress
        self._record = ClusterRecord(self.data_dir)
        self._found_running: set[str] = set()
        """Nodes that were already running when this `up` began. Such a node may have received SIGTERM and still be
        stopping."""
        self._sizes_before: dict[Path, int] = {}
        """Size of each output file before its node was last started here."""

    def load(self) -> ClusterFile:
        """Return the cluster's record. Raises ConfigError if there is no cluster here."""
        found = self._record.load_or_none()
        if found is None:
            raise ConfigError(
                f"no cluster in {self.data_dir}; start one with `kvstore up --data-dir {self.data_dir}`, or name one "
                "with --server or --metadata"
            )
        return found

    def up(self, wish: UpOptions) -> ClusterFile:
        """Start all processes that are down, and wait until every partition serves. Raises ConfigError, Unavailable."""
        if not self.data_dir.exists():
            private_folder(self.data_dir)
        with self._record.lock(self._progress):
            found = self._record.load_or_none()
            cluster = self._with_those_that_run(layout.plan(replace(wish, data_dir=self.data_dir), found))
            is_moved = found is not None and found.port_offset != cluster.port_offset
            if is_moved and self.is_running():
                raise ConfigError(
                    f"--port-offset {cluster.port_offset}: the cluster in {self.data_dir} runs on other ports; run "
                    "`kvstore down` first"
                )
            files = self._files_with(wish.settings, cluster, is_moved=is_moved)
            self._refuse_taken_ports(cluster)
            cluster = self._with_secret(cluster, is_new=found is None)
            if (secure := secure_folder(cluster)) is not None:
                secure.make([node.id for node in cluster.nodes], is_new=found is None)
            new_files = [path for path in files if not path.exists()]
            _write(files)
            self._found_running = {node.id for node in cluster.nodes if self._runs(node)}
            try:
                ring = self._start(cluster)
            except BaseException:
                if found is None:
                    self._forget_unless_started(new_files)
                raise
        self.wait_ready()
        self._probe(cluster, keys_to_ask(ring))
        self._wait_until_settled(cluster)
        if secure is not None:
            _refuse_other_password(cluster, secure)
        return self.load()

    def _forget_unless_started(self, new_files: Iterable[Path]) -> None:
        """Remove the record and the files of a new cluster if no process was started. Otherwise, commands would look
        for nodes that never ran, and the next `up` could not choose other options."""
        cluster = self.load()
        was_started = cluster.zookeeper_pid is not None or any(node.pid is not None for node in cluster.nodes)
        if was_started or self.is_running():
            return
        self._record.remove()
        for path in new_files:
            path.unlink(missing_ok=True)

    def down(self) -> list[str]:
        """Stop all processes of the cluster, and return their names. The data stay."""
        if self._record.load_or_none() is None:
            return []
        with self._record.lock(self._progress):
            found = self._with_those_that_run(self.load())
            stopped = self._stop_nodes(found)
            own = self._own_store_or_none(found)
            if own is not None:
                self._progress(f"stopping {found.store.kind.shown}")
                own.stop()
                stopped.append(str(found.store.kind))
            self._record.save(found.with_pids({}, None))
        return stopped

    def status(self) -> dict[str, Any]:
        """Return which processes run, and which of them report that they are ready."""
        found = self.load()
        secure = secure_folder(found)
        running = {node.id: node for node in found.nodes if self._runs(node)}
        # A process that hangs keeps each of its pages waiting for the timeout, so all pages are requested at once.
        with ThreadPoolExecutor(2 * len(found.nodes)) as pool:
            ready = {id: pool.submit(http_ok, node.http, "/readyz", secure) for id, node in running.items()}
            pythons = {id: pool.submit(python_of, node.http, secure) for id, node in running.items()}
        nodes = [
            {
                "id": node.id,
                "running": node.id in running,
                "ready": node.id in running and ready[node.id].result(),
                "pid": node.pid if node.id in running else None,
                "python": pythons[node.id].result() if node.id in running else None,
                "resp": node.resp,
                "grpc": node.grpc,
                "http": node.http,
                "bookie": node.bookie if found.bookies is BookieKind.NODES else None,
            }
            for node in found.nodes
        ]
        runs = self._own_store_or_none(found) is not None
        pid = found.zookeeper_pid if runs else None
        store = {"address": found.zookeeper, "own": found.own_zookeeper, "running": runs, "pid": pid}
        return {"zookeeper": store, "nodes": nodes}

    def start_node(self, name: str) -> int:
        """Start one node that is down. Returns its pid at once, before the node is ready."""
        cluster = self.load()
        node = cluster.node(name)
        config = Path(node.config)
        private_folder(config.parent)
        if _is_written(config):
            self._complete(config, cluster)
        else:
            replace_file(config, toml.to_toml(layout.node_config(cluster, node, self.data_dir)))
        self._sizes_before |= {path: path.stat().st_size for path in self._outputs(name) if path.exists()}
        pid = self._spawn(name, self._command(node))
        self._found_running.discard(name)
        self._record.save(cluster.with_pid(name, pid))
        return pid

    def _files_with(self, settings: Sequence[Setting], cluster: ClusterFile, *, is_moved: bool) -> dict[Path, str]:
        """Return the configuration files that these settings or ports change, with their new content. Raises
        ConfigError."""
        found = {}
        for node in cluster.nodes if settings or is_moved else ():
            path, own = Path(node.config), layout.addresses(cluster, node) if is_moved else ()
            text = (
                toml.text_of(path)
                if _is_written(path)
                else toml.to_toml(layout.node_config(cluster, node, self.data_dir))
            )
            wanted = with_settings(text, (*own, *settings), what=str(path))
            if wanted != text or not path.exists():
                found[path] = wanted
                if self._runs(node):
                    self._progress(f"node {node.id} runs; it uses {path} after its next restart")
        return found

    def _command(self, node: NodePlace) -> list[str]:
        return [sys.executable, "-Pm", "kvstore", "node", "run", "--config", node.config]

    def start_zookeeper(self) -> int:
        """Start the cluster's metadata store, which must be down, and wait until it serves. Returns its pid. Raises
        Unavailable."""
        cluster = self.load()
        start = START_STORE[cluster.store.kind]
        pid = start(self._store_dir(cluster), cluster.store_port, detached=True).pid
        self._record.save(replace(cluster, zookeeper_pid=pid))
        return pid

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until every node serves and every partition has a leader.

        Raises Unavailable after `timeout_s` seconds. Also raises it as soon as a node that was started here has ended,
        because other nodes may wait for that node. Nodes that were already stopping are started again.
        """
        cluster = self.load()
        secure = secure_folder(cluster)
        for node in cluster.nodes:
            scheme = "http" if secure is None else "https"
            self._progress(f"waiting for node {node.id} at {scheme}://{node.http}")
            self._wait(node, secure, timeout_s)

    def _spawn(self, name: str, command: list[str]) -> int:
        """Start a process of the cluster that outlives this process."""
        logs = self.data_dir / "logs"
        private_folder(logs)
        path = logs / f"{name}.out"
        if path.exists() and path.stat().st_size > OUTPUT_BYTES_MAX:
            path.rename(path.with_suffix(".out.1"))
        return spawn(command, path)

    def _start(self, cluster: ClusterFile) -> Ring:
        self._record.save(cluster)
        # Nodes that have run before wait for the metadata store themselves, and load their code meanwhile.
        for node in [each for each in cluster.nodes if each.pid is not None and not self._runs(each)]:
            self._progress(f"starting node {node.id}")
            self.start_node(node.id)
        ring, instance = self._found_on_store(cluster)
        self._record.save(replace(self.load(), instance=instance))
        for node in self.load().nodes:
            if not self._runs(node):
                self._progress(f"starting node {node.id}")
                self.start_node(node.id)
        return ring

    def _found_on_store(self, cluster: ClusterFile) -> tuple[Ring, str]:
        """Read the cluster's ring and id from the metadata store, and start the store if necessary. A store that has
        received SIGTERM may still answer and end afterwards; then it is started again."""
        while True:
            if cluster.own_zookeeper and not self._serves_or_ends(cluster):
                self._progress(f"starting {cluster.store.kind.shown} at {cluster.zookeeper}")
                self.start_zookeeper()
            try:
                return asyncio.run(_found(cluster, self._progress))
            except MetadataUnavailable:
                if not cluster.own_zookeeper or self._own_store_or_none(cluster) is not None:
                    raise

    def _serves_or_ends(self, cluster: ClusterFile) -> bool:
        """Wait for the cluster's own metadata store. Returns True once it serves, or False once it does not run. A
        store that has received SIGTERM runs for a moment without serving. Raises Unavailable."""
        deadline, is_reported = time.monotonic() + START_TIMEOUT_S, False
        while (own := self._own_store_or_none(cluster)) is not None:
            if own.is_ready():
                return True
            if not is_reported:
                self._progress(f"waiting for {own.program} at {own.address}, which runs but does not serve")
                is_reported = True
            if time.monotonic() > deadline:
                raise Unavailable(f"{own.program} at {own.address} runs but does not serve; see {own.directory}")
            time.sleep(POLL_S)
        return False

    def _with_secret(self, cluster: ClusterFile, *, is_new: bool) -> ClusterFile:
        """Return the cluster with a secret, and create the secret for a new cluster. It is only created once,
        because nodes with another secret would belong to another cluster. Raises ConfigError."""
        if cluster.secret_file and not is_new:
            read_secret(Path(cluster.secret_file))
            return cluster
        path = self.data_dir / layout.SECRET_NAME
        make_secret(path)
        return replace(cluster, secret_file=str(path))

    def _complete(self, config: Path, cluster: ClusterFile) -> None:
        """Add the settings to node.toml that earlier releases did not write."""
        text = toml.text_of(config)
        needed = {"secret_file": cluster.secret_file, "bookie_clients": list(layout.bookie_clients(cluster))}
        missing = [
            f"{name} = {json.dumps(value)}\n"
            for name, value in needed.items()
            if value and not re.search(rf"^\s*{name}\s*=", text, re.MULTILINE)
        ]
        if missing:
            replace_file(config, "".join(missing) + text)

    def _probe(self, cluster: ClusterFile, keys: dict[PartitionId, bytes]) -> None:
        """Make each node append to the log of each partition and read it. Raises Unavailable."""
        deadline = time.monotonic() + PROBE_TIMEOUT_S
        secure = secure_folder(cluster)
        tls, login = (None, None) if secure is None else (secure.tls, secure.login())
        for node in cluster.nodes:
            self._progress(f"probing every partition through node {node.id}")
            while True:
                try:
                    probe(node.grpc, node.resp, keys, tls=tls, login=login)
                    break
                except Unavailable:
                    if self._start_ended():
                        self.wait_ready()
                        deadline = time.monotonic() + PROBE_TIMEOUT_S
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(POLL_S)
        if self._start_ended():
            self.wait_ready()

    # docs/protocol.md V1
    def _wait_until_settled(self, cluster: ClusterFile) -> None:
        """Wait until every node knows that the cluster's version has risen, so that new features can be used, and is
        sure of its clock. Then `status` reports nothing that only the start explains. Does not wait long, nor for
        permanent conditions, because the cluster already serves."""
        secure, deadline = secure_folder(cluster), time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            found = {node.id: unsettled(node.http, secure) for node in cluster.nodes}
            waits = [f"the cluster's version has not risen: {version}" for version, _ in found.values() if version]
            waits += [f"node {node} is not sure of its clock: {doubt}" for node, (_, doubt) in found.items() if doubt]
            if not waits:
                return
            if any(lasts(version) for version, _ in found.values()) or time.monotonic() > deadline:
                self._progress(waits[0])
                return
            time.sleep(POLL_S)

    def _stop_nodes(self, cluster: ClusterFile) -> list[str]:
        running = [node for node in cluster.nodes if self._runs(node)]
        if running:
            self._progress(f"stopping {', '.join(node.id for node in running)}")
        _end([node.pid for node in running if node.pid is not None], signal.SIGTERM, STOP_TIMEOUT_S)
        return [node.id for node in running]

    def _wait(self, node: NodePlace, secure: SecureFolder | None, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not http_ok(node.http, "/clusterz", secure):
            self._start_ended()
            if time.monotonic() > deadline:
                reported = refusal(node.http, "/clusterz", secure)
                why = (
                    f", it reports: {reported}"
                    if reported
                    else f" and answers nothing; if it hangs, run `kill -9 {node.pid}`"
                )
                raise Unavailable(
                    f"node {node.id} is not ready after {timeout_s:g} s{why}; see "
                    f"`kvstore status --data-dir {self.data_dir}` and {self.data_dir}/logs/{node.id}.log"
                )
            time.sleep(POLL_S)

    def _start_ended(self) -> bool:
        """Restart nodes that were stopping when this `up` found them and have ended since. Returns True if there
        were any. Raises Unavailable for any other node that has ended, because it failed while starting or `down`
        stopped it."""
        ended = [node.id for node in self.load().nodes if not self._runs(node)]
        for name in ended:
            if name not in self._found_running:
                raise Unavailable(f"node {name} ended while starting; its last output:\n{self._last_output(name)}")
            with self._record.lock(self._progress):
                node = self.load().node(name)
                if node.pid is None:  # only `down` removes the pid from the record
                    raise Unavailable(f"node {name} was stopped by `kvstore down`; run `kvstore up` again to start it")
                if not self._runs(node):
                    self._progress(f"node {name} was stopping and has ended; starting it again")
                    self.start_node(name)
        return bool(ended)

    def _outputs(self, name: str) -> tuple[Path, Path]:
        """Return the files to which a node writes its log and other output."""
        logs = self.data_dir / "logs"
        return logs / f"{name}.log", logs / f"{name}.out"

    def _last_output(self, name: str) -> str:
        """Return the last output of the node's current process, without the output of earlier processes."""
        texts = [text_after(path, self._sizes_before.get(path, 0)) for path in self._outputs(name) if path.exists()]
        return "\n".join("\n".join(text.splitlines()[-8:]) for text in texts if text) or "nothing"

    def is_running(self) -> bool:
        """Return True if any process of the cluster runs. Raises ConfigError if the cluster's file cannot be read."""
        cluster = self._record.load_or_none()
        return cluster is not None and (
            self._own_store_or_none(cluster) is not None or any(map(self._runs, cluster.nodes))
        )

    def _runs(self, node: NodePlace) -> bool:
        return node.pid is not None and _is_ours(node.pid, node.config)

    def _with_those_that_run(self, cluster: ClusterFile) -> ClusterFile:
        """Return the cluster with the pids of running processes that its file lacks, because a start was killed
        before it recorded them."""
        unknown = [node for node in cluster.nodes if not self._runs(node)]
        for pid in psutil.pids() if unknown else ():
            for node in unknown:
                if _is_ours(pid, node.config, wait_s=0.0):
                    cluster = cluster.with_pid(node.id, pid)
        return cluster

    def _store_dir(self, cluster: ClusterFile) -> Path:
        return self.data_dir / cluster.store.kind

    def _own_store_or_none(self, cluster: ClusterFile) -> StoreProcess | None:
        """Return the running process of the cluster's own metadata store, or None."""
        find = FIND_STORE[cluster.store.kind]
        return find(self._store_dir(cluster)) if cluster.own_zookeeper else None

    def _refuse_taken_ports(self, cluster: ClusterFile) -> None:
        down = {node.id for node in cluster.nodes if not self._runs(node)}
        wanted = list(layout.listeners(cluster, down))
        if cluster.own_zookeeper and self._own_store_or_none(cluster) is None:
            wanted += layout.store_listeners(cluster)
        deadline = time.monotonic() + PORTS_TIMEOUT_S
        while taken := [f"{address} ({what})" for what, address in wanted if not is_free(address)]:
            if time.monotonic() < deadline:
                time.sleep(POLL_S)  # one of our processes may have been killed a moment ago
                continue
            raise ConfigError(taken_message(taken, layout.free_offset(cluster, is_free)))


def text_after(path: Path, size: int) -> str:
    """Return the text of a file after its first `size` bytes, or the complete text if the file has become shorter."""
    data = path.read_bytes()
    return data[size if size <= len(data) else 0 :].decode("utf-8", errors="replace")


def secure_folder(cluster: ClusterFile) -> SecureFolder | None:
    """Return the folder with the keys of a secure cluster, or None if the cluster is not secure."""
    if not cluster.secure:
        return None
    return SecureFolder(cluster.data_dir, has_own_zookeeper=cluster.has_own_zookeeper)


def _refuse_other_password(cluster: ClusterFile, secure: SecureFolder) -> None:
    """Raise ConfigError if the password in the folder is wrong, because the commands that `up` prints would be
    refused. Retries, because a node may need a moment to learn of a new user."""
    deadline = time.monotonic() + LOGIN_TIMEOUT_S
    while is_login_rejected(cluster.nodes[0].http, secure):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"the cluster serves, but {secure.password_file} does not hold the current password of {ADMIN}, so "
                f"commands that use {secure.environment} are refused; write the password there and run `kvstore up` "
                f"again, or set a new one: kvstore access found {ADMIN} --replace-lost --data-dir {cluster.data_dir}"
            )
        time.sleep(POLL_S)


def _metadata_login(cluster: ClusterFile, progress: Progress) -> MetadataLogin | None:
    """Return the login that creates the first nodes in the metadata store, which decides who may use them. Raises
    ConfigError.

    In the cluster's own store, this is always the login of the cluster's nodes, whose processes do not inherit the
    login of the environment.
    """
    secure = secure_folder(cluster)
    own, other = None if secure is None else secure.metadata_login(), metadata_login_of_environment()
    if own is None and other is not None and cluster.own_zookeeper and not _names_metadata_user(cluster):
        progress(f"ignoring the metadata store's user {other.user} of the environment: this cluster's nodes use none")
        return None
    return own or other


def _names_metadata_user(cluster: ClusterFile) -> bool:
    config = Path(cluster.nodes[0].config)
    table = toml.parse(toml.text_of(config), config).get("metadata") if _is_written(config) else None
    return isinstance(table, dict) and bool(table.get("user"))


async def _found(cluster: ClusterFile, progress: Progress) -> tuple[Ring, str]:
    """Return the cluster's ring and id, and create the cluster if it does not exist."""
    secure = secure_folder(cluster)
    if secure is not None and (own := secure.metadata_login()) is not None:
        await close_root(cluster.zookeeper, own)
    store = await connect(cluster.zookeeper, login=_metadata_login(cluster, progress))
    try:
        if secure is not None and await found_access(store, secure.login()):
            progress("creating its administrator")
        if cluster.bookies is BookieKind.EXTERNAL:
            await _wait_for_bookies(store, cluster, progress)
        ring = await bootstrap.found(
            store,
            {ServerId(node.id): "" for node in cluster.nodes},
            partitions=cluster.partitions,
            replicas=cluster.replicas,
            instance_id=str(uuid.uuid4()),
            hash=hash_named(cluster.key_hash),
        )
        return ring, await LayoutStore(store).instance_id()
    finally:
        await store.close()


async def _wait_for_bookies(store: MetadataStore, cluster: ClusterFile, progress: Progress) -> None:
    """Wait until as many bookies are writable as a log needs. Raises Unavailable."""
    wanted = layout.node_config(cluster, cluster.nodes[0], Path()).log.quorum.ack
    progress(f"waiting for bookies at {cluster.zookeeper}")
    registered = RegistrationClient(store)
    deadline = time.monotonic() + BOOKIES_TIMEOUT_S
    while len(found := (await registered.bookies()).writable) < wanted:
        if time.monotonic() > deadline:
            raise Unavailable(
                f"expected at least {wanted} writable bookies below {paths.LEDGERS} at {cluster.zookeeper}, got "
                f"{', '.join(sorted(found)) or 'none'}; start them, or pass the address of the store that they use"
            )
        await asyncio.sleep(POLL_S)


def _write(files: dict[Path, str]) -> None:
    """Replace each file atomically."""
    for path, text in files.items():
        private_folder(path.parent)
        replace_file(path, text)


def _is_written(config: Path) -> bool:
    """Return True if the node's file exists and is not empty. A power cut may leave an unsynced file empty."""
    return config.exists() and config.stat().st_size > 0


def _is_ours(pid: int, config: str, *, wait_s: float = LOADING_S) -> bool:
    """Return True if the process `pid` is alive and runs the node with this file. The check is necessary because
    pids are reused. A process that is loading its program has `wait_s` seconds to finish."""
    try:
        process = psutil.Process(pid)
        words = arguments_of(process, wait_s)
        runs_node = words[-4:-1] == ["node", "run", "--config"] and names_place(process, words[-1], config)
        return runs_node and has_threads(process)
    except psutil.Error:
        return False


def _end(pids: list[int], how: signal.Signals, timeout_s: float) -> None:
    """Signal the processes, wait until they have ended, and kill those that have not ended after `timeout_s`
    seconds."""
    for pid in pids:
        _signal(pid, how)
    deadline = time.monotonic() + timeout_s
    left = set(pids)
    while left and time.monotonic() < deadline:
        left = {pid for pid in left if is_alive(pid)}
        time.sleep(POLL_S)
    for pid in sorted(left):
        _signal(pid, signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while any(map(is_alive, left)) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _signal(pid: int, how: signal.Signals) -> None:
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        return
