"""The systems that the benchmarks compare with: a three-node etcd, of the extra `local` or Debian's package; a Redis
that always syncs, of Debian's package; and the floor. This module also provides ports and a folder on a
real disk, for these systems and for our own clusters."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvstore.devcluster.layout import ClusterFile, UpOptions
from kvstore.devcluster.local import LocalCluster, Progress
from kvstore.devcluster.zookeeper import free_ports
from kvstore.errors import ConfigError, Unavailable
from loadtest.floor_member import PROCESSES

START_S = 20.0
OFFSETS = range(24_000, 56_000, 100)
"""Port offsets to try for a cluster."""
Cluster = TypeVar("Cluster", bound=LocalCluster)


def _path() -> str:
    """Return the directories of programs. The first is that of the interpreter, where the extra `local` installs
    etcd."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def is_installed(*programs: str) -> bool:
    return all(shutil.which(program, path=_path()) for program in programs)


def up_on_free_ports(cluster: LocalCluster, **wish: Any) -> ClusterFile:
    """Start a new cluster at the first port offset where it can listen. Raises ConfigError if there is none."""
    for offset in OFFSETS:
        try:
            return cluster.up(UpOptions(data_dir=cluster.data_dir, port_offset=offset, **wish))
        except ConfigError as error:
            if "taken by another process" not in str(error):
                raise
        except Unavailable as error:
            if "address already in use" not in str(error).lower():
                raise
            cluster.down()  # a connection that somebody opened has got one of its ports after it was looked at
            shutil.rmtree(cluster.data_dir)
    raise ConfigError("no free ports for a cluster")


@contextmanager
def kvstore(kind: Callable[[Path, Progress], Cluster], **wish: Any) -> Iterator[tuple[Cluster, ClusterFile]]:
    """Run a cluster of ours in its own folder. Raises ConfigError, Unavailable."""
    with scratch() as folder:
        cluster = kind(folder / "data", lambda text: print(text, file=sys.stderr))
        try:
            yield cluster, up_on_free_ports(cluster, **wish)
        finally:
            cluster.down()  # also what `up` had started before it raised


class Running(NamedTuple):
    """A running system."""

    addresses: list[str]
    """Addresses for clients."""
    pids: list[int]


@contextmanager
def redis(folder: Path, *, is_synced: bool = True) -> Iterator[Running]:
    """Run Redis with `appendfsync always`, or in memory only."""
    (port,) = free_ports(1)
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    synced = ["--appendonly", "yes", "--appendfsync", "always"] if is_synced else []
    with _process("redis-server", *arguments, *synced, folder=folder) as pid:
        _wait_listening(port)
        yield Running([f"127.0.0.1:{port}"], [pid])


@contextmanager
def memory_grpc(folder: Path) -> Iterator[str]:
    """Run a server for our own clients that stores keys in a dictionary. Yields its address."""
    with _python_server("loadtest.bench.memory_server", folder) as address:
        yield address


class Floor(NamedTuple):
    """A running loadtest/floor.py: its own process, the three processes that it has started, and their addresses."""

    pid: int
    pids: list[int]
    endpoints: list[str]


@contextmanager
def floor(folder: Path, *, is_looking_up: bool = False) -> Iterator[Floor]:
    """Run the three processes of the floor. Yields once they answer."""
    command = [sys.executable, "-m", "loadtest.floor", "--data", str(folder), "--port", "0"]
    command += ["--lookup"] if is_looking_up else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        said = "".join(process.stdout.readline() for _ in range(PROCESSES))
        found = re.findall(r"pid (\d+), endpoint (\S+)", said)
        if len(found) != PROCESSES:
            raise RuntimeError(f"the floor does not start: {said!r}")
        for _, endpoint in found:
            _wait_answering(endpoint)
        yield Floor(process.pid, [int(pid) for pid, _ in found], [endpoint for _, endpoint in found])
    finally:
        _end(process)
        process.stdout.close()


@contextmanager
def etcd(folder: Path, program: str = "etcd") -> Iterator[Running]:
    """Run three etcd members. Yields once all are healthy. The leader's address is the first."""
    names = ["e1", "e2", "e3"]
    ports = free_ports(6)
    peers = {name: f"http://127.0.0.1:{port}" for name, port in zip(names, ports[:3], strict=True)}
    clients = {name: f"http://127.0.0.1:{port}" for name, port in zip(names, ports[3:], strict=True)}
    cluster = ",".join(f"{name}={url}" for name, url in peers.items())
    running = []
    try:
        for name in names:
            home = folder / name
            home.mkdir(parents=True)
            running.append(
                _start(
                    program,
                    "--name",
                    name,
                    "--data-dir",
                    str(home),
                    "--initial-cluster",
                    cluster,
                    "--initial-advertise-peer-urls",
                    peers[name],
                    "--listen-peer-urls",
                    peers[name],
                    "--advertise-client-urls",
                    clients[name],
                    "--listen-client-urls",
                    clients[name],
                    "--quota-backend-bytes",
                    str(8 << 30),
                    folder=home,
                )
            )
        for port in ports[3:]:
            _wait_listening(port)
        for url in clients.values():
            _wait_healthy(url)
        urls = sorted(clients.values(), key=lambda url: not _leads(url))
        yield Running([url.removeprefix("http://") for url in urls], [each.pid for each in running])
    finally:
        for process in running:
            _end(process)


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder that is removed afterwards. It is under the working directory, because /tmp may not be on a
    real disk."""
    reports = Path.cwd() / "reports"
    reports.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="scratch-", dir=reports))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _python_server(module: str, folder: Path) -> Iterator[str]:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    with _process(sys.executable, "-m", module, address, folder=folder):
        _wait_listening(port)
        yield address


@contextmanager
def _process(program: str, *arguments: str, folder: Path) -> Iterator[int]:
    process = _start(program, *arguments, folder=folder)
    try:
        yield process.pid
    finally:
        _end(process)


def _start(program: str, *arguments: str, folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{Path(program).name}.log").open("wb") as log:
        command = [shutil.which(program, path=_path()) or program, *arguments]
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def _end(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_listening(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"nobody listens on port {port} within {START_S} s")


def _wait_answering(endpoint: str) -> None:
    """Wait until a process of the floor answers. It listens long before it serves."""
    host, _, port = endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), START_S) as connection:
        connection.sendall(b"*1\r\n$4\r\nPING\r\n")
        if not connection.recv(64):
            raise RuntimeError(f"the floor's process at {endpoint} has ended")


def _wait_healthy(url: str) -> None:
    """Wait until a member of etcd has a leader."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=START_S) as answer:
            if json.load(answer)["health"] == "true":
                return
        time.sleep(0.2)
    raise TimeoutError(f"etcd at {url} is not healthy within {START_S} s")


def _leads(url: str) -> bool:
    """Return True if a member of etcd is the leader."""
    asked = urllib.request.Request(f"{url}/v3/maintenance/status", data=b"{}", method="POST")
    with urllib.request.urlopen(asked, timeout=START_S) as answer:
        status = json.load(answer)
    return bool(status["leader"] == status["header"]["member_id"])
