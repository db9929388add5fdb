"""The supervisor of a machine's processes, with real nodes that wait for their metadata store."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from kvstore.devcluster.zookeeper import free_ports
from kvstore.env.disk import lock_dir
from kvstore.env.files.private import private_folder
from kvstore.server import host as module
from tests.server.test_supervisor import Ear
from tests.waiting import PATIENCE_S, wait_until_blocking

START = """
import sys
from pathlib import Path
from kvstore.cli.node.starting import start
from kvstore.server import host
host.HUNG_S, host.STOP_S = float(sys.argv[2]), 2.0
start(Path(sys.argv[1]))
"""
PROCESSES = 2


class Host:
    """A supervisor, its log, and its children."""

    def __init__(self, folder: Path, *, hung_s: float = 60.0, **environ: str) -> None:
        self.log = folder / "log"
        with self.log.open("wb") as log:
            file, self.http = node_file(folder)
            command = [sys.executable, "-c", START, str(file), str(hung_s)]
            self.process = subprocess.Popen(command, stderr=log, env={**os.environ, **environ})
        self.seen = psutil.Process(self.process.pid)

    def children(self) -> dict[str, int]:
        """Return the pids of the running nodes by id."""
        found = {}
        for each in self.seen.children():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                words = each.cmdline()
                if words and words[-1].startswith("id="):
                    found[words[-1].removeprefix("id=")] = each.pid
        return found

    def wait_for_children(self, *, without: int = 0) -> dict[str, int]:
        """Wait until all nodes run, and the node of the pid `without` does not."""
        wait_until_blocking(lambda: len(self.children()) == PROCESSES and without not in self.children().values())
        return self.children()

    def wait_for_log(self, pattern: str) -> None:
        wait_until_blocking(lambda: re.search(pattern, self.log.read_text()), what=pattern)

    def wait_for_pages(self) -> dict[str, int]:
        """Wait until each node answers HTTP requests, which it does while it waits for the metadata store. Return the
        pids by id."""
        for port in (self.http, self.http + 1):
            wait_until_blocking(lambda port=port: answers(port), what=f"port {port}")
        return self.wait_for_children()

    def close(self) -> None:
        left = self.seen.children(recursive=True) if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for each in left:
            if each.is_running():
                each.wait(PATIENCE_S)


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            return connection.recv(5) == b"HTTP/"
    except OSError:
        return False


def node_file(folder: Path, more: str = "") -> tuple[Path, int]:
    """Return the file of a machine, and the HTTP port of its first process."""
    secret, file, first = folder / "secret", folder / "node.toml", pairs_of_free_ports(4)
    secret.touch(mode=0o600)
    secret.write_text("0f" * 32, encoding="ascii")
    ports = zip(("bookie", "resp", "grpc", "http"), first, strict=True)
    file.write_text(
        f'id = "n1"\nprocesses = {PROCESSES}\nzookeeper = "127.0.0.1:1"\ndata_dir = "{folder}/n1"\n'
        f'secret_file = "{secret}"\n{more}' + "".join(f'{name} = "127.0.0.1:{port}"\n' for name, port in ports)
    )
    return file, first[-1]


def pairs_of_free_ports(count: int) -> list[int]:
    """Return ports that are free, and whose next port is free, too."""
    ports = set(free_ports(8 * count))
    found: list[int] = []
    for port in sorted(ports):
        if port + 1 in ports and port - 1 not in found:
            found.append(port)
    assert len(found) >= count
    return found[:count]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def start(**settings: object) -> Host:
        hosts.append(Host(tmp_path, **settings))  # type: ignore[arg-type]
        return hosts[-1]

    yield start
    for host in hosts:
        host.close()


class Signalled:
    """A process that only records its signals."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, which: int) -> None:
        self.signals.append(which)


async def test_process_without_descriptors_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would end the supervisor, and the other processes with it."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    monkeypatch.setattr(socket, "socketpair", refuse)
    child = module._Child(cast("Any", SimpleNamespace(id="n1")))
    assert "cannot be started" in await child._run_once(asyncio.Event())


async def test_silence_during_a_pause_of_the_machine_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor may continue before its processes do, and their messages are as late as its timer."""
    loop = asyncio.get_running_loop()
    began, passed = loop.time(), 0.0
    monkeypatch.setattr(loop, "time", lambda: began + passed)
    process, child = Signalled(), module._Child(cast("Any", SimpleNamespace(id="n1")))
    child._process = cast("Any", process)
    child._expect_message()

    async def turn(seconds: float) -> None:
        nonlocal passed
        passed += seconds
        for _ in range(3):
            await asyncio.sleep(0)

    await turn(10 * module.HUNG_S)
    assert not process.signals
    for _ in range(int(module.HUNG_S) - 1):
        await turn(1)
    assert not process.signals
    await turn(2)
    assert process.signals == [signal.SIGKILL]


def test_killed_process_is_started_again_alone(run: Callable[..., Host]) -> None:
    host = run()
    before = host.wait_for_children()
    assert before.keys() == {"n1", "n1.2"}
    os.kill(before["n1.2"], signal.SIGKILL)
    after = host.wait_for_children(without=before["n1.2"])
    assert after["n1"] == before["n1"]
    host.wait_for_log("process=n1.2 was ended by SIGKILL, starting it again")


def test_stopped_supervisor_stops_all_processes(run: Callable[..., Host]) -> None:
    host = run()
    pids = host.wait_for_pages().values()
    host.process.send_signal(signal.SIGTERM)
    assert host.process.wait(PATIENCE_S) == 0
    assert not any(map(psutil.pid_exists, pids))
    assert "killing what has not stopped" not in host.log.read_text()


def test_process_that_does_not_stop_is_killed(run: Callable[..., Host]) -> None:
    host = run()
    pids = host.wait_for_pages()
    os.kill(pids["n1.2"], signal.SIGSTOP)
    host.process.send_signal(signal.SIGTERM)
    assert host.process.wait(PATIENCE_S) == 0
    assert not any(map(psutil.pid_exists, pids.values()))
    host.wait_for_log("killing what has not stopped within 2 s")


def test_killed_supervisor_leaves_no_process(run: Callable[..., Host]) -> None:
    """Not even one that does not run at that moment."""
    host = run()
    pids = host.wait_for_pages()
    os.kill(pids["n1"], signal.SIGSTOP)
    host.process.kill()
    wait_until_blocking(lambda: not any(map(psutil.pid_exists, pids.values())))


def test_hung_process_is_killed_and_started_again(run: Callable[..., Host]) -> None:
    host = run(hung_s=15.0)
    before = host.wait_for_pages()
    os.kill(before["n1"], signal.SIGSTOP)
    after = host.wait_for_children(without=before["n1"])
    assert after["n1.2"] == before["n1.2"]
    host.wait_for_log("process=n1 hangs: no message for 15 s, killing it")


def test_hang_up_ends_no_process(run: Callable[..., Host]) -> None:
    host = run()
    before = host.wait_for_pages()
    host.process.send_signal(signal.SIGHUP)
    host.process.send_signal(signal.SIGHUP)
    assert host.wait_for_pages() == before
    os.kill(before["n1"], signal.SIGKILL)
    host.wait_for_children(without=before["n1"])


def test_hang_up_ends_no_process_that_is_starting(run: Callable[..., Host]) -> None:
    """A process that does not handle the signal yet would be ended by it."""
    host = run()
    before = host.wait_for_children()
    host.process.send_signal(signal.SIGHUP)
    assert host.wait_for_pages() == before


@pytest.fixture
def ear() -> Iterator[Ear]:
    found = Ear(f"@kvstore-host-{os.getpid()}")
    yield found
    found.close()


def wait_for_status(ear: Ear, pattern: str) -> None:
    wait_until_blocking(lambda: any(re.search(pattern, each) for each in ear.said), what=f"{pattern} in {ear.said}")


def test_status_names_the_error_that_ends_a_process(run: Callable[..., Host], tmp_path: Path, ear: Ear) -> None:
    used = tmp_path / "n1" / "process-2"
    private_folder(used)
    with closing(lock_dir(used)):
        host = run(NOTIFY_SOCKET=ear.address)
        reason = r"ended with exit code 1: .*is in use by another process .*, starting it again"
        wait_for_status(ear, rf"n1\.2: {reason}")
        host.wait_for_log(rf"process=n1\.2 {reason} in ")


def test_status_of_a_starting_process_names_its_last_end(run: Callable[..., Host], ear: Ear) -> None:
    """A process that keeps ending is starting most of the time."""
    host = run(NOTIFY_SOCKET=ear.address)
    os.kill(host.wait_for_pages()["n1.2"], signal.SIGKILL)
    wait_for_status(ear, r"n1\.2: starting[^;]*, after it was ended by SIGKILL")


def test_second_supervisor_of_a_directory_is_refused(run: Callable[..., Host]) -> None:
    host = run()
    host.wait_for_children()
    other = [sys.executable, "-m", "kvstore", "node", "run", "--config", str(host.log.with_name("node.toml"))]
    done = subprocess.run(other, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert f"is in use by another process (pid {host.process.pid})" in done.stderr
    assert len(host.children()) == PROCESSES


def test_process_inherits_no_file_of_the_supervisor(run: Callable[..., Host]) -> None:
    host = run()
    for pid in host.wait_for_pages().values():
        files = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
        assert not [each for each in files if "supervisor" in each]
        assert len([each for each in files if "memfd" in each]) == 1, "its configuration, as standard input"
        for child in psutil.Process(pid).children():
            links = {os.readlink(each) for each in Path(f"/proc/{child.pid}/fd").iterdir() if each.is_symlink()}
            assert not [each for each in links if "memfd" in each]


def test_restarted_process_keeps_the_configuration_of_the_others(run: Callable[..., Host]) -> None:
    host = run()
    before = host.wait_for_pages()
    host.log.with_name("node.toml").write_text("no TOML")
    os.kill(before["n1.2"], signal.SIGKILL)
    after = host.wait_for_children(without=before["n1.2"])
    assert host.wait_for_pages() == after


def test_wrong_file_is_refused_with_all_faults(tmp_path: Path) -> None:
    file, _ = node_file(tmp_path, 'bookie_id = "h:3181"\n[partition]\nmemory_bytes = 20000000\n')
    lines = file.read_text().replace("[partition]\nmemory_bytes = 20000000\n", "")
    file.write_text(f"{lines}[partition]\nmemory_bytes = 20000000\n")
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "node", "run", "--config", str(file)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "bookie_id: expected none with several processes" in done.stderr
    assert "partition.memory_bytes: expected" in done.stderr
    assert not (tmp_path / "n1").exists()
