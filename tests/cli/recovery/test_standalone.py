"""`kvstore autorecovery run` with an in-memory metadata store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvstore.autorecovery.auditor import Auditor
from kvstore.autorecovery.worker import Worker
from kvstore.cli.cluster import ClusterOptions, Tools
from kvstore.cli.recovery import standalone
from kvstore.env.real import EXIT_FATAL, real_env
from kvstore.errors import MetadataError, MetadataUnavailable, MetadataUnknown, NoSuchNode
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from tests.commands import kvstore
from tests.waiting import PATIENCE_S


@pytest.fixture
def left_over(loggers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Votes that existed when the work of the command had ended, while its session was alive."""
    found: list[str] = []

    def with_tools(_: ClusterOptions, work: Callable[[Tools], Awaitable[bool]]) -> bool:
        async def main() -> bool:
            store, env = MemoryStore(), real_env(tmp_path, name="tool")
            async with asyncio.timeout(PATIENCE_S):
                has_failed = await work(Tools(env, store))
            found.extend(await votes(store))
            await env.nursery.close()
            return has_failed

        return asyncio.run(main())

    monkeypatch.setattr(standalone, "with_tools", with_tools)
    return found


async def votes(store: MemoryStore) -> list[str]:
    try:
        return await store.children(paths.AUDITOR_VOTES)
    except NoSuchNode:
        return []


@pytest.mark.parametrize(("part", "task"), [(Auditor, "_audit_on_request"), (Worker, "_follow_switch")])
def test_failing_task_ends_the_command_and_frees_the_auditor_role(
    part: type, task: str, left_over: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead auditor would keep the role for the whole cluster, as its session lives on."""
    look, elected = Auditor._is_elected, asyncio.Event()

    async def looked(auditor: Auditor) -> bool:
        if is_auditor := await look(auditor):
            elected.set()
        return is_auditor

    async def fails(_: Any) -> NoReturn:
        await elected.wait()
        raise RuntimeError("nobody expected it")

    monkeypatch.setattr(Auditor, "_is_elected", looked)
    monkeypatch.setattr(part, task, fails)
    done = kvstore("autorecovery", "run", "--metadata", "zk:1/kv")
    assert done.returncode == EXIT_FATAL
    assert "failed, stopping: RuntimeError('nobody expected it')" in done.stderr
    assert left_over == []


@pytest.mark.parametrize("error", [MetadataUnavailable, MetadataUnknown])
def test_worker_starts_although_its_first_connections_break(
    loggers: None, monkeypatch: pytest.MonkeyPatch, error: type[MetadataError]
) -> None:
    """Regression: a slow etcd ended the worker before it had begun, although a running worker reconnects."""
    monkeypatch.setattr(standalone, "START_AGAIN_S", 0.0)
    broken = [error(f"attempt {number}") for number in range(standalone.START_TRIES)]

    def with_tools(*_: object) -> bool:
        if broken:
            raise broken.pop()
        return False

    monkeypatch.setattr(standalone, "with_tools", with_tools)
    done = kvstore("autorecovery", "run", "--metadata", "etcd://127.0.0.1:1/kv")
    assert done.returncode == 1
    assert done.stderr.count("trying again") == standalone.START_TRIES - 1
    assert kvstore("autorecovery", "run", "--metadata", "etcd://127.0.0.1:1/kv").returncode == 0
    broken.append(error("once"))
    assert kvstore("autorecovery", "run", "--metadata", "etcd://127.0.0.1:1/kv").returncode == 0
