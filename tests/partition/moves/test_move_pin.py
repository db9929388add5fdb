"""A move's pin is released although its replica stops while the metadata store is unavailable: the session may last for
months."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvstore.env.real import real_env
from kvstore.errors import MetadataUnavailable
from kvstore.partition.moves import move_pin
from kvstore.partition.moves.move_pin import MovePin
from kvstore.types import LedgerId, PartitionId
from tests.waiting import wait_until


class Away:
    """Pins in a metadata store that answers, or does not."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.is_away = False
        self.tries = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def hold(self, partition: PartitionId, name: str, ledger: LedgerId) -> None:
        self.names.add(name)
        await self.may_answer.wait()

    async def release(self, partition: PartitionId, name: str) -> None:
        self.tries += 1
        if self.is_away:
            raise MetadataUnavailable("away")
        self.names.discard(name)


async def test_pin_is_released_when_the_store_returns_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(move_pin, "RELEASE_S", 0.01)
    server_env, store = real_env(tmp_path), Away()
    pins: Any = store
    replica = server_env.nursery.child("replica")
    held = MovePin(server_env, pins, count(1))
    await held.hold(PartitionId("p1"), "move", LedgerId(3))
    store.is_away = True
    replica.spawn(held.release(), name="move")

    async def is_tried() -> bool:
        return store.tries > 0

    await wait_until(is_tried)
    await replica.close()
    await held.release()
    store.is_away = False

    async def is_given_back() -> bool:
        return not store.names

    await wait_until(is_given_back)
    await server_env.nursery.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("releases", [False, True])
async def test_pin_is_released_when_closed_during_hold_or_release(tmp_path: Path, releases: bool) -> None:
    server_env, store = real_env(tmp_path), Away()
    pins: Any = store
    replica = server_env.nursery.child("replica")
    held = MovePin(server_env, pins, count(1))
    if releases:
        await held.hold(PartitionId("p1"), "move", LedgerId(3))
    released, store.may_answer = store.release, asyncio.Event()

    async def release(partition: PartitionId, name: str) -> None:
        await store.may_answer.wait()
        await released(partition, name)

    pins.release = release
    work = held.release() if releases else held.hold(PartitionId("p1"), "move", LedgerId(3))
    replica.spawn(work, name="move")
    await asyncio.sleep(0)
    assert store.names
    await replica.close()
    await held.release()
    store.may_answer.set()

    async def is_given_back() -> bool:
        return not store.names

    await wait_until(is_given_back)
    await server_env.nursery.close()
