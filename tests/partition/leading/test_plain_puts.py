"""Batches of plain puts: evaluating them in columns must match single evaluation."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from kvstore.errors import InvalidRequest
from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.partition.leading import evaluate
from kvstore.partition.leading.plain_puts import put_all
from kvstore.partition.state.commands import Batch, Delete, Flag, Op, Put, RequestId
from tests.partition.one_partition import TIME_MS, Partition

KEYS = [b"key-%d" % number for number in range(40)]


def history(seed: int) -> list[list[Op]]:
    """Yield operations; those of one list are in flight together."""
    random = Random(seed)
    sequence = 0

    def a_batch() -> Op:
        nonlocal sequence
        sequence += 1
        keys = random.choices(KEYS, k=10) if random.random() < 0.2 else random.sample(KEYS, 10)
        ops = tuple(Put(key, b"%d" % random.randrange(100)) for key in keys)
        flags = random.choice([Flag.NONE, Flag.INDEPENDENT])
        return Batch(ops[0].key, ops, flags, random.choice([None, RequestId(bytes(16), sequence, 1, TIME_MS)]))

    def another() -> Op:
        key = random.choice(KEYS)
        return random.choice([Put(key, b"v"), Delete(key), Put(key, b"v", TIME_MS + random.choice([1, 1 << 30]))])

    return [[random.choice([a_batch, another])() for _ in range(random.randrange(1, 4))] for _ in range(60)]


def told(steps: list[list[Op]]) -> tuple[list[str], list[bytes]]:
    """Return the answers and the log."""
    partition = Partition().start()
    for number, step in enumerate(steps):
        if number % 2:
            partition.do(*step)
        else:
            for op in step:
                partition.submit(op)
        while partition.log.in_flight:
            partition.acknowledge(len(partition.log.in_flight))
        partition.wait(0.002)
    return list(map(repr, partition.caller.results.values())), [each.payload for each in partition.log.acknowledged]


@pytest.mark.parametrize("seed", range(8))
def test_batch_of_plain_puts_matches_single_evaluation(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, in_columns = history(seed), 0

    def counted(*arguments: object) -> list[int] | None:
        nonlocal in_columns
        found = put_all(*arguments)  # type: ignore[arg-type]
        in_columns += found is not None
        return found

    monkeypatch.setattr(evaluate, "put_all", counted)
    found = told(steps)
    monkeypatch.setattr(evaluate, "put_all", lambda *_: None)
    assert found == told(steps)
    assert in_columns > 10


def lone_history(seed: int) -> list[list[Op]]:
    """Yield mostly plain puts of few keys, many of them alone in their entry; those of a step are in flight
    together."""
    random, sequence = Random(seed), 0

    def one() -> Op:
        nonlocal sequence
        key = random.choice([*KEYS[:6], b"", bytes(KEY_BYTES_MAX + 1)])
        if random.random() < 0.8:
            return Put(key, b"%d" % random.randrange(100))
        sequence += 1
        request = RequestId(bytes(16), sequence, 1, TIME_MS)
        return random.choice(
            [
                Delete(key),
                Put(key, b"v", TIME_MS + random.choice([1, 1 << 30])),
                Put(key, b"v", request=request),
                Put(key, bytes(VALUE_BYTES_MAX + 1)),
            ]
        )

    return [[one() for _ in range(random.choice([1, 1, 1, 2, 5]))] for _ in range(80)]


@pytest.mark.parametrize("seed", range(8))
def test_lone_plain_put_matches_group_evaluation(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, alone, lone = lone_history(seed), 0, evaluate.Evaluator._evaluate_single

    def counted(*arguments: object) -> object:
        nonlocal alone
        found = lone(*arguments)  # type: ignore[arg-type]
        alone += found is not None
        return found

    monkeypatch.setattr(evaluate.Evaluator, "_evaluate_single", counted)
    found = told(steps)
    monkeypatch.setattr(evaluate.Evaluator, "_evaluate_single", lambda *_: None)
    assert found == told(steps)
    assert alone > 20


@pytest.mark.parametrize("key", [b"", bytes(KEY_BYTES_MAX + 1)])
def test_batch_with_a_refused_key_writes_nothing(key: bytes) -> None:
    partition = Partition().start()
    assert isinstance(partition.do(Batch(b"a", (Put(b"a", b"1"), Put(key, b"1")))), InvalidRequest)
    assert partition.state.key_count == 0


def crowded_history(seed: int) -> list[list[list[Op]]]:
    """Yield mostly plain puts: those of one list arrive together, those of the lists of a step are in flight
    together."""
    random, sequence = Random(seed), 0

    def one(keys: list[bytes]) -> Op:
        nonlocal sequence
        key = random.choice(keys)
        if random.random() < 0.97:
            return Put(key, b"%d" % random.randrange(100))
        sequence += 1
        request = RequestId(bytes(16), sequence, 1, TIME_MS)
        return random.choice(
            [
                Delete(key),
                Put(key, b"v", TIME_MS + random.choice([1, 1 << 30])),
                Put(key, b"v", flags=Flag.IF_ABSENT),
                Put(key, b"v", request=request),
                Put(b"", b"v"),
                Put(key, bytes(VALUE_BYTES_MAX + 1)),
            ]
        )

    def a_step() -> list[list[Op]]:
        keys = random.choice([KEYS[:3], KEYS, [b"other-%d" % number for number in range(400)]])
        return [[one(keys) for _ in range(random.choice([2, 5, 20, 150]))] for _ in range(random.randrange(1, 5))]

    return [a_step() for _ in range(30)]


def told_together(steps: list[list[list[Op]]]) -> tuple[list[str], list[bytes]]:
    """Return the answers and the log."""
    partition = Partition().start()
    for step in steps:
        for ops in step:
            partition.submit(*ops)
        while partition.log.in_flight:
            partition.acknowledge()
        partition.wait(0.002)
    return list(map(repr, partition.caller.results.values())), [each.payload for each in partition.log.acknowledged]


@pytest.mark.parametrize("seed", range(8))
def test_grouped_plain_puts_match_single_evaluation(seed: int) -> None:
    steps, together, in_columns, followed = crowded_history(seed), evaluate.evaluate_batched, 0, 0

    def counted(*arguments: Any) -> Sequence[int] | None:
        nonlocal in_columns, followed
        found, keys, touched = together(*arguments), arguments[2], arguments[6]
        in_columns += found is not None
        followed += found is not None and bool(touched or len(set(keys)) < len(keys))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "evaluate_batched", counted)
        found = told_together(steps)
        patch.setattr(evaluate, "evaluate_batched", lambda *_: None)
        assert found == told_together(steps)
    assert in_columns > 10
    assert followed > 4
