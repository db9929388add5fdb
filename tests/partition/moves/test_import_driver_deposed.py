"""A leader that was deposed and has not noticed must not change the ring because of what its state lacks, or still
has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.errors import NotLeader, StoreError
from kvstore.partition.leading.leader import Leader
from kvstore.partition.moves.import_driver import Halted, ImportDriver
from kvstore.partition.moves.source import FREEZE_S, Source
from kvstore.partition.state.move_records import Founded
from kvstore.partition.state.tokens import TokenSpan
from kvstore.ring import Member, Ring, plan, steps
from kvstore.ring.moves import MoveId, MoveState
from kvstore.types import PartitionId, ServerId
from tests.partition.one_partition import UNKNOWN, Partition
from tests.ring.rings import new_ring

P1, P2 = PartitionId("p1"), PartitionId("p2")
SPAN = TokenSpan(100, 199)
REST = (TokenSpan(0, 99), TokenSpan(200, (1 << 32) - 1))


def ring_with_move() -> Ring:
    """Return a ring in which p1 owns everything and SPAN is moving to p2."""
    ring = new_ring([P1], {ServerId("n1"): ""}, 1)
    ring = replace(ring, partitions={**ring.partitions, P2: Member(P2, (ServerId("n1"),))})
    ring = plan.shift_range(ring, SPAN.first, SPAN.last, P2)
    return steps.begin(ring, MoveId(1), 1)


class Carried:
    """The move as the leader of `partition` carries it, with the ownership of its state."""

    def __init__(self, partition: PartitionId, owned: tuple[TokenSpan, ...], ring: Ring) -> None:
        self.partition = part = Partition(partition=partition)
        self.ring = ring
        started = part.loop.create_task(part.leader.start(Founded(owned)))
        part.settle()
        part.acknowledge()
        assert started.done()
        env: Any = SimpleNamespace(clock=part, nursery=SimpleNamespace(spawn=lambda work, name: work.close()))
        means: Any = SimpleNamespace(
            env=env,
            server_env=env,
            partition=partition,
            state=part.state,
            leading=self.leading,
            rings=self,
            pins=None,
            pin_numbers=iter(()),
            logs=None,
            source=Source(env, partition, part.state, self.leading, FREEZE_S),
            reached=lambda *_: None,
        )
        self.driver = part.run(self._made(means))

    async def _made(self, means: Any) -> ImportDriver:
        return ImportDriver(means, MoveId(1))

    def leading(self) -> Leader | None:
        return self.partition.leader if self.partition.leader.serving else None

    async def change(self, step: Callable[[Ring], Ring], *, soon: bool = False) -> Ring:
        self.ring = step(self.ring)
        return self.ring

    def step(self, *, is_deposed: bool) -> MoveState | None:
        """Take one step, whose record is acknowledged or not, and return the move's state in the ring."""
        task: asyncio.Task[bool] = self.partition.loop.create_task(self.driver.advance())
        self.partition.settle()
        if is_deposed:
            self.partition.log.fail(UNKNOWN)
        else:
            self.partition.acknowledge(len(self.partition.log.in_flight))
        self.partition.settle()
        assert task.done()
        if is_deposed:
            assert isinstance(task.exception(), StoreError | NotLeader | Halted)
        else:
            assert task.exception() is None
        move = self.ring.moves.get(MoveId(1))
        return None if move is None else move.state


COPYING = ring_with_move()
CANCELLING = steps.cancel(COPYING, [MoveId(1)])
FLIPPED = steps.flip(COPYING, MoveId(1))


# docs/protocol.md M10
@pytest.mark.parametrize(
    ("partition", "owned", "ring", "after"),
    [
        pytest.param(P2, (SPAN,), COPYING, MoveState.FLIPPED, id="flips what it owned when it led"),
        pytest.param(P2, (), CANCELLING, None, id="forgets an import that it does not know of"),
        pytest.param(P1, REST, FLIPPED, None, id="ends a move whose release it does not know of"),
    ],
)
def test_deposed_leader_does_not_change_the_ring(
    partition: PartitionId, owned: tuple[TokenSpan, ...], ring: Ring, after: MoveState | None
) -> None:
    deposed = Carried(partition, owned, ring)
    assert deposed.step(is_deposed=True) is ring.moves[MoveId(1)].state, "the ring is unchanged"
    assert Carried(partition, owned, ring).step(is_deposed=False) is after
