"""While values are large, a client that requests many of them delays only itself, and reads of one caller keep their
order."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.errors import NotLeader, Unavailable
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading import leader_reads
from kvstore.partition.leading.leader_reads import AT_ONCE, STEPPING_MAX, TURN_BYTES
from kvstore.partition.leading.read_lines import DROPPED_MAX, Read, ReadLines
from kvstore.partition.leading.traced import TracedSink
from kvstore.partition.state.commands import Batch, Count, Flag, Get, Level, Put, Range, Record, Sink
from kvstore.server.grpc.batch_budget import BatchBudget
from kvstore.server.redis.pipeline.reply_queue import Gather
from kvstore.server.redis.plans import Several
from kvstore.server.routing.redirects import Redirected
from tests.partition.one_partition import Caller, Partition

FAT = 1 << 20
GREEDY = 400


@pytest.fixture
def p() -> Partition:
    return Partition().start()


def lines_of(*counts: int) -> tuple[ReadLines, list[Read]]:
    """Make one line for each count, filled one after the other."""
    lines, reads = ReadLines(), []
    for count in counts:
        caller = Caller()
        reads += [(Get(b"k"), caller, token) for token in range(count)]
    lines.add(reads)
    return lines, reads


def test_take_alternates_between_lines() -> None:
    lines, reads = lines_of(3, 1, 2)
    taken = lines.take(10)
    assert [reads.index(each) for each in taken] == [0, 3, 4, 1, 5, 2]
    assert (lines.count, list(lines)) == (0, [])


def test_put_back_reads_are_taken_first_in_order() -> None:
    lines, _ = lines_of(5, 5, 5)
    before = list(lines_of_tokens(lines))
    taken = lines.take(4)
    lines.put_back(taken)
    assert lines.count == 15
    assert lines.take(3) == [taken[0], taken[1], taken[2]]
    assert sorted(before) == sorted([*lines_of_tokens(lines), 0, 0, 0])


def lines_of_tokens(lines: ReadLines) -> list[int]:
    return [token for _, _, token in lines]


def test_line_keeps_the_order_of_its_reads() -> None:
    random = Random(4711)
    for _ in range(300):
        lines, callers = ReadLines(), [Caller() for _ in range(random.randint(1, 5))]
        given: dict[Sink, list[int]] = {each: [] for each in callers}
        number = 0
        while number < 60 or lines.count:
            some = []
            for _ in range(random.randint(0, 9) if number < 60 else 0):
                some.append((Get(b"k"), random.choice(callers), number))
                number += 1
            lines.add(some)
            taken = lines.take(random.randint(1, 8))
            kept = random.randint(0, len(taken))
            lines.put_back(taken[kept:])
            for _, sink, token in taken[:kept]:
                given[sink].append(token)
        assert all(tokens == sorted(tokens) for tokens in given.values())
        assert sum(map(len, given.values())) == number


def test_wrapped_sink_has_the_callers_line() -> None:
    caller = Caller()
    assert TracedSink(caller, cast(Any, None)).line is caller
    assert Redirected(caller, 0.0).line is caller
    batch = Batch(b"{t}a", (Get(b"{t}a"), Get(b"{t}b")))
    assert BatchBudget().sink(batch, caller).line is caller
    connection = SimpleNamespace(line=object(), is_gone=True)
    gather = Gather(cast(Any, connection), 0, Several([Get(b"a")], lambda found: b""))
    assert gather.line is connection.line


@pytest.mark.parametrize("is_gone", [False, True])
def test_wrapped_sink_reports_that_the_caller_is_gone(is_gone: bool) -> None:
    caller = Leaving()
    caller.left = is_gone
    batch = Batch(b"{t}a", (Get(b"{t}a"), Get(b"{t}b")))
    between = [TracedSink(caller, cast(Any, None)), Redirected(caller, 0.0), BatchBudget().sink(batch, caller)]
    assert [each.is_gone for each in between] == [is_gone] * len(between)
    connection = SimpleNamespace(line=object(), is_gone=is_gone)
    assert Gather(cast(Any, connection), 0, Several([Get(b"a")], lambda found: b"")).is_gone is is_gone


class Leaving(Caller):
    """A caller that may leave."""

    left = False

    @property
    def is_gone(self) -> bool:
        return self.left


def test_reads_of_absent_callers_are_dropped(p: Partition) -> None:
    """Clients that requested very much and are gone do not delay the leader."""
    p.do(Put(b"fat", bytes(FAT)), Put(b"small", b"v"))
    gone = [Leaving() for _ in range(4)]
    p.caller.results.clear()
    for each in gone:
        for token in range(GREEDY):
            p.loop.call_soon(p.leader.submit, (Get(b"fat"),), each, (token,))
    p.loop.call_soon(p.leader.submit, (Put(b"small", b"w"),), gone[0], (GREEDY,))

    def leave() -> None:
        for each in gone:
            each.left = True

    gone[0].on_complete = lambda token, result: leave()
    p.settle()
    p.log.acknowledge(len(p.log.in_flight))
    p.settle()
    while p.leader.reads:
        p.settle()
    assert all(len(each.results) >= GREEDY for each in gone), "each is completed nevertheless"
    read = sum(1 for each in gone for result in each.results.values() if isinstance(result, Record))
    assert read <= 2 * AT_ONCE
    assert isinstance(gone[0].results[GREEDY], int), "a submitted write continues"
    assert p.do(Get(b"small")).value == b"w"


def test_scans_of_absent_callers_are_dropped_or_ended(p: Partition) -> None:
    p.do(*(Put(b"fat%d" % number, bytes(FAT)) for number in range(20)))
    caller, other = Leaving(), Caller()
    scans = 3 * STEPPING_MAX
    caller.on_complete = lambda token, result: setattr(caller, "left", True)
    for token in range(scans):
        p.loop.call_soon(p.leader.submit, (Range(b"", b"", 20, int(Flag.COUNT_ONLY), 0, 0),), caller, (token,))
    p.loop.call_soon(p.leader.submit, (Count(level=0),), other, (0,))
    p.settle()
    while p.leader.reads:
        p.settle()
    assert other.results == {0: 20}
    assert sorted(caller.results) == list(range(scans))
    assert sum(1 for each in caller.results.values() if isinstance(each, Unavailable)) >= scans - STEPPING_MAX


def test_drops_per_turn_are_bounded() -> None:
    lines, gone, other = ReadLines(), [Leaving() for _ in range(3)], Caller()
    for each in gone:
        each.left = True
        lines.add((Get(b"k"), each, token) for token in range(DROPPED_MAX))
    lines.add([(Get(b"k"), other, 0)])
    dropped = []
    for _ in gone:
        assert lines.take(1) == []
        dropped.append(len(lines.dropped))
    assert dropped == [DROPPED_MAX] * 3
    assert (lines.take(1), lines.dropped, lines.count) == ([(Get(b"k"), other, 0)], [], 0)


def test_client_with_many_large_reads_delays_only_itself(p: Partition) -> None:
    p.do(Put(b"fat", bytes(FAT)), Put(b"small", b"v"))
    other, first = Caller(), []
    other.on_complete = lambda token, result: first.append(len(p.caller.results))
    p.caller.results.clear()
    for token in range(GREEDY):
        p.loop.call_soon(p.leader.submit, (Get(b"fat"),), p.caller, (p.tokens + token,))
    p.loop.call_soon(p.leader.submit, (Get(b"small"),), other, (0,))
    p.settle()
    while p.leader.reads:
        p.settle()
    assert other.results[0].value == b"v"
    assert first[0] <= 2 * AT_ONCE + TURN_BYTES // FAT, "few large values came before it"
    assert sorted(p.caller.results) == list(range(p.tokens, p.tokens + GREEDY))


def test_reads_in_lines_are_refused_when_the_lead_ends(p: Partition) -> None:
    p.do(Put(b"fat", bytes(FAT)))
    p.caller.results.clear()
    p.caller.on_complete = lambda token, result: token or p.log.tell_lost(Unavailable("lost"))
    for token in range(GREEDY):
        p.loop.call_soon(p.leader.submit, (Get(b"fat"),), p.caller, (token,))
    p.settle()
    refused = [each for each in p.caller.results.values() if isinstance(each, NotLeader)]
    assert len(p.caller.results) == GREEDY
    assert len(refused) >= GREEDY - AT_ONCE
    assert not p.leader.reads


# docs/protocol.md P19
def test_reads_waiting_for_proofs_keep_their_order() -> None:
    """A read whose proof has come but that found no place in a turn is answered before later reads, and needs no other
    proof."""
    p = Partition(PartitionConfig(expiry_sweep_s=0, lease_ms=0)).start()
    p.do(Put(b"fat", bytes(FAT)), Put(b"k", b"old"))
    *_, first = p.submit(*[Get(b"fat")] * (AT_ONCE + 1), Get(b"k"))
    (second,) = p.submit(Get(b"k"))
    p.submit(Put(b"k", b"new"))
    assert len(p.log.in_flight) == 3, "one proof for each, and the write"
    seen: list[Any] = []
    p.caller.on_complete = lambda token, result: seen.append((token, result))
    while p.log.in_flight:
        p.log.acknowledge()
        p.settle()
    of_k = {token: result.value for token, result in seen if token in (first, second)}
    assert list(of_k) == [first, second]
    assert of_k[first] == b"old"


def test_proved_read_waits_behind_earlier_proved_reads() -> None:
    lines, caller, other = ReadLines(), Caller(), Caller()
    lines.add([(Get(b"k"), caller, 8), (Get(b"k"), other, 9)])
    lines.add_proved([(Get(b"k"), caller, 1)])
    lines.add_proved([(Get(b"k"), caller, 2), (Get(b"k"), caller, 3), (Get(b"k"), other, 4)])
    taken = lines.take(1)
    lines.put_back(taken)
    assert lines.count == 6
    assert [(sink is caller, token) for _, sink, token in lines] == [
        *((True, 1), (True, 2), (True, 3), (True, 8)),
        *((False, 4), (False, 9)),
    ]


def test_read_that_waited_for_a_delete_comes_first(p: Partition) -> None:
    p.do(Put(b"fat", bytes(FAT)), Put(b"k", b"old", p.date_ms() + 10))
    p.wait(0.02)
    (first,) = p.submit(Get(b"k"))
    assert (p.result(first), len(p.log.in_flight)) == ("waits", 1)
    answered: list[int] = []
    p.caller.on_complete = lambda token, result: answered.append(token)
    late = [p.tokens + each for each in range(4 * AT_ONCE + 1)]
    for token in late[:-1]:
        p.loop.call_soon(p.leader.submit, (Get(b"fat"),), p.caller, (token,))
    p.loop.call_soon(p.leader.submit, (Get(b"k"),), p.caller, (late[-1],))
    p.loop.call_soon(p.loop.call_soon, p.log.acknowledge, len(p.log.in_flight))
    p.settle()
    while p.leader.reads or p.log.in_flight:
        p.log.acknowledge(len(p.log.in_flight))
        p.settle()
    assert answered.index(first) < answered.index(late[-1])


# docs/protocol.md P18, P19
@pytest.mark.parametrize("seed", range(24))
def test_reads_of_a_line_never_return_older_values(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With leases that run out, proofs that come late, large values, expiring keys, and writes in between."""
    for name, value in (("TURN_BYTES", 1_000), ("AT_ONCE", 4), ("AT_ONCE_LARGE", 2)):
        monkeypatch.setattr(leader_reads, name, value)
    random = Random(seed)
    p = Partition(PartitionConfig(expiry_sweep_s=0, lease_ms=random.choice([0, 300]))).start()
    keys, callers = [b"%d" % number for number in range(3)], [Caller() for _ in range(3)]
    writer, written, known = Caller(), dict[int, bytes](), dict.fromkeys(keys, 0)
    writer.on_complete = lambda token, result: known.update({written[token]: result})
    asked: list[tuple[Caller, int, bytes, Level, int]] = []
    for step in range(300):
        key = random.choice(keys)
        match random.randrange(10):
            case 0 | 1:
                written[step] = key
                expires_ms = random.choice([0, 0, p.date_ms() + 300])
                p.loop.call_soon(
                    p.leader.submit, (Put(key, bytes(random.choice([1, 400, 900])), expires_ms),), writer, (step,)
                )
            case 2:
                p.log.acknowledge(random.randint(0, len(p.log.in_flight)))
            case 3:
                p.wait(random.choice([0.001, 0.02, 0.4]))
            case 4:
                p.settle()
            case _:
                level = random.choice([Level.LINEARIZABLE, Level.LINEARIZABLE, Level.STRICT])
                for each in random.choices(callers, k=random.randint(1, 12)):
                    asked.append((each, len(asked), key, level, known[key]))
                    p.loop.call_soon(p.leader.submit, (Get(key, level),), each, (len(asked) - 1,))
    p.settle()
    while p.log.in_flight or p.leader.reads:
        p.log.acknowledge(len(p.log.in_flight))
        p.settle()
    seen: dict[tuple[Caller, bytes, Level], int] = {}
    for caller, token, key, level, at_least in asked:
        found = caller.results[token]
        if isinstance(found, Unavailable):
            continue
        version = found.version if found is not None else None
        if version is not None:  # an absent record has expired, and has no version
            assert version >= max(seen.get((caller, key, level), 0), at_least)
            seen[caller, key, level] = version
    assert len(seen) == 18
