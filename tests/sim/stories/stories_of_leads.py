"""Stories of leader changes in which the successor needs the knowledge of the former leader."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from msgspec.structs import replace

from kvstore.errors import StoreError
from kvstore.partition.election import tail
from kvstore.partition.election.tail import Tail
from kvstore.partition.state import commands
from kvstore.partition.state.engine import Engine
from kvstore.types import Seq
from tests.sim.clients import Worker
from tests.sim.judges.operations import Operation, Status
from tests.sim.nodes import Node
from tests.sim.run import Only
from tests.sim.stories.scenarios import P, Stage
from tests.sim.world.loop import current_node

COUNTER = b"c0"
SENT_AGAIN_MAX = 40
CONNECTIONS_MAX = 200


async def retry_after_a_snapshot(stage: Stage) -> None:
    """A replica loses its disk and takes its state from another replica, because the log was trimmed meanwhile. It
    becomes the leader. A client that never received its answer repeats its request: the new leader answers from the
    table that came with the snapshot, and does not apply the request twice (docs/protocol.md, P12, P16)."""
    leader = stage.leader
    await stage.ask(commands.Get(COUNTER), leader)  # returns the time that a request carries
    asked = begin(stage, commands.Increment(COUNTER, 3), seen_ms=leader.replica(P).state.record_time_ms)  # type: ignore[union-attr]
    first = await attempt(stage, asked, leader)
    trimmed = _trimmed(leader)
    while _trimmed(leader) < trimmed + 2:
        await stage.put_until_done(leader)
        await asyncio.sleep(0.05)
    copied = stage.others(leader)[0]
    copied.crash()
    copied.wipe()
    stage.cluster.lossy = copied
    copied.start()
    await stage.until(lambda: _installs(copied) > 0 and _seq(copied) >= _seq(stage.leader))
    await hand_over(stage, stage.leader, copied)
    again = await attempt(stage, asked, copied)
    stage.cluster.recorder.end(asked, Status.OK, again, stage.world.loop.time())
    assert again == first, f"P12 the retry was answered {again}, the first attempt {first}"


async def successor_lags_behind(stage: Stage) -> None:
    """The leader offers its leadership to a replica that does not apply the log for a while. The replica refuses,
    and the leader stays (docs/protocol.md, P26)."""
    leader = stage.leader
    successor = stage.others(leader)[0]
    await stage.until(lambda: _is_fit(successor))
    with applies_nothing(successor):
        while _seq(successor) >= _seq(leader):
            await stage.put_until_done(leader)
        epoch = leader.replica(P).state.epoch  # type: ignore[union-attr]
        with suppress(StoreError):  # the successor refuses, or does not answer in time
            await offer(leader, successor)
            raise AssertionError("P26 a replica accepted leadership although it lacks entries of the leader")
        assert stage.leader is leader, "P26 leadership moved to a replica that lacks entries of the leader"
        assert (await stage.put(leader)).status is Status.OK
        assert leader.replica(P).state.epoch == epoch  # type: ignore[union-attr]


async def fenced_with_a_write_under_way(stage: Stage) -> None:
    """A write is stored on other bookies, and the leader does not receive their acknowledgements. Another replica takes
    over, finds the write and keeps it. The former leader must not tell its client that the write was refused, nor that
    a ledger is fenced (docs/protocol.md, P9)."""
    old = stage.leader
    await stage.put(old)
    for other in stage.others(old):
        stage.world.network.cut_one_way(other.name, old.name)
    in_flight = stage.spawn(stage.ask(commands.Put(COUNTER, b"7"), old, timeout_s=60.0))
    await asyncio.sleep(0.005)
    stage.cluster.metadata.cut(old.name)
    stage.unseat(old)
    new = await stage.until_led_by_another(old)
    await stage.put_until_done(new)
    for _ in range(CONNECTIONS_MAX):  # data held back in transit is lost, so that the leader sends the write again
        stage.world.network.reset_random()
    stage.world.network.heal()
    stage.cluster.metadata.mend(old.name)
    asked = await in_flight
    assert asked.status is Status.INFO, f"P9 the client received {asked.result!r}"


async def hand_over(stage: Stage, leader: Node, successor: Node) -> None:
    """Let `successor` lead. Raises StoreError if the leader stays."""
    await offer(leader, successor)
    await stage.until(lambda: P in successor.leads)


async def offer(leader: Node, successor: Node) -> None:
    """Offer leadership to `successor`. Raises StoreError if the leader stays."""
    led, follows = leader.replica(P), successor.replica(P)
    assert led is not None
    assert follows is not None
    await led._replica.hand_over(successor.id, follows._replica._nonce, is_planned=False)


def begin(stage: Stage, op: commands.Op, seen_ms: int) -> Operation:
    """Return an operation with a request id, to be sent by `attempt`."""
    identity = stage.identity
    identity.seen_ms = max(identity.seen_ms, seen_ms)
    request = identity.next()
    return stage.cluster.recorder.begin("retrying", replace(op, request=request), P, stage.world.loop.time(), request)


async def attempt(stage: Stage, operation: Operation, node: Node) -> Any:
    """Send the operation to one node until that node answers it. Returns the answer."""
    for number in range(SENT_AGAIN_MAX):
        worker = Worker(Only(stage.cluster, node), "retrying", stage.world.fork(f"retry{number}"), stage.identity)
        found = await worker._attempt(operation)
        if not isinstance(found, StoreError):
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(f"{node.name} does not answer: {found!r}")


@contextmanager
def applies_nothing(node: Node) -> Iterator[None]:
    """Keep the replica on `node` from applying log entries in the block."""
    may_take, wait_caught_up, over = Tail.may_take, tail.wait_caught_up, asyncio.Event()

    def is_held() -> bool:
        process = current_node.get()
        return process is not None and process.name == node.name and not over.is_set()

    async def wait_longer(engine: Engine) -> None:
        if is_held():
            await over.wait()
        await wait_caught_up(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tail, "may_take", lambda self: not is_held() and may_take(self))
        patch.setattr(tail, "wait_caught_up", wait_longer)
        try:
            yield
        finally:
            over.set()


def _seq(node: Node) -> Seq:
    replica = node.replica(P)
    return Seq(-1) if replica is None or replica.state.position is None else replica.state.seq


def _is_fit(node: Node) -> bool:
    replica = node.replica(P)
    return replica is not None and replica._replica._fitness.update() and replica.state.position is not None


def _trimmed(node: Node) -> int:
    replica = node.replica(P)
    return 0 if replica is None else int(replica.statistics()["ledgers_trimmed"])


def _installs(node: Node) -> int:
    replica = node.replica(P)
    return 0 if replica is None else int(replica.statistics()["snapshots_installed"])
