"""A node that is stopped while it starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from kvstore.server import node as module
from kvstore.server.node import started_or_none
from tests.meta.drivers import TestNursery


@pytest.fixture(autouse=True)
def no_end_of_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "end_process", lambda why: None)


async def test_a_start_that_waits_for_ever_is_given_up_when_the_node_is_told_to_stop() -> None:
    """It waits for a ring, or for the end of another process of its id; and only SIGKILL ended it."""
    waits, stop, left = asyncio.Event(), asyncio.Event(), []

    @asynccontextmanager
    async def starts() -> AsyncIterator[str]:
        try:
            waits.set()
            await asyncio.Event().wait()
            yield "never"
        finally:
            await asyncio.sleep(0)
            left.append("in order")

    async with AsyncExitStack() as stack:
        starting = asyncio.create_task(started_or_none(TestNursery(), stack, starts(), stop))
        await waits.wait()
        assert not starting.done()
        stop.set()
        assert await starting is None
    assert left == ["in order"]


async def test_what_has_started_is_left_by_whoever_has_the_stack() -> None:
    left = []

    @asynccontextmanager
    async def starts() -> AsyncIterator[str]:
        yield "node"
        left.append("in order")

    async with AsyncExitStack() as stack:
        assert await started_or_none(TestNursery(), stack, starts(), asyncio.Event()) == "node"
        assert left == []
    assert left == ["in order"]


async def test_a_start_that_fails_is_told() -> None:
    @asynccontextmanager
    async def starts() -> AsyncIterator[str]:
        raise OSError("the address is taken")
        yield "never"

    async with AsyncExitStack() as stack:
        with pytest.raises(OSError, match="taken"):
            await started_or_none(TestNursery(), stack, starts(), asyncio.Event())
