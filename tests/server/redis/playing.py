"""Plays golden scripts (script.py) to a Redis port and compares the replies with the recorded ones."""

from __future__ import annotations

import asyncio

from tests.server.redis.compare import same
from tests.server.redis.resp_port import Raw
from tests.server.redis.script import GOLDEN, Script, Step, escaped, read, reply
from tests.waiting import PATIENCE_S

SCRIPTS = [script for path in sorted(GOLDEN.glob("redis_*.txt")) for script in read(path)]
_ATOMIC = {b"EXEC", b"MSETNX", b"RENAME", b"RENAMENX", b"COPY"}
"""Commands that are transactions if their keys are in several partitions."""
OF_TRANSACTIONS = [
    script for script in SCRIPTS if any(word.upper() in _ATOMIC for step in script.steps for word in step.words[:1])
]
"""The scripts with such commands."""


async def check(client: Raw, script: Script) -> None:
    """Play a script to a store without keys. Raises AssertionError with every difference."""
    differences: list[str] = []
    for step in script.steps:
        answered = await _answers(client, step)
        expected = step.ours or step.theirs
        if not await same(step, answered, expected):
            lines = [f"  expected {escaped(each)}" for each in expected]
            differences += [step.request, *lines, *(f"  answered {escaped(each)}" for each in answered)]
    assert not differences, "\n" + "\n".join(differences)


async def _answers(client: Raw, step: Step) -> list[bytes]:
    client.writer.write(step.data)
    found: list[bytes] = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            for _ in step.ours or step.theirs:
                found.append(await reply(client.reader))
    except TimeoutError:
        pass  # too few, which is a difference
    return found
