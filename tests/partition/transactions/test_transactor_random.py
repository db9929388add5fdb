"""Random transactions, retries, takeovers, lost messages and moves of single keys. Each transaction happens at all of
its keys or at none, and once, however often it is sent under its request id."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import pytest

from kvstore.errors import NotLeader, OutcomeUnknown
from kvstore.partition.state.commands import Append, Batch, Check, Flag, Get, Op, Transact
from kvstore.partition.state.tokens import TokenSpan
from kvstore.types import PartitionId
from tests.partition.several_partitions import Message, Several, transact
from tests.ring import rings


class Sent(NamedTuple):
    """One attempt of a client at a transaction that appends `mark` to some keys."""

    mark: bytes
    txn: Transact
    result: Callable[[], Any]

    @property
    def has_unknown_outcome(self) -> bool:
        result = self.result()
        return result == "waits" or isinstance(result, (OutcomeUnknown, NotLeader))


class Wandering(Several):
    """Several partitions whose messages wait while the range of their key is moving."""

    def owner_of(self, key: bytes) -> PartitionId:
        return (self._owner_or_none(key) or self.partitions[0]).state.partition

    def deliver(self, message: Message) -> None:
        if self._owner_or_none(message.op.key) is None:
            self._again.append(message)
        else:
            super().deliver(message)


class RandomRun:
    """One run of random steps. Moves happen if `with_moves`."""

    def __init__(self, seed: int, *, with_moves: bool) -> None:
        self.random, self.s, self.with_moves = Random(seed), Wandering(3), with_moves
        self.keys = [self.s.key(place, number) for place in range(3) for number in range(2)]
        self.sent: list[Sent] = []
        self.moves = 0
        held = self.random.choice((0.0, 0.2, 0.5))
        self.s.holds = lambda op: self.random.random() < held
        self.steps: dict[Callable[[], None], float] = {
            self.send: 40,
            self.send_again: 20,
            self.write: 15,
            self.read: 3,
            self.fail_over: 5,
            self.move: 8,
            self.deliver_some: 9,
            self.pass_time: 5,
        }

    def run(self) -> None:
        for _ in range(self.random.randrange(20, 80)):
            (step,) = self.random.choices([*self.steps], [*self.steps.values()])
            step()
            if self.random.random() < 0.5:
                self.s.run()
        self.s.holds = lambda op: False
        for message in self.s.held:
            self.lose(message)
        self.s.held.clear()
        self.s._send_again()
        self.s.wait(7.0)

    # steps
    def send(self) -> None:
        mark = b"<%d>" % len(self.sent)
        keys = self.random.sample(self.keys, self.random.randrange(2, 5))
        ops = [self.operation(key, mark) for key in keys]
        if any(isinstance(op, Append) for op in ops):
            request = self.s.request() if self.random.random() < 0.6 else None
            self.submit(mark, transact(*ops, request=request))

    def operation(self, key: bytes, mark: bytes) -> Op:
        flags = int(self.random.choice((Flag.IF_PRESENT, Flag.IF_ABSENT)))
        found: Op
        (found,) = self.random.choices((Append(key, mark), Check(key, flags), Get(key)), (75, 15, 10))
        return found

    def submit(self, mark: bytes, txn: Transact) -> None:
        if self.s._owner_or_none(txn.key) is not None:
            self.sent.append(Sent(mark, txn, self.s.submit(txn)))

    def send_again(self) -> None:
        known = [each for each in self.sent if each.txn.request is not None][-6:]
        if known:
            again = self.random.choice(known)
            self.submit(again.mark, again.txn)

    def write(self) -> None:
        key = self.random.choice(self.keys)
        neighbours = [each for each in self.keys if self.s.owner_of(each) == self.s.owner_of(key)]
        writes = tuple(Append(each, b"") for each in neighbours)
        self.s.submit(self.random.choice((writes[0], Batch(neighbours[0], writes))))

    def read(self) -> None:
        self.s.submit(Get(self.random.choice(self.keys)))

    def fail_over(self) -> None:
        self.random.choice(self.s.partitions).fail_over()

    def move(self) -> None:
        if self.with_moves:
            key = self.random.choice(self.keys)
            source, token = self.s.of(key).place, rings.key_hash.token_of(key)
            self.moves += 1
            self.s.move(source, (source + 1) % 3, self.moves, TokenSpan(token, token))

    def deliver_some(self) -> None:
        held, self.s.held = self.s.held, []
        self.random.shuffle(held)
        for message in held:
            fate = self.random.choices((self.s.deliver, self.s.held.append, self.lose), (80, 14, 6))
            fate[0](message)

    def lose(self, message: Message) -> None:
        message.sink.complete(message.token, OutcomeUnknown("the message is lost"))

    def pass_time(self) -> None:
        self.s.wait(self.random.choice((0.02, 0.3, 2.2)))

    # what holds at the end
    def check(self) -> None:
        assert self.s.is_clean()
        for each in self.s.partitions:
            lock_table = each.leader._evaluator.lock_table
            assert not any((lock_table.locks, lock_table.claims, lock_table._waiting)), "a lock is left"
            assert not len(each.leader.transactor.attempts), "an attempt is left"
        values = {key: self.s.value(key) or b"" for key in self.keys}
        for mark, txn, result in self.sent:
            counts = {values[op.key].count(mark) for op in txn.ops if isinstance(op, Append)}
            assert counts in ({0}, {1}), f"{mark!r} is {counts} times at its keys"
            attempts = [each for each in self.sent if each.mark == mark]
            if isinstance(result(), tuple):
                assert counts == {1}, f"{mark!r} is lost"
            elif not any(each.has_unknown_outcome or isinstance(each.result(), tuple) for each in attempts):
                assert counts == {0}, f"{mark!r} was refused: {result()}"


# docs/protocol.md Tx2, Tx5, Tx14, M4
@pytest.mark.parametrize("with_moves", [False, True])
def test_random_transactions_happen_once_and_completely(*, with_moves: bool) -> None:
    committed = 0
    for seed in range(30):
        run = RandomRun(seed, with_moves=with_moves)
        try:
            run.run()
            run.check()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        committed += sum(isinstance(each.result(), tuple) for each in run.sent)
    assert committed > 300
