"""Stopping a node while it starts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.env.real import EXIT_FATAL
from kvstore.errors import MetadataUnavailable
from kvstore.server import node as module
from kvstore.server.config import NodeConfig
from kvstore.server.node import Process, _connect, started_or_none
from tests.meta.drivers import TestNursery
from tests.pipes import full_pipe
from tests.waiting import PATIENCE_S


@dataclass
class Waiting:
    """The part of a process that states what it waits for."""

    waits_for: str
    watchdog: Any = None


@pytest.fixture(autouse=True)
def no_end_of_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "end_process", lambda why: None)


async def test_waiting_start_is_abandoned_when_node_is_stopped() -> None:
    """It waits for a ring, or for the end of another process with its ID. Only SIGKILL used to end it."""
    waits, stop, left = asyncio.Event(), asyncio.Event(), []

    @asynccontextmanager
    async def starts() -> AsyncIterator[str]:
        try:
            waits.set()
            await asyncio.Event().wait()
            yield "never"
        finally:
            await asyncio.sleep(0)
            left.append("in order")

    async with AsyncExitStack() as stack:
        starting = asyncio.create_task(started_or_none(TestNursery(), stack, starts(), stop))
        await waits.wait()
        assert not starting.done()
        stop.set()
        assert await starting is None
    assert left == ["in order"]


async def test_started_context_is_left_by_its_stack() -> None:
    left = []

    @asynccontextmanager
    async def starts() -> AsyncIterator[str]:
        yield "node"
        left.append("in order")

    async with AsyncExitStack() as stack:
        assert await started_or_none(TestNursery(), stack, starts(), asyncio.Event()) == "node"
        assert left == []
    assert left == ["in order"]


async def test_failed_start_is_reported() -> None:
    @asynccontextmanager
    async def starts() -> AsyncIterator[str]:
        raise OSError("the address is taken")
        yield "never"

    async with AsyncExitStack() as stack:
        with pytest.raises(OSError, match="taken"):
            await started_or_none(TestNursery(), stack, starts(), asyncio.Event())


async def test_node_waiting_for_metadata_store_reports_it_and_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An attempt to connect takes up to 15 s, during which SIGTERM used to be ignored."""
    tries, hangs, stop = iter((MetadataUnavailable("not yet"),)), asyncio.Event(), asyncio.Event()

    async def connect(*_: object, **__: object) -> Any:
        for error in tries:
            raise error
        hangs.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(module, "connect", connect)
    config, process = NodeConfig(id="n1", zookeeper="h:1", data_dir=Path(), secret_file=Path()), Waiting("room")
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        connecting = asyncio.create_task(_connect(config, TestNursery(), stack, cast("Process", process), stop))
        await hangs.wait()
        assert process.waits_for == "the metadata store"
        stop.set()
        assert await connecting is None


async def test_metadata_store_is_closed_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = []

    class Store:
        async def close(self) -> None:
            closed.append(True)

    async def connect(*_: object, **__: object) -> Store:
        return Store()

    monkeypatch.setattr(module, "connect", connect)
    config, process = NodeConfig(id="n1", zookeeper="h:1", data_dir=Path(), secret_file=Path()), Waiting("room")
    async with AsyncExitStack() as stack:
        store = await _connect(config, TestNursery(), stack, cast("Process", process), asyncio.Event())
        assert (isinstance(store, Store), process.waits_for, closed) == (True, "", [])
    assert closed == [True]


FAILING = """
import logging, sys
from pathlib import Path
from kvstore import config
from kvstore.server import node
from kvstore.server.config import NodeConfig

def fails(main):
    main.close()
    for number in range(200):
        logging.getLogger(f"kvstore.{number}").error("%s", "x" * 1000)
    raise ValueError("x" * 8000)

node.END_S = 0.5
node.run = fails
node.run_node(config.read(Path(sys.argv[1]), NodeConfig))
"""


def test_failing_node_ends_when_stderr_is_not_read(tmp_path: Path) -> None:
    secret, config = tmp_path / "secret", tmp_path / "node.toml"
    secret.touch(mode=0o600)
    secret.write_text("0f" * 32, encoding="ascii")
    config.write_text(
        f'id = "n1"\nzookeeper = "127.0.0.1:1"\ndata_dir = "{tmp_path}/n1"\nsecret_file = "{secret}"\n',
        encoding="utf-8",
    )
    with (
        full_pipe() as writer,
        subprocess.Popen([sys.executable, "-c", FAILING, str(config)], stderr=writer) as process,
    ):
        try:
            assert process.wait(timeout=PATIENCE_S) == EXIT_FATAL
        finally:
            process.kill()
