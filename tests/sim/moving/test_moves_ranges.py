"""Ranges are read page by page in both directions, and deleted, while keys move and leaders die."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.errors import OutcomeUnknown, Retryable, Unavailable
from kvstore.partition.state import commands
from kvstore.proto import kv_pb2
from kvstore.ring import MURMUR3
from kvstore.server.grpc.scan import one_page
from kvstore.server.routing.scan_slots import ScanSlot
from kvstore.types import PartitionId
from tests.sim.moving.moves import LONG_PAUSE_S, Users, World, play
from tests.sim.moving.moves_accidents import asker, crash
from tests.sim.nodes import Node

pytestmark = pytest.mark.sim

THERE = sorted(b"always%03d" % number for number in range(60))
ATTEMPT_S, ATTEMPTS_MAX = 5.0, 200


def somebody(world: World, turn: int) -> Node:
    """Return a node that is up."""
    up = [node for node in world.cluster.nodes if node.endpoint is not None and node.served is not None]
    return up[turn % len(up)] if up else world.cluster.nodes[0]


async def ask(world: World, op: Any, partition: PartitionId | None, turn: int) -> Any:
    """Send an operation to a node once. Raises StoreError; Unavailable if the node dies meanwhile."""
    node = somebody(world, turn)
    if node.endpoint is None:
        raise Unavailable("no node is up")
    try:
        async with asyncio.timeout(ATTEMPT_S):
            return await asker(node)(op, partition)
    except TimeoutError:
        raise Unavailable("no answer") from None


async def page_of(world: World, request: kv_pb2.PageRequest) -> kv_pb2.PageResponse:
    """Return the page from any node that answers. The nodes share nothing but the token."""
    clock: Any = SimpleNamespace(now=asyncio.get_running_loop().time)
    for turn in range(ATTEMPTS_MAX):
        node = somebody(world, turn)
        try:
            if node.served is not None:
                return await one_page(
                    cast("Any", node.served),
                    lambda op, to, _, turn=turn: ask(world, op, to, turn),
                    clock,
                    request,
                    ScanSlot(clock.now, {}),
                )
        except (Retryable, OutcomeUnknown):
            pass
        await asyncio.sleep(0.1)
    raise AssertionError(f"no page for {request}")


async def done(world: World, op: Any) -> Any:
    """Return the result of a mutation that may be done twice."""
    for turn in range(ATTEMPTS_MAX):
        try:
            return await ask(world, op, None, turn)
        except (Retryable, OutcomeUnknown):
            await asyncio.sleep(0.1)
    raise AssertionError(f"never done: {op}")


async def walked(world: World, request: kv_pb2.PageRequest) -> list[bytes]:
    """Return the keys of all pages, each requested only with the token of the page before."""
    found: list[bytes] = []
    while True:
        page = await page_of(world, request)
        found += page.keys
        if not page.page_token:
            return found
        request = kv_pb2.PageRequest(page_token=page.page_token, limit=request.limit, bare=request.bare)


# docs/protocol.md M14 P37
@pytest.mark.parametrize("seed", [8])
def test_pages_across_moves_and_leader_deaths_have_every_key_once_in_order(seed: int) -> None:
    async def walk(world: World, users: Users) -> None:
        for key in THERE:
            await done(world, commands.Put(key, b"x"))
        await world.join("p2")
        rounds = 0
        while (await world.read_ring()).moves or rounds < 6:
            if rounds in (1, 4):
                crash(world, ("p1", "p2"))
            reverse, limit, bare = bool(rounds % 2), (3, 10, 1000)[rounds % 3], rounds % 4 > 1
            request = kv_pb2.PageRequest(prefix=b"always", limit=limit, reverse=reverse, bare=bare)
            found = await walked(world, request)
            assert found == (THERE[::-1] if reverse else THERE), f"round {rounds}"
            rounds += 1

    play(seed, walk, users=3, pause_s=LONG_PAUSE_S)


def test_prefix_deleted_while_its_keys_move_is_gone() -> None:
    async def delete(world: World, users: Users) -> None:
        for key in THERE:
            await done(world, commands.Put(key, b"x"))
        await done(world, commands.Put(b"alwayt", b"kept"))
        await world.join("p2")
        token, rounds = "", 0
        while True:
            request = kv_pb2.PageRequest(prefix=b"always", page_token=token, limit=7, bare=True)
            page = await page_of(world, request)
            if rounds == 3:
                crash(world, ("p1", "p2"))
            for key in page.keys:
                await done(world, commands.Delete(key))
            rounds, token = rounds + 1, page.page_token
            if not token:
                break
        await world.moved()
        assert await walked(world, kv_pb2.PageRequest(prefix=b"alway", limit=100)) == [b"alwayt"]
        assert rounds > 5

    play(8, delete, users=3, pause_s=LONG_PAUSE_S, hash=MURMUR3)
