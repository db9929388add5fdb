"""Puts with request ids that arrive together: evaluating and remembering them in columns must match single
evaluation."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from kvstore.errors import InvalidRequest, RequestExpired
from kvstore.limits import CLIENT_BYTES, VALUE_BYTES_MAX
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading import evaluate
from kvstore.partition.state import retry_table
from kvstore.partition.state.commands import Batch, Delete, Flag, Increment, Op, Put, RequestId
from kvstore.partition.state.state import ReplicaState
from tests.partition.one_partition import P1, TIME_MS, Partition
from tests.ring import rings

KEYS = [b"key-%d" % number for number in range(60)]
MANY_KEYS = [b"other-%d" % number for number in range(900)]
WINDOW_MS, STEP_MS = 1_020, 68
U64 = 1 << 64

Step = list[list[Op]]
"""Operations: those of one list arrive together, those of a step are in flight together."""


class Asking:
    """A client that mostly behaves like ours, and sometimes as none should."""

    def __init__(self, number: int, random: Random) -> None:
        self.id = bytes((number,)) * CLIENT_BYTES
        self.next = self.first_unacked = self.begun = 1
        self.sent: list[Op] = []
        self._random = random

    def put(self, key: bytes, time_ms: int) -> Op:
        made = Put(key, b"%d" % self._random.randrange(100), request=self._new(time_ms))
        self.sent.append(made)
        return made

    def odd(self, kind: str, key: bytes, time_ms: int) -> Op:
        random, request = self._random, self._new(time_ms)
        again: Op = random.choice(self.sent[-30:]) if self.sent else Put(key, b"v", request=request)
        match kind:
            case "again":
                return again
            case "same sequence":
                return Put(key, b"v", request=request._replace(sequence=(again.request or request).sequence))
            case "late":
                at = max(1, self.first_unacked - random.randrange(1, 4))
                return Put(key, b"v", request=request._replace(sequence=at, first_unacked=1))
            case "old":
                return Put(
                    key, b"v", request=request._replace(seen_ms=time_ms - random.choice([WINDOW_MS, 9 * WINDOW_MS]))
                )
            case "ahead":
                return Put(key, b"v", request=request._replace(seen_ms=time_ms + 2 * WINDOW_MS))
            case "no number":
                return Put(key, b"v", request=request._replace(sequence=random.choice([0, U64]), first_unacked=0))
            case "too large":
                return Put(key, b"v", request=request._replace(seen_ms=U64))
            case "no client":
                return Put(key, b"v", request=request._replace(client=b"short"))
            case "counter":
                return Increment(b"n", 1, request=request)
            case "batch":
                return Batch(key, (Put(key, b"1"), Put(key + b"2", b"2")), request=request)
        choices = [Delete(key, request=request), Put(key, bytes(VALUE_BYTES_MAX + 1), request=request)]
        choices += [Put(key, b"v", TIME_MS + 1, request=request), Put(key, b"v", flags=Flag.IF_ABSENT, request=request)]
        return random.choice(choices)

    def hear(self) -> None:
        """Acknowledge more results, mostly of requests before the current ones."""
        until = self._random.choice([self.begun] * 19 + [self.next])
        self.first_unacked = self._random.randint(self.first_unacked, max(until, self.first_unacked))

    def _new(self, time_ms: int) -> RequestId:
        sequence, self.next = self.next, self.next + self._random.choice([1] * 30 + [3])
        return RequestId(self.id, sequence, self.first_unacked, time_ms - self._random.choice([0] * 9 + [5]))


ODD = ["again", "same sequence", "late", "old", "ahead", "no number", "too large", "no client", "counter", "batch", ""]


def asking_history(seed: int) -> list[Step]:
    random = Random(seed)
    clients = [Asking(number, random) for number in range(1, 9)]

    def come_together(time_ms: int) -> list[Op]:
        own = random.choice([clients[:1], clients[:3], clients])
        keys = random.choice([KEYS[:4], KEYS, MANY_KEYS])
        odd, plain = random.choice([*ODD, *[None] * 11]), random.choice([0.0, 0.0, 0.2])
        count = random.choice([1, 1, 5, 8, 30])
        all_ = range(count)
        strange = {None: range(0), "late": all_, "no number": all_}.get(odd, {random.randrange(count), count - 1})
        for client in own:
            client.begun = client.next
            if random.random() < 0.3:
                client.hear()
        ops = []
        for place in range(count):
            client, key = random.choice(own), random.choice(keys)
            if place in strange and odd is not None:
                ops.append(client.odd(odd, key, time_ms))
            else:
                ops.append(Put(key, b"p") if random.random() < plain else client.put(key, time_ms))
            if random.random() < 0.02:
                client.hear()
        return ops

    return [[come_together(TIME_MS + number * STEP_MS) for _ in range(random.randrange(1, 5))] for number in range(40)]


def table_of(state: ReplicaState) -> dict[bytes, Any]:
    """Return everything remembered, as values."""
    names = ("count", "first_unacked", "results", "row", "seen_ms")
    return {each: {name: getattr(client, name) for name in names} for each, client in state.retries._clients.items()}


def told(steps: list[Step], config: PartitionConfig) -> tuple[list[str], list[bytes], Any, int]:
    """Return the answers, the log, the remembered results, and their cost."""
    partition = Partition(config).start()
    for step in steps:
        for ops in step:
            partition.submit(*ops)
        while partition.log.in_flight:
            partition.acknowledge()
            partition.state.retries.check()
        partition.wait(STEP_MS / 1000)
    replica = ReplicaState(P1, type(partition.engine)(), config, rings.key_hash)
    for logged in partition.log.acknowledged:
        replica.apply(logged)
    assert table_of(replica) == table_of(partition.state)
    assert table_of(ReplicaState(P1, partition.engine, config, rings.key_hash)) == table_of(partition.state)
    payloads = [each.payload for each in partition.log.acknowledged]
    return (
        list(map(repr, partition.caller.results.values())),
        payloads,
        table_of(partition.state),
        replica.retries.bytes,
    )


def crowded_history(seed: int) -> list[Step]:
    """Yield more operations than are looked up at once. A few are repeated while the first ones are in flight, in the
    same entry or in another, with acknowledgements in any order."""
    random = Random(seed)
    clients = [Asking(number, random) for number in (1, 2)]

    def come_together(time_ms: int) -> list[Op]:
        own = random.choice([clients[:1], clients])
        keys = random.choice([KEYS, MANY_KEYS])
        ops = [random.choice(own).put(random.choice(keys), time_ms) for _ in range(random.choice([6, 40, 150, 300]))]
        for _ in range(random.choice([0, 0, 1, 2])):
            ops.insert(random.randrange(len(ops) + 1), random.choice(ops))
        for _ in range(random.choice([0, 0, 0, 1])):
            place = random.randrange(len(ops))
            request = ops[place].request
            assert request is not None
            earlier = request._replace(first_unacked=random.randint(1, request.sequence))
            ops[place] = replace(ops[place], request=earlier)
        if random.random() < 0.5:
            ops = random.sample(ops, len(ops))
        if random.random() < 0.3:
            ops += random.choice(clients).sent[-random.choice([4, 9]) :]
        return ops

    def step(number: int) -> Step:
        made = [come_together(TIME_MS + number * STEP_MS) for _ in range(random.randrange(1, 4))]
        if random.random() < 0.3:
            made.append(random.choice(made)[-5:])
        for client in clients:
            client.first_unacked = random.randint(client.first_unacked, client.next)
        return made

    return [step(number) for number in range(12)]


BOUNDS: list[dict[str, int]] = [{}, {"retry_results_max": 60}, {"retry_bytes_max": 12_000}]


@pytest.mark.parametrize("bounds", [*BOUNDS, {"retry_results_max": 400}], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_requests_beyond_one_lookup_get_the_results_of_single_ones(seed: int, bounds: dict[str, int]) -> None:
    compared(crowded_history(seed), bounds)


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_puts_with_request_ids_match_single_evaluation(seed: int, bounds: dict[str, int]) -> None:
    in_columns, at_once, lone = compared(asking_history(seed), bounds)
    assert in_columns > 5
    assert at_once > 5
    assert lone > 2


def compared(steps: list[Step], bounds: dict[str, int]) -> tuple[int, int, int]:
    """Count how often puts were evaluated in columns, remembered in columns, and evaluated alone."""
    config = PartitionConfig(expiry_sweep_s=0, retry_window_ms=WINDOW_MS, **bounds)
    together, are_plain, alone = evaluate.evaluate_batched, retry_table._are_plain, evaluate.Evaluator._single_request
    in_columns = at_once = lone = 0

    def counted(draft: Any, ops: Sequence[Op], *rest: Any) -> Sequence[int] | None:
        nonlocal in_columns
        found = together(draft, ops, *rest)
        in_columns += found is not None and any(op.request is not None for op in ops)
        return found

    def counted_plain(*arguments: Any) -> bool:
        nonlocal at_once
        found = are_plain(*arguments)
        at_once += found
        return found

    def counted_alone(*arguments: Any) -> Any:
        nonlocal lone
        found = alone(*arguments)
        lone += found is not None
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.Evaluator, "_single_request", counted_alone)
        patch.setattr(evaluate, "evaluate_batched", counted)
        patch.setattr(retry_table, "_are_plain", counted_plain)
        found = told(steps, config)
        patch.setattr(evaluate.Evaluator, "_single_request", lambda *_: None)
        patch.setattr(evaluate, "evaluate_batched", lambda *_: None)
        patch.setattr(retry_table, "_are_plain", lambda *_: False)
        assert found == told(steps, config)
    return in_columns, at_once, lone


def asked(sequence: int, first_unacked: int = 1) -> RequestId:
    return RequestId(bytes(CLIENT_BYTES), sequence, first_unacked, TIME_MS)


def test_late_duplicates_are_refused_while_acknowledgement_is_in_flight() -> None:
    partition = Partition().start()
    partition.submit(Put(b"a", b"1", request=asked(9, 9)))
    late = partition.submit(*(Put(KEYS[number], b"2", request=asked(number)) for number in range(1, 7)))
    partition.acknowledge()
    assert {type(partition.result(token)) for token in late} == {RequestExpired}


def test_invalid_request_id_is_refused_in_a_group() -> None:
    partition = Partition().start()
    results = partition.do(*(Put(KEYS[number], b"1", request=asked(number, 0)) for number in range(6)))
    assert [type(each) for each in results] == [InvalidRequest, int, int, int, int, int]
