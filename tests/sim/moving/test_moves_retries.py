"""A transaction that is sent again under its request id while its home key moves gets its first answer, and happens
once."""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import Any

import pytest

from kvstore.errors import StoreError
from kvstore.partition.moves.import_driver import Means
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Append, RequestId, Transact
from kvstore.partition.state.traits import home_key
from tests.sim.clients import Identity, Worker
from tests.sim.moving.moves import Users, World, at_each_step, first_range, hash_for, keys_in, play
from tests.sim.moving.moves_accidents import asker
from tests.sim.moving.test_moves import SPAN_OF_3
from tests.sim.strikes.knobs import Knobs
from tests.sim.transacting.transactors import comparable

pytestmark = pytest.mark.sim

THREE = Knobs(partitions=3)
HOME = keys_in(SPAN_OF_3, 2, b"h")
ELSEWHERE = [*keys_in(first_range("p2", 3), 1, b"e"), *keys_in(first_range("p3", 3), 1, b"e")]
ONE_PARTITION, SEVERAL = HOME, (*HOME, *ELSEWHERE)
MARK = b"<mark>"
TRIES = 60


class Retried:
    """A transaction that appends a mark to each key. It is sent at the step `first_at` of a move of its home key, and
    again at each later step, through different nodes."""

    def __init__(self, world: World, keys: tuple[bytes, ...], request: RequestId, first_at: str) -> None:
        ops = [Append(key, MARK) for key in keys]
        self.op = Transact(home_key(ops), tuple(ops), request=request)
        self.answers: dict[str, Any] = {}
        """By the step at which the transaction was sent."""
        self._world, self._first_at = world, first_at
        self._tasks: list[Any] = []

    def reached(self, means: Means, step: str, move: int) -> None:
        if (self.answers or step == self._first_at) and step not in self.answers:
            self.answers[step] = None
            asyncio.get_running_loop().call_soon(self._start, step, context=Context())

    def _start(self, step: str) -> None:
        self._tasks.append(self._world.cluster.spawn(self.send(step), name=f"transaction {step}"))

    async def send(self, step: str) -> None:
        """Send the transaction until it is answered."""
        nodes = self._world.cluster.nodes
        ask = asker(nodes[len(self.answers) % len(nodes)])
        for _ in range(TRIES):
            try:
                self.answers[step] = await ask(self.op, None)
                return
            except StoreError:
                await asyncio.sleep(0.05)
        raise AssertionError(f"not answered {step}")

    async def answered(self) -> None:
        for each in self._tasks:
            await each


async def new_request(world: World) -> RequestId:
    random = world.cluster.world.fork("retried")
    worker = Worker(world.cluster, "retried", random, Identity(random))
    while not worker.identity.seen_ms:
        await worker.do(commands.Get(HOME[0]))
    return worker.identity.next()


# docs/protocol.md M4, Tx2
@pytest.mark.parametrize("keys", [ONE_PARTITION, SEVERAL], ids=["one partition", "several"])
@pytest.mark.parametrize("first_at", ["before begin", "after copy", "after freeze", "after release"])
def test_retried_transaction_gets_its_first_answer_while_its_home_moves(first_at: str, keys: tuple[bytes, ...]) -> None:
    """Before the first step, the result is in a page; after the copy, in the source's log. At the last two steps the
    source has frozen and released the range."""
    running: list[Retried] = []

    async def story(world: World, users: Users) -> None:
        retried = Retried(world, keys, await new_request(world), first_at)
        if first_at == "before begin":
            await retried.send(first_at)
        running.append(retried)
        await world.shift(SPAN_OF_3, "p2")
        await world.moved()
        await retried.answered()
        await retried.send("at the end")
        assert world.ring.partition_of(HOME[0]) == "p2"
        ask = asker(world.cluster.nodes[0])
        values = [(await ask(commands.Get(key), None))[0] for key in keys]
        assert values == [MARK] * len(keys), retried.answers

    def reached(means: Means, step: str, move: int) -> None:
        for each in running:
            each.reached(means, step, move)

    with at_each_step(reached):
        play(5, story, THREE, users=0, keys=(), counters=(), hash=hash_for(len(first_at)))
    answers = running[0].answers
    assert answers.keys() >= {first_at, "after release", "after flip", "before drop", "at the end"}
    assert len({comparable(each) for each in answers.values()}) == 1, answers
