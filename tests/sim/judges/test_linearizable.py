"""The checkers accept histories of a correct store, reject all others, and agree with each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from random import Random

import pytest

from tests.sim.judges.history import History, Kind, Operation, Result, Value, history_of
from tests.sim.judges.linearizable import Undecided, check, check_search, register, relevant, search
from tests.sim.versions import Log, Violation, check_versions

K = b"key"
A, B, C = b"a", b"b", b"c"


def op(
    kind: Kind, began: float, ended: float, value: Value = None, version: int | None = None, **more: object
) -> Operation:
    result = Result.INFO if ended == inf else Result.OK
    fields = {"process": f"p{began}", "kind": kind, "key": K, "value": value, "version": version, "result": result}
    return Operation(**fields | {"began": began, "ended": ended} | more)  # type: ignore[arg-type]


def put(began: float, ended: float, value: Value, version: int | None = None) -> Operation:
    return op(Kind.PUT, began, ended, value, version)


def get(began: float, ended: float, value: Value, version: int | None = None) -> Operation:
    return op(Kind.GET, began, ended, value, version)


def delete(began: float, ended: float, version: int | None = None) -> Operation:
    return op(Kind.DEL, began, ended, None, version)


def cas(began: float, ended: float, expected: Value, value: Value, version: int | None = None) -> Operation:
    return op(Kind.CAS, began, ended, value, version, expected=expected)


def refused_cas(began: float, ended: float, expected: Value, version: int | None = None) -> Operation:
    more = {"expected": expected, "result": Result.FAIL, "condition_failed": True}
    return op(Kind.CAS, began, ended, C, version, **more)


def incr(began: float, ended: float, value: Value, version: int | None = None, delta: int = 1) -> Operation:
    return op(Kind.INCR, began, ended, value, version, delta=delta)


RIGHT: dict[str, list[Operation]] = {
    "nothing happened": [],
    "a read sees the write before it": [put(0, 1, A, 1), get(2, 3, A, 1)],
    "an empty key reads as nothing": [get(0, 1, None), put(2, 3, A, 1)],
    "a deleted key reads as nothing": [put(0, 1, A, 1), delete(2, 3, 2), get(4, 5, None)],
    "a read beside a write sees it": [put(0, 10, A, 1), get(1, 2, A, 1)],
    "a read beside a write does not see it": [put(0, 10, A, 1), get(1, 2, None)],
    "writes side by side in either order": [put(0, 10, A, 2), put(0, 10, B, 1), get(11, 12, A, 2)],
    "a read between writes side by side": [put(0, 10, A, 2), put(0, 10, B, 1), get(5, 6, B, 1), get(7, 8, A, 2)],
    "an unknown write that is seen": [put(0, inf, A), get(5, 6, A, 1)],
    "an unknown write that is never seen": [put(0, inf, A), get(5, 6, None)],
    "an unknown write that is seen late": [put(0, inf, A), get(5, 6, None), get(7, 8, A, 1)],
    "an unknown write before a known one": [put(0, inf, A), put(1, 2, B, 2), get(3, 4, B, 2)],
    "an unknown delete that took effect": [put(0, 1, A, 1), delete(2, inf), get(3, 4, A, 1), get(5, 6, None)],
    "an unknown delete with a condition": [put(0, 1, A, 1), cas(2, inf, A, None), get(3, 4, A, 1), get(5, 6, None)],
    "a delete of nothing has no version": [delete(0, 1), put(2, 3, A, 1)],
    "a condition that held": [put(0, 1, A, 1), cas(2, 3, A, B, 2), get(4, 5, B, 2)],
    "a condition on nothing that held": [cas(0, 1, None, A, 1), get(2, 3, A, 1)],
    "a condition that did not hold": [put(0, 1, A, 1), refused_cas(2, 3, B, 1), get(4, 5, A, 1)],
    "an unknown swap that was refused": [put(0, 1, A, 1), cas(2, inf, B, C), get(3, 4, A, 1)],
    "a counter": [incr(0, 1, 1, 1), incr(2, 3, 3, 2, delta=2), get(4, 5, 3, 2)],
    "a counter with an unknown step": [incr(0, 1, 1, 1), incr(2, inf, None), incr(3, 4, 3, 3), get(5, 6, 3, 3)],
    "a counter that starts again": [incr(0, 1, 1, 1), delete(2, 3, 2), incr(4, 5, 1, 3)],
}

WRONG: dict[str, list[Operation]] = {
    "a stale read": [put(0, 1, A, 1), put(2, 3, B, 2), get(4, 5, A, 1)],
    "a stale read of nothing": [put(0, 1, A, 1), get(2, 3, None)],
    "a lost write": [put(0, 1, A, 1), put(2, 3, B, 2), get(4, 5, A, 1), get(6, 7, A, 1)],
    "a write that is seen and then gone": [put(0, inf, A), get(2, 3, A, 1), get(4, 5, None)],
    "a read from the future": [get(0, 1, A, 1), put(2, 3, A, 1)],
    "a read from an unknown write's future": [get(0, 1, A, 1), put(2, inf, A)],
    "a value that nobody wrote": [put(0, 1, A, 1), get(2, 3, B, 2)],
    "a dirty read of a refused write": [replace(put(0, 1, A), result=Result.FAIL), get(2, 3, A, 1)],
    "a write applied twice": [put(0, 1, A, 1), put(2, 3, B, 2), get(4, 5, A, 3)],
    "an unknown write applied twice": [
        put(0, inf, A), get(1, 2, A, 1), put(3, 4, B, 2), get(5, 6, B, 2), get(7, 8, A, 3),
    ],
    "reads that see writes in two orders": [
        put(0, 10, A, 1), put(0, 10, B, 2), get(11, 12, A, 1), get(13, 14, B, 2), get(15, 16, A, 1),
    ],
    "a version going back": [put(0, 9, A, 1), put(0, 9, B, 2), get(10, 11, B, 2), get(12, 13, A, 1)],
    "a deleted key that comes back": [put(0, 1, A, 1), delete(2, 3, 2), get(4, 5, A, 1)],
    "nothing between two writes": [put(0, 1, A, 1), put(2, 9, B, 2), get(3, 4, None)],
    "a swap against its condition": [put(0, 1, A, 1), cas(2, 3, B, C, 2)],
    "a swap of nothing against its condition": [put(0, 1, A, 1), cas(2, 3, None, C, 2)],
    "a refusal against its condition": [put(0, 1, A, 1), refused_cas(2, 3, A, 1)],
    "a counter that misses a step": [incr(0, 1, 1, 1), incr(2, 3, 1, 2)],
    "a counter that takes a step twice": [incr(0, 1, 1, 1), incr(2, 3, 3, 2)],
}  # fmt: skip

ONLY_BY_VERSION: dict[str, list[Operation]] = {
    "two writes with one version": [put(0, 1, A, 1), put(2, 3, B, 1)],
    "a version with two values": [put(0, 9, A, 1), put(0, 9, B, 2), get(3, 4, A, 1), get(5, 6, B, 1)],
    "a later write with a lower version": [put(0, 1, A, 2), put(2, 3, B, 1)],
    "writes side by side in the order that versions deny": [
        put(0, 9, A, 1), put(0, 9, B, 2), get(10, 11, A, 1),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_both_checkers_accept(name: str) -> None:
    check(history_of(RIGHT[name]))


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("checker", [check_versions, check_search])
def test_each_checker_rejects(name: str, checker: Callable[[History], None]) -> None:
    with pytest.raises(Violation):
        checker(history_of(WRONG[name]))


@pytest.mark.parametrize("name", ONLY_BY_VERSION)
def test_versions_reveal_errors_that_values_do_not(name: str) -> None:
    check_search(history_of([o for o in ONLY_BY_VERSION[name] if o.version != 1 or o.value != B]))
    with pytest.raises(Violation):
        check_versions(history_of(ONLY_BY_VERSION[name]))


def test_keys_are_independent_of_each_other() -> None:
    other = [replace(o, key=b"other", version=o.version and o.version + 10) for o in RIGHT["a counter"]]
    check(history_of([*RIGHT["a deleted key reads as nothing"], *other]))
    with pytest.raises(Violation, match="other"):
        check(history_of([*other, replace(get(9, 10, 7, 12), key=b"other"), *RIGHT["a counter"]]))


def test_log_convicts_writes_missing_from_it() -> None:
    history = history_of([put(0, 1, A, 1), put(2, 3, B, 2)])
    log: dict[int, tuple[bytes, Value]] = {1: (K, A), 2: (K, B)}
    check_versions(history, log)
    wrongs: list[Log] = [
        {1: (K, A)},
        {1: (K, A), 2: (K, C)},
        {1: (K, A), 2: (b"x", B)},
        log | {3: (K, C)},
        log | {3: (K, B)},
    ]
    for wrong in wrongs:
        with pytest.raises(Violation):
            check_versions(history, wrong)


def test_log_settles_unknown_outcomes() -> None:
    deleted = [put(0, 1, A, 1), delete(2, inf), get(3, 4, None)]
    check_versions(history_of(deleted))
    check_versions(history_of(deleted), {1: (K, A), 2: (K, None)})
    with pytest.raises(Violation, match="held something all the time"):
        check_versions(history_of(deleted), {1: (K, A)})
    unseen = [put(0, 1, A, 1), put(2, inf, B), get(3, 4, A, 1), get(5, 6, A, 1)]
    check_versions(history_of(unseen), {1: (K, A), 7: (K, B)})
    check_versions(history_of(unseen), {1: (K, A)})


# The checkers against each other

Versioned = tuple[Value, int, bool]
"""The value of a key, its version, and True if the version is exact (False if the true version is higher)."""


def versioned(state: Versioned, operation: Operation) -> tuple[bool, Versioned]:
    """Apply an operation to a key with versions: an oracle for the version-based checker."""
    held, version, is_known = state
    fits, after = register(held, operation)
    if operation.result is Result.INFO:
        return fits, (after, version, False) if after != held or operation.kind is not Kind.CAS else state
    if operation.version is None:
        return fits and (operation.kind is not Kind.DEL or held is None), state
    if operation.is_write and not operation.condition_failed:
        return fits and operation.version > version, (after, operation.version, True)
    fits = fits and (operation.version == version if is_known else operation.version > version)
    return fits, (after, operation.version, True)


def accepts(checker: Callable[[History], None], history: History) -> bool:
    try:
        checker(history)
    except Violation:
        return False
    return True


def oracle(history: History) -> bool:
    start: Versioned = (None, 0, True)
    return all(search(o, versioned, start) is None for o in map(relevant, history.by_key().values()))


def random_history(luck: Random, kinds: list[Kind], *, unknown: float) -> tuple[list[Operation], Log]:
    """Return what clients of a correct store saw, and the store's log."""
    plans = []
    for number in range(luck.randint(4, 12)):
        began = luck.uniform(0, 10)
        effect = began + luck.uniform(0, 3)
        plans.append((effect, began, effect + luck.uniform(0, 3), luck.choice(kinds), number))
    held: Value = None
    version = written = 0
    log: dict[int, tuple[bytes, Value]] = {}
    found = []
    for _, began, ended, kind, number in sorted(plans):
        value = None if kind is Kind.INCR else b"%d" % number
        expected = luck.choice([held, A]) if kind is Kind.CAS else None
        planned = op(kind, began, inf, value, expected=expected, delta=1 if kind is Kind.INCR else 0)
        is_unknown = kind is not Kind.GET and luck.random() < unknown
        if is_unknown and luck.random() < 0.5:
            found.append(planned)  # the request never arrived
            continue
        if kind is Kind.GET:
            found.append(get(began, ended, held, version if held is not None else None))
            continue
        if (kind is Kind.DEL and held is None) or (kind is Kind.CAS and expected != held):
            told = delete(began, ended) if kind is Kind.DEL else refused_cas(began, ended, expected, version)
            told = replace(told, version=version if kind is Kind.CAS and held is not None else None)
            found.append(planned if is_unknown else told)
            continue
        written += luck.randint(1, 2)
        version = written
        held = register(held, planned)[1]
        log[version] = (K, held)
        told = replace(planned, ended=ended, result=Result.OK, version=version, value=held)
        found.append(planned if is_unknown else told)
    return found, log


def mutate(luck: Random, operations: list[Operation], log: Log) -> list[Operation]:
    """Change one detail of a random operation, if possible."""
    at = luck.randrange(len(operations))
    old = operations[at]
    match luck.choice(("answer", "time", "drop", "version", "swap")):
        case "answer" if old.kind is Kind.GET:
            version = luck.choice([0, *log])
            value = log[version][1] if version else None
            new = replace(old, value=value, version=version if value is not None else None)
        case "time" if old.result is not Result.INFO:
            shift = luck.uniform(-6, 6)
            new = replace(old, began=old.began + shift, ended=old.ended + shift)
        case "drop":
            return operations[:at] + operations[at + 1 :]
        case "version" if old.version and log:
            new = replace(old, version=luck.choice([*log, 99]))
        case _:
            other = luck.choice(operations)
            if other.result is Result.INFO or old.result is Result.INFO:
                return operations
            new = replace(old, value=other.value, version=other.version)
            if new.kind is not Kind.GET or (new.value is None) != (new.version is None):
                return operations
    return [*operations[:at], new, *operations[at + 1 :]]


@pytest.mark.parametrize(
    ("kinds", "unknown"),
    [
        ([Kind.PUT, Kind.GET], 0.3),
        ([Kind.PUT, Kind.GET, Kind.GET, Kind.DEL], 0.0),
        ([Kind.PUT, Kind.GET, Kind.GET, Kind.DEL, Kind.CAS], 0.0),
        ([Kind.INCR, Kind.GET, Kind.DEL], 0.0),
        ([Kind.PUT, Kind.GET, Kind.GET, Kind.DEL, Kind.CAS], 0.3),
        ([Kind.INCR, Kind.GET], 0.3),
    ],
)
def test_checkers_agree_on_random_histories_half_of_them_mutated(kinds: list[Kind], unknown: float) -> None:
    is_exact = unknown == 0 or kinds == [Kind.PUT, Kind.GET]
    verdicts = {True: 0, False: 0}
    for seed in range(500):
        luck = Random(seed)
        operations, log = random_history(luck, kinds, unknown=unknown)
        for _ in range(luck.randint(1, 3) if seed % 2 else 0):
            operations = mutate(luck, operations, log)
        history = history_of(operations)
        by_version = accepts(check_versions, history)
        by_search = accepts(check_search, history)
        true = oracle(history)
        verdicts[true] += 1
        shown = "\n".join(map(str, sorted(operations, key=lambda o: o.began)))
        assert by_version or not true, f"seed {seed}: checker A is wrong to reject\n{shown}"
        assert by_search or not true, f"seed {seed}: checker B is wrong to reject\n{shown}"
        if is_exact:
            assert true or not by_version, f"seed {seed}: checker A is wrong to accept\n{shown}"
            assert by_search or not by_version, f"seed {seed}: A accepts what has no order at all\n{shown}"
        if not seed % 2:
            assert true, f"seed {seed}: a correct store's history\n{shown}"
            check_versions(history, log)
    assert verdicts[False] > 50, "half of the histories are mutated, and many of those are wrong"


# Cost


def long_history(operations: int, clients: int, unknown: float) -> list[Operation]:
    """Return what `clients` busy clients see of one key. A client with an operation of unknown outcome is replaced."""
    luck = Random(1)
    free = [0.0] * clients
    plans = []
    for number in range(operations):
        client = min(range(clients), key=free.__getitem__)
        effect = free[client] + luck.uniform(0, 1)
        ended = effect + luck.uniform(0, 1)
        plans.append((effect, free[client], ended, number))
        free[client] = ended
    held: Value = None
    version = 0
    found = []
    for _, began, ended, number in sorted(plans):
        if luck.random() < 0.5:
            found.append(get(began, ended, held, version or None))
            continue
        held, version = b"%d" % number, version + 1
        is_unknown = luck.random() < 2 * unknown
        found.append(put(began, inf, held) if is_unknown else put(began, ended, held, version))
    return found


@pytest.mark.parametrize("is_wrong", [False, True])
def test_thousand_operations_on_a_key_are_checked_in_time(is_wrong: bool) -> None:
    operations = long_history(1000, clients=10, unknown=0.02)
    if is_wrong:
        stale = next(o for o in operations if o.kind is Kind.GET and o.value is not None)
        at = next(n for n, o in enumerate(operations) if o.kind is Kind.GET and o.began > 50)
        operations[at] = replace(operations[at], value=stale.value, version=stale.version)
    history = history_of(operations)
    for checker in (check_versions, check_search):
        began = time.process_time()
        assert accepts(checker, history) is not is_wrong
        assert time.process_time() - began < 10


def test_search_that_takes_too_long_does_not_accept() -> None:
    hard = [put(0, inf, b"%d" % number) for number in range(12)]
    hard += [get(1, 2, b"%d" % number) for number in range(12)]
    with pytest.raises(Undecided, match="no verdict"):
        check_search(history_of([*hard, get(3, 4, b"none")]), steps_max=1000)
