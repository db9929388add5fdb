"""Golden scripts: our Redis port gives the recorded replies of a redis-server, or the script says why not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.server.redis.compare import Answer, Side, alike
from tests.server.redis.resp_port import Raw, RespPort, redis_port
from tests.server.redis.script import END, GOLDEN, Script, Step, escaped, gist, read, reply
from tests.waiting import PATIENCE_S

SCRIPTS = [script for path in sorted(GOLDEN.glob("redis_*.txt")) for script in read(path)]

FAR_AWAY = 2_000_000_000
"""Only EXPIREAT and similar commands set such a time: the remaining time depends on the day."""


@pytest.fixture
async def resp(tmp_path: Path) -> AsyncIterator[RespPort]:
    async with redis_port(tmp_path, partitions=1) as opened:
        yield opened


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.title)
async def test_replies_equal_those_of_a_redis_server(resp: RespPort, script: Script) -> None:
    differences: list[str] = []
    async with resp.raw() as client:
        for step in script.steps:
            answered = await answers(client, step)
            expected = step.ours or step.theirs
            if not await same(step, answered, expected):
                lines = [f"  expected {escaped(each)}" for each in expected]
                differences += [step.request, *lines, *(f"  answered {escaped(each)}" for each in answered)]
    assert not differences, "\n" + "\n".join(differences)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.title)
async def test_declared_difference_is_a_difference(script: Script) -> None:
    for step in script.steps:
        assert not step.ours or not await same(step, step.ours, step.theirs), step.request


async def answers(client: Raw, step: Step) -> list[bytes]:
    client.writer.write(step.data)
    found: list[bytes] = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            for _ in step.ours or step.theirs:
                found.append(await reply(client.reader))
    except TimeoutError:
        pass  # too few, which is a difference
    return found


async def same(step: Step, ours: list[bytes], theirs: list[bytes]) -> bool:
    if len(ours) != len(theirs):
        return False
    words = step.words
    if not words:
        return ours == theirs
    (mine,), (other,) = ours, theirs
    if END in (mine, other):
        return mine == other
    if step.is_loose:
        return gist(mine) == gist(other)
    one, two = await parsed(mine), await parsed(other)
    if words[0].upper() in (b"TTL", b"PTTL") and one.kind == two.kind == ":" and int(one.value) > FAR_AWAY:
        return int(two.value) > FAR_AWAY  # the time until a date in the next century, seen on two days
    return alike(words, one, two)


async def parsed(data: bytes) -> Answer:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    return await Side(reader, None).read()  # type: ignore[arg-type]
