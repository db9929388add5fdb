"""Shared answers about a server: made once for all waiting clients, after they asked, and seldom."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.server.redis.shared_answer import PAUSE_FACTOR, SharedAnswer


class Pages:
    """Each takes a second by its own clock."""

    def __init__(self) -> None:
        self.time, self.made = 0.0, 0
        self.delays: list[float] = []

    def make(self) -> int:
        self.time += 1
        self.made += 1
        return self.made


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Pages:
    """Pages whose delays are recorded and not waited for."""
    found = Pages()

    def call_later(self: asyncio.BaseEventLoop, delay: float, callback: object, *arguments: object) -> object:
        found.delays.append(delay)
        found.time += delay
        return self.call_soon(callback, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", call_later)
    return found


async def test_waiting_clients_share_an_answer_and_later_ones_get_a_later_one(pages: Pages) -> None:
    fresh = SharedAnswer(pages.make, lambda: pages.time)
    assert await asyncio.gather(*(fresh.take() for _ in range(5))) == [1] * 5
    assert await fresh.take() == 2


async def test_answers_take_a_tenth_of_the_event_loop_at_most(pages: Pages) -> None:
    fresh = SharedAnswer(pages.make, lambda: pages.time)
    for _ in range(3):
        await fresh.take()
    assert pages.delays == [0, PAUSE_FACTOR, PAUSE_FACTOR]


async def test_waiting_clients_get_the_error_of_a_failed_answer(pages: Pages) -> None:
    def fail() -> int:
        raise ValueError("no")

    fresh = SharedAnswer(fail, lambda: pages.time)
    with pytest.raises(ValueError, match="no"):
        await fresh.take()
