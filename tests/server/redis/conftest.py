"""A Redis port on one in-memory partition."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.server.redis.resp_port import RespPort, redis_port


@pytest.fixture
async def resp(tmp_path: Path) -> AsyncIterator[RespPort]:
    async with redis_port(tmp_path) as opened:
        yield opened
