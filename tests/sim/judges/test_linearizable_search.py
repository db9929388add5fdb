"""The search of checker B handles values without versions and operations of unknown outcome, and its shortcuts do
not change a verdict."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest

from tests.sim.judges.history import Kind, Operation, Result, Value, history_of
from tests.sim.judges.linearizable import check_search, register
from tests.sim.judges.test_linearizable import A, B, accepts, get, incr, mutate, op, put, random_history, refused_cas
from tests.sim.versions import Violation


def swap(began: float, ended: float, found: Value, value: Value) -> Operation:
    return op(Kind.SWAP, began, ended, value, expected=found)


def append(began: float, ended: float, value: Value, length: int = 0) -> Operation:
    return op(Kind.APPEND, began, ended, value, delta=length)


UNVERSIONED: list[tuple[bool, list[Operation]]] = [
    (True, [swap(0, 1, None, A), swap(2, 3, A, None), get(4, 5, None)]),
    (False, [swap(0, 1, None, A), swap(2, 3, A, None), swap(4, 5, A, None)]),
    (True, [swap(0, inf, None, A), swap(2, 3, A, B)]),
    (False, [swap(0, inf, None, A), swap(2, 3, A, B), swap(4, 5, A, B)]),
    (True, [append(0, 1, A, 1), append(2, inf, B), append(4, 5, A, 3), get(6, 7, b"aba")]),
    (True, [append(0, 1, A, 1), append(2, inf, B), append(4, 5, A, 2), get(6, 7, b"aa")]),
    (False, [append(0, 1, A, 1), append(2, inf, B), append(4, 5, A, 3), get(6, 7, b"aab")]),
    (False, [append(0, 1, A, 1), append(2, 3, B, 1)]),
    (False, [append(0, 1, A, 1), append(2, 3, B, 2), get(4, 5, A)]),
]


@pytest.mark.parametrize(("is_right", "operations"), UNVERSIONED)
def test_search_judges_histories_without_versions(is_right: bool, operations: list[Operation]) -> None:
    assert accepts(check_search, history_of(operations)) is is_right


def by_trying(left: list[Operation], held: Value = None) -> bool:
    """Return True if an order that time allows explains the operations, with each operation of unknown outcome done
    or not."""
    if all(o.result is Result.INFO for o in left):
        return True
    for each in [o for o in left if not any(other.ended < o.began for other in left)]:
        fits, after = register(held, each)
        if fits and by_trying([o for o in left if o is not each], after):
            return True
    return False


@pytest.mark.parametrize("kinds", [[Kind.INCR, Kind.GET], [Kind.PUT, Kind.GET, Kind.CAS, Kind.CAS, Kind.DEL]])
def test_search_shortcuts_do_not_change_verdict(kinds: list[Kind]) -> None:
    verdicts = {True: 0, False: 0}
    for seed in range(400):
        luck = Random(seed)
        operations, log = random_history(luck, kinds, unknown=0.3)
        for _ in range(2 * (seed % 2)):
            operations = mutate(luck, operations, log)
        operations = [o for o in operations[:8] if o.result is not Result.INFO or o.is_write]
        true = by_trying([o for o in operations if o.result is not Result.FAIL or o.condition_failed])
        assert accepts(check_search, history_of(operations)) is true, f"seed {seed}"
        verdicts[true] += 1
    assert min(verdicts.values()) > 15, verdicts


def list_history(luck: Random, count: int, *, unknown: float, span: float) -> list[Operation]:
    """Return what callers of a correct store saw of a list. Some callers received no answer."""
    plans = []
    for number in range(count):
        began = luck.uniform(0, span)
        effect = began + luck.uniform(0, 3)
        plans.append((effect, began, effect + luck.uniform(0, 3), luck.choice("GGAAAS"), b"%d," % number))
    held: bytes | None = None
    found = []
    for _, began, ended, kind, item in sorted(plans):
        is_unknown = luck.random() < unknown
        if kind == "G":
            found += [] if is_unknown else [get(began, ended, held)]
            continue
        if not is_unknown or luck.random() < 0.5:  # the request arrived
            answered, held = held, (held or b"") + item if kind == "A" else None
            if not is_unknown:
                told = append(began, ended, item, len(held or b""))
                found.append(told if kind == "A" else swap(began, ended, answered, None))
                continue
        found.append(append(began, inf, item) if kind == "A" else swap(began, inf, None, None))
    return found


def mutated_list(luck: Random, operations: list[Operation]) -> list[Operation]:
    """Swap two answers, change the length in an answer, or change the time of an answer."""
    at = luck.randrange(len(operations))
    old, other = operations[at], luck.choice(operations)
    if old.kind is Kind.GET and other.kind is Kind.GET:
        new = replace(old, value=other.value)
    elif old.result is Result.OK and luck.random() < 0.5:
        new = replace(old, began=old.began + 4, ended=old.ended + 4)
    elif old.kind is Kind.APPEND and old.result is Result.OK:
        new = replace(old, delta=old.delta + luck.choice((-2, 2)))
    else:
        return operations
    return [*operations[:at], new, *operations[at + 1 :]]


def test_past_items_in_list_answers_do_not_change_verdict() -> None:
    verdicts = {True: 0, False: 0}
    for seed in range(600):
        luck = Random(seed)
        operations = list_history(luck, 8, unknown=0.3, span=8)
        if seed % 2 and operations:
            operations = mutated_list(luck, operations)
        true = by_trying(operations)
        assert accepts(check_search, history_of(operations)) is true, f"seed {seed}"
        verdicts[true] += 1
    assert min(verdicts.values()) > 60, verdicts


def test_search_judges_list_in_time_after_storm() -> None:
    """The list has hundreds of items. A third come from callers without an answer, and some of these emptied the
    list."""
    for seed in range(5):
        operations = list_history(Random(seed), 400, unknown=0.3, span=400)
        check_search(history_of(operations))
        last = max((o for o in operations if o.kind is Kind.GET and o.value), key=lambda o: o.ended)
        assert isinstance(last.value, bytes)
        shorter = replace(last, value=last.value[last.value.index(b",") + 1 :] + b"x,")
        with pytest.raises(Violation):
            check_search(history_of([each if each is not last else shorter for each in operations]))


def test_search_handles_many_similar_operations_of_unknown_outcome() -> None:
    """The key is a counter, or a register with conditions, that clients could not reach for a while."""
    lost = [incr(number / 10, inf, None) for number in range(60)]
    counted = [incr(10 + number, 10.5 + number, number + 31) for number in range(40)]
    check_search(history_of([*lost, *counted, get(60, 61, 70)]))
    with pytest.raises(Violation):
        check_search(history_of([*lost, *counted, get(60, 61, 131)]))
    puts = [put(number / 10, inf, b"lost %d" % number) for number in range(60)]
    added = [append(number / 10, inf, b"%02d," % number) for number in range(60)]
    known = [append(10 + number, 10.5 + number, b"k,", 3 * 7 + 2 + 2 * number) for number in range(40)]
    check_search(history_of([*added, *known]))
    with pytest.raises(Violation):
        check_search(history_of([*added, *known, get(60, 61, b"59," + b"k," * 40)]))
    refused = [refused_cas(10 + number, 10.5 + number, A) for number in range(20)]
    check_search(history_of([put(-2, -1, A, 1), *puts, *refused, get(60, 61, b"lost 7")]))
    with pytest.raises(Violation):
        check_search(history_of([put(-2, -1, A, 1), *puts, *refused, get(60, 61, B)]))
