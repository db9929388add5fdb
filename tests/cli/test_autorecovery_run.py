"""`kvstore autorecovery run` beside a metadata store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvstore.autorecovery.auditor import Auditor
from kvstore.autorecovery.worker import Worker
from kvstore.cli.cluster import Tools
from kvstore.cli.recovery import standing
from kvstore.env.real import EXIT_FATAL, real_env
from kvstore.errors import NoSuchNode
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from tests.commands import kvstore
from tests.waiting import PATIENCE_S


@pytest.fixture
def left_over(loggers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Votes that were there as the command's work had ended, while its session lived."""
    found: list[str] = []

    def with_tools(_: Path, __: str | None, work: Callable[[Tools], Awaitable[bool]], ___: str | None) -> bool:
        async def main() -> bool:
            store, env = MemoryStore(), real_env(tmp_path, name="tool")
            async with asyncio.timeout(PATIENCE_S):
                has_failed = await work(Tools(env, store))
            found.extend(await votes(store))
            await env.nursery.close()
            return has_failed

        return asyncio.run(main())

    monkeypatch.setattr(standing, "with_tools", with_tools)
    return found


async def votes(store: MemoryStore) -> list[str]:
    try:
        return await store.children(paths.AUDITOR_VOTES)
    except NoSuchNode:
        return []


@pytest.mark.parametrize(("part", "task"), [(Auditor, "_audit_on_request"), (Worker, "_follow_switch")])
def test_a_failing_task_ends_the_command_and_frees_the_auditor_role(
    part: type, task: str, left_over: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead auditor would keep the office for the whole cluster: its session lives."""
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
