"""Fixtures of the tests of placement."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.env.real import real_env
from kvstore.server.placement import steward as module
from tests.server.placement.stewards import World


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(module, "TICK_S", 0.005)
    env = real_env(tmp_path)
    yield World(env)
    await env.nursery.close()
