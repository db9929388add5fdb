"""Servers in tests have long timeouts, so that a machine that pauses for seconds changes no answer. Tests of limits set
their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.env import Env
from kvstore.env.real import real_env
from kvstore.server.feed import feeds
from kvstore.server.grpc import ring_admin
from kvstore.server.peer import abandoned, link, links
from kvstore.server.routing import redirects, router
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "WAIT_S", PATIENCE_S)
    monkeypatch.setattr(redirects, "WAIT_S", PATIENCE_S)
    monkeypatch.setattr(links, "CONNECT_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(link, "OPERATION_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(abandoned, "OPERATION_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(link, "SILENCE_S", PATIENCE_S)
    monkeypatch.setattr(feeds, "OPEN_S", PATIENCE_S)
    for limit in ("ASK_S", "ASK_FOR_STATUS_S"):
        monkeypatch.setattr(ring_admin, limit, PATIENCE_S)


@pytest.fixture
async def env(tmp_path: Path) -> AsyncIterator[Env]:
    made = real_env(tmp_path)
    yield made
    await made.nursery.close()
