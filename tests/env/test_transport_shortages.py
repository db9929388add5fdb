"""A process that lacks descriptors, memory or ports (docs/protocol.md, B39)."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from kvstore.env import transport
from kvstore.env.log_config import LogOutput
from kvstore.env.transport import TcpTransport
from kvstore.server import node
from kvstore.server.config import NodeConfig

LACKING = ("EMFILE", "ENFILE", "ENOBUFS", "ENOMEM", "EADDRNOTAVAIL")


class Handler(asyncio.Protocol):
    """A handler of a connection that sends nothing."""


def refuse_connections(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> list[int]:
    """Make this many attempts to connect fail with this errno. Returns the list that counts the attempts."""
    attempts: list[int] = []
    number, connected = getattr(errno, name), TcpTransport._connected

    async def refused(self: TcpTransport, *args: Any) -> Any:
        attempts.append(number)
        if len(attempts) <= times:
            raise OSError(number, os.strerror(number))
        return await connected(self, *args)

    monkeypatch.setattr(TcpTransport, "_connected", refused)
    monkeypatch.setattr(transport, "SHORTAGE_S", 0.0)
    return attempts


@pytest.mark.parametrize("name", LACKING)
async def test_connect_retries_when_this_side_lacks_resources(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    attempts = refuse_connections(monkeypatch, name, 3)
    tcp = TcpTransport()
    listener = await tcp.listen("127.0.0.1:0", Handler)
    stream = await tcp.connect(listener.address, Handler())
    assert len(attempts) == 4
    stream.abort()
    listener.close()


async def test_connect_fails_in_the_end_when_this_side_lacks_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = refuse_connections(monkeypatch, "EMFILE", 1_000)
    with pytest.raises(OSError, match="Too many open files"):
        await TcpTransport().connect("127.0.0.1:1", Handler())
    assert len(attempts) == transport.SHORTAGE_ATTEMPTS + 1


@pytest.mark.parametrize("name", ["ECONNREFUSED", "EHOSTUNREACH", "ETIMEDOUT"])
async def test_connect_does_not_retry_when_the_other_side_fails(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    attempts = refuse_connections(monkeypatch, name, 1)
    with pytest.raises(OSError, match="Errno"):
        await TcpTransport().connect("127.0.0.1:1", Handler())
    assert len(attempts) == 1


def refuse_log_files(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    number = getattr(errno, name)

    def refused(_config: LogOutput, *, process: str, directory: Path | None = None, is_shared: bool = False) -> str:
        if directory is not None:
            raise OSError(number, os.strerror(number))
        return f"standard error of {process}"

    monkeypatch.setattr(node, "open_log", refused)


def config_of(home: Path) -> NodeConfig:
    return NodeConfig(
        id="n1", data_dir=home, secret_file=home / "secret", zookeeper="127.0.0.1:2181", log_dir=home / "logs"
    )


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EFBIG", "ENOMEM", "EMFILE"])
def test_node_logs_to_standard_error_when_its_log_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_log_files(monkeypatch, name)
    output: Any = node._opened_log(config_of(tmp_path))
    assert output == "standard error of n1"
    assert f"{tmp_path}/logs" in caplog.text


@pytest.mark.parametrize("name", ["EIO", "EROFS", "EACCES"])
def test_node_ends_when_its_log_directory_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    refuse_log_files(monkeypatch, name)
    with pytest.raises(OSError, match="Errno"):
        node._opened_log(config_of(tmp_path))
