"""Golden scripts: our Redis port gives the recorded replies of a redis-server, or the script says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.redis.compare import same
from tests.server.redis.playing import OF_TRANSACTIONS, SCRIPTS, check
from tests.server.redis.resp_port import redis_port
from tests.server.redis.script import Script
from tests.server.redis.transacting import Transacting


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.title)
async def test_replies_equal_those_of_a_redis_server(tmp_path: Path, script: Script) -> None:
    async with redis_port(tmp_path, partitions=1) as resp, resp.raw() as client:
        await check(client, script)


@pytest.mark.parametrize("script", OF_TRANSACTIONS, ids=lambda script: script.title)
async def test_replies_are_equal_with_transactions_over_partitions(tmp_path: Path, script: Script) -> None:
    async with redis_port(tmp_path, transactions_across_slots=True) as resp, resp.raw() as client:
        Transacting(resp.backend)
        await check(client, script)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.title)
async def test_declared_difference_is_a_difference(script: Script) -> None:
    for step in script.steps:
        assert not step.ours or not await same(step, step.ours, step.theirs), step.request
