"""The cycle checker names each anomaly, and accepts what is strictly serializable."""

from __future__ import annotations

from collections import defaultdict
from math import inf
from random import Random

import pytest

from tests.sim.judges.cycles import Cycle, Edge, Graph, Items, Step, Transaction, check_cycles

X, Y, Z = b"x", b"y", b"z"


def history(*texts: str, times: dict[str, tuple[float, float]] | None = None) -> list[Transaction]:
    """Return a history. `T1: x+1 y=12` is a transaction that appends 1 to x and finds 1 and 2 in y. A leading `!`
    means aborted, `?` of unknown outcome. All transactions overlap unless `times` says otherwise."""
    found = []
    for text in texts:
        name, _, rest = text.partition(":")
        mark, name = (name[0], name[1:]) if name[0] in "!?" else ("", name)
        began, ended = (times or {}).get(name, (0.0, 1.0))
        steps = [_step(word) for word in rest.split()]
        ended = inf if mark == "?" else ended
        found.append(Transaction(name=name, steps=steps, began=began, ended=ended, is_aborted=mark == "!"))
    return found


def _step(word: str) -> Step:
    key, value = word[:1].encode(), word[2:].encode()
    if word[1] == "+":
        return Step(key, item=value)
    return Step(key, items=tuple(value[at : at + 1] for at in range(len(value))))


ONE_AFTER_THE_OTHER = {"T1": (0.0, 1.0), "T2": (2.0, 3.0), "T3": (4.0, 5.0)}

ANOMALIES = {
    "G0": history("T1: x+1 y+1", "T2: x+2 y+2", "R: x=12 y=21"),
    "G1a": history("!T1: x+1", "T2: x=1"),
    "G1b": history("T1: x+1 x+2", "T2: x=1", "T3: x=12"),
    "G1c": history("T1: x+1 y=2", "T2: y+2 x=1"),
    "G-single": history("T1: x+1 y+2", "T2: x=1 y=", "T3: y=2"),
    "G2": history("T1: x= y+1", "T2: y= x+2", "T3: x=2 y=1"),
    "G2\n": history("T1: x= y+1", "T2: y= z+2", "T3: z= x+3", "R: x=3 y=1 z=2"),
    "G0-realtime": history("T1: x+1", "T2: x+2", "R: x=21", times=ONE_AFTER_THE_OTHER),
    "G1c-realtime": history("T1: x=1", "T2: x+1", times=ONE_AFTER_THE_OTHER),
    "G-single-realtime": history("T1: x+1", "T2: x=", "T3: x=1", times=ONE_AFTER_THE_OTHER),
    "G-single-realtime\n": history("T1: x+1", "T3: x=", times=ONE_AFTER_THE_OTHER),  # lost, and seen by nobody
    "G2-realtime": history(
        "T1: x= y+1", "T2: x+2", "T3: y=", "R: x=2 y=1", times={"T1": (0, 9), "T2": (0, 1), "T3": (2, 3), "R": (0, 9)}
    ),
    "internal": history("T1: x+1 x="),
    "nobody": history("T1: x=1"),
    "twice": history("T1: x+1", "T2: x=11"),
    "contradict": history("T1: x+1", "T2: x+2", "T3: x=12", "T4: x=21"),
}


@pytest.mark.parametrize("name", ANOMALIES)
def test_anomaly_is_named(name: str) -> None:
    with pytest.raises(Cycle) as found:
        check_cycles(ANOMALIES[name])
    assert name.strip() in str(found.value).partition(" in 0")[0]


GOOD = [
    history("T1: x+1 y+1", "T2: x+2 y+2", "R: x=12 y=12"),
    history("T1: x+1 x+2", "T2: x=12"),
    history("T1: x+1 x=1 x+2 x=12", "R: x=12"),
    history("T1: x+1", "T2: x=", "T3: x=1", times={"T1": (0, 3), "T2": (0, 1), "T3": (2, 3)}),
    history("?T1: x+1", "T2: x=1"),
    history("?T1: x+1", "T2: x=", "T3: x=1", times=ONE_AFTER_THE_OTHER),
    history("?T1: x+1", "T2: x=", times=ONE_AFTER_THE_OTHER),
    history("!T1: x+1", "T2: x="),
    history("T1: x= y+1", "T2: y=1 x+2", "T3: x=2 y=1"),
    history("T1: x+1", "T2: y+1", "R: x=1 y=", "S: x=1 y=1"),
    history(),
]


@pytest.mark.parametrize("number", range(len(GOOD)))
def test_strictly_serializable_history_is_accepted(number: int) -> None:
    check_cycles(GOOD[number])


def executed(random: Random, count: int) -> list[Transaction]:
    """Return a history that was executed one transaction after the other, at moments within overlapping intervals."""
    lists: dict[bytes, Items] = defaultdict(tuple)
    found, moment = [], 0.0
    for number in range(count):
        steps = []
        for _ in range(random.randint(1, 4)):
            key = random.choice((X, Y, Z))
            if random.random() < 0.5:
                item = b"%d.%d" % (number, len(steps))
                lists[key] += (item,)
                steps.append(Step(key, item=item))
            else:
                steps.append(Step(key, items=lists[key]))
        moment += random.random()
        began, ended = moment - 3 * random.random(), moment + 3 * random.random()
        ended = inf if random.random() < 0.1 else ended
        if random.random() < 0.2:
            ended = inf
            steps = [Step(each.key, item=each.item) for each in steps]  # nobody knows what it has read
        found.append(Transaction(name=f"T{number}", steps=steps, began=began, ended=ended))
    random.shuffle(found)
    return found


def test_random_executions_are_accepted_and_forged_ones_rejected() -> None:
    """Forge the answer of one read so that it shows one item less, in a history in which a later read ended before
    another one began."""
    rejected = 0
    for seed in range(40):
        random = Random(seed)
        found = executed(random, 60)
        check_cycles(found)
        reads = [
            (each, at)
            for each in found
            for at, step in enumerate(each.steps)
            if step.items and all(other.key != step.key or other is step for other in each.steps)
        ]
        victim, at = random.choice(reads)
        steps = list(victim.steps)
        steps[at] = Step(steps[at].key, items=steps[at].items[:-3])  # type: ignore[index]
        forged = Transaction(name="forged", steps=steps, began=victim.began, ended=victim.ended)
        try:
            check_cycles([forged if each is victim else each for each in found])
        except Cycle:
            rejected += 1
    assert rejected >= 30


def reachable(graph: Graph, start: int, end: int) -> bool:
    waiting, seen = [start], {start}
    while waiting:
        for target in graph.edges.get(waiting.pop(), {}):
            if target == end:
                return True
            if target not in seen:
                seen.add(target)
                waiting.append(target)
    return False


def test_real_time_relates_exactly_what_did_not_overlap() -> None:
    random = Random(5)
    for _ in range(50):
        times = []
        for number in range(1, 9):
            began = random.randrange(20)
            times.append((float(began), inf if random.random() < 0.2 else began + random.randrange(1, 9), number))
        graph = Graph()
        graph.add_times(times)
        for _, ended, earlier in times:
            for began, _, later in times:
                if earlier != later:
                    assert reachable(graph, earlier, later) == (ended < began)


def test_graph_finds_cycle_among_many_transactions() -> None:
    graph = Graph()
    for number in range(1, 5000):
        graph.add(number, number + 1, Edge.WW)
    assert graph.anomaly() is None
    graph.add(5000, 1, Edge.RW)
    name, cycle = graph.anomaly() or ("", [])
    assert name == "G-single"
    assert len(cycle) == 5000


def test_item_appended_by_two_transactions_is_an_error_of_the_test() -> None:
    with pytest.raises(ValueError, match="not unique"):
        check_cycles(history("T1: x+1", "T2: x+1"))
