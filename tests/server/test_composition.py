"""A node whose start fails leaves nothing open, because its process retries as often as needed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.env.real import real_env
from kvstore.env.secret import ClusterSecret
from kvstore.errors import ConfigError
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.server.composition import serve
from kvstore.server.config import NodeConfig, Role
from kvstore.server.engines import Engines


async def test_failed_start_leaves_no_task(tmp_path: Path) -> None:
    env = real_env(tmp_path)
    config = NodeConfig(
        id="n1", zookeeper="h:1", data_dir=tmp_path, secret_file=tmp_path / "s", roles=(Role.SERVER,), insecure=True
    )
    engines = Engines(env.disk, config.partition, pytest.fail)
    store, secret = MemoryStore(MemoryTree()), ClusterSecret((bytes(32),))
    with pytest.raises(ConfigError, match="holds no cluster"):
        async with serve(config, env=env, store=store, secret=secret, engines=engines):
            pass
    left = {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}
    assert not left
