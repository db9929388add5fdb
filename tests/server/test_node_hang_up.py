"""SIGHUP, with which an operator notifies all nodes of new certificates."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from kvstore.env.real import real_env
from kvstore.server.node import _follow_certificates


async def test_hang_up_does_not_end_node_without_certificates(tmp_path: Path) -> None:
    loop, env = asyncio.get_running_loop(), real_env(tmp_path, name="n1")
    _follow_certificates(None, env, loop)
    await env.nursery.close()
    assert loop.remove_signal_handler(signal.SIGHUP), "else the signal's default holds: the process ends"
