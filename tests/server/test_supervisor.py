"""Notifications of a node to its supervisor (sd_notify): waiting, ready, loop running, stopping."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.devcluster.zookeeper import free_ports
from kvstore.server.supervisor import STATUS_CHARS_MAX, Supervisor, supervisor_of
from tests.waiting import wait_until, wait_until_blocking
from tests.zookeeper_fixture import zookeeper, zookeeper_chroot

__all__ = ["zookeeper", "zookeeper_chroot"]

KVSTORE = [sys.executable, "-m", "kvstore"]


class Ear:
    """A supervisor's socket, and the messages that it received."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._received: list[str] = []

    @property
    def messages(self) -> list[str]:
        """Return all messages since the start, including pings."""
        while True:
            try:
                self._received.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return self._received

    @property
    def said(self) -> list[str]:
        """Return all messages without pings."""
        return [each for each in self.messages if each != "WATCHDOG=1"]

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[Ear]:
    found = Ear(str(tmp_path / "notify"))
    yield found
    found.close()


def test_reason_with_non_utf8_path_is_sent(ear: Ear) -> None:
    """The reason of an expired certificate with such a path used to end the node."""
    supervisor = Supervisor(ear.address, None)
    supervisor._report_status(["the certificate in /etc/\udcff.pem has expired"])
    assert ear.said == ["STATUS=the certificate in /etc/?.pem has expired"]


@contextmanager
def following(supervisor: Supervisor, not_ready: Callable[[], list[str]], stop: asyncio.Event) -> Iterator[None]:
    task = asyncio.get_running_loop().create_task(supervisor.follow(not_ready, stop))
    try:
        yield
    finally:
        task.cancel()


async def test_supervisor_receives_changes_and_readiness_once(ear: Ear) -> None:
    reasons, stop = ["starting:\nwaits", "p1 has no state"], asyncio.Event()
    with following(Supervisor(ear.address, watchdog_s=0.03), lambda: list(reasons), stop):

        async def received(text: str) -> None:
            async def is_heard() -> bool:
                return ear.said[-1:] == [text]

            await wait_until(is_heard, what=text)

        await received("STATUS=starting: waits; p1 has no state")
        reasons.clear()
        await received("READY=1\nSTATUS=ready")
        reasons.append("x" * 9999)
        await received(f"STATUS={'x' * STATUS_CHARS_MAX}")
        reasons.clear()
        await received("STATUS=ready")
        pings = ear.messages.count("WATCHDOG=1")
        stop.set()
        await received("STOPPING=1\nSTATUS=stopping")

        async def is_alive() -> bool:
            return ear.messages.count("WATCHDOG=1") > pings + 3

        await wait_until(is_alive, what="pings while it stops")
    assert len(ear.said) == 5, "nothing twice"


async def test_no_pings_without_a_watchdog(ear: Ear) -> None:
    stop = asyncio.Event()
    stop.set()
    with following(Supervisor(ear.address), list, stop):

        async def is_said() -> bool:
            return bool(ear.messages)

        await wait_until(is_said)
    assert ear.messages == ["STOPPING=1\nSTATUS=stopping"]


async def test_lost_supervisor_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def not_ready() -> list[str]:
        asked.append(1)
        return [str(len(asked))]

    with following(Supervisor(str(tmp_path / "nobody"), watchdog_s=0.03), not_ready, asyncio.Event()):

        async def has_gone_on() -> bool:
            return len(asked) > 3

        await wait_until(has_gone_on)
    assert [each.levelname for each in caplog.records] == ["WARNING"]


def test_supervisor_comes_from_environment_and_is_not_inherited() -> None:
    environ = {"NOTIFY_SOCKET": "@abstract", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "7", "HOME": "/"}
    mine = supervisor_of(environ, pid=7)
    assert mine is not None
    assert vars(mine)["_watchdog_s"] == 3.0
    assert environ == {"HOME": "/"}
    assert supervisor_of(environ) is None
    for wrong in ("relative", "", "/", "@"):
        assert supervisor_of({"NOTIFY_SOCKET": wrong}) is None
    for words in ({"WATCHDOG_USEC": "3", "WATCHDOG_PID": "8"}, {"WATCHDOG_USEC": "-1"}, {"WATCHDOG_USEC": "0"}, {}):
        found = supervisor_of({"NOTIFY_SOCKET": "/run/x", **words}, pid=7)
        assert found is not None
        assert vars(found)["_watchdog_s"] is None


def node_file(folder: Path, address: str, roles: str) -> Path:
    file, ports = folder / "node.toml", free_ports(4)
    lines = [
        f'{name} = "127.0.0.1:{port}"\n' for name, port in zip(("bookie", "resp", "grpc", "http"), ports, strict=True)
    ]
    file.write_text(
        f'id = "n1"\nzookeeper = "{address}"\ndata_dir = "{folder}/n1"\nsecret_file = "{folder}/secret"\n'
        f"roles = {roles}\n{''.join(lines)}"
    )
    return file


@pytest.mark.needs_zookeeper
def test_real_node_reports_readiness_and_stop(zookeeper_chroot: str, tmp_path: Path) -> None:
    secret = ("--secret-file", str(tmp_path / "secret"), "--zookeeper", zookeeper_chroot)
    found = [*KVSTORE, "cluster", "init", "--unsafe", "--node", "n1", "--replicas", "1", *secret]
    subprocess.run(found, check=True, capture_output=True)
    ear = Ear(f"@kvstore-test-{os.getpid()}")
    environ = os.environ | {"NOTIFY_SOCKET": ear.address, "WATCHDOG_USEC": "600000"}
    command = [*KVSTORE, "node", "run", "--config", str(node_file(tmp_path, zookeeper_chroot, '["bookie"]'))]
    with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as node:
        try:
            wait_until_blocking(lambda: "READY=1\nSTATUS=ready" in ear.messages, what="READY=1")
            wait_until_blocking(lambda: ear.messages.count("WATCHDOG=1") > 2, what="pings")
            node.send_signal(signal.SIGTERM)
            assert node.wait(timeout=60) == 0
            assert "STOPPING=1\nSTATUS=stopping" in ear.said
        finally:
            node.kill()
            ear.close()
