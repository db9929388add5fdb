"""Checker B: is a history linearizable? It searches for an order key by key and trusts only values and times.

The search is the algorithm of Wing and Gong with Lowe's memoization. A state consists of the set of done operations and
the value of the key. An operation of unknown outcome may take effect at any moment after its start, or never. A search
that exceeds its number of steps fails, like a history without an order. Keep to about ten processes per key and few
unknown outcomes.

`check` applies this checker and the version-based checker (versions.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Generic, TypeVar

from tests.sim.judges.history import History, Kind, Operation, Result, Value
from tests.sim.versions import Log, Violation, check_versions

S = TypeVar("S")

STEPS_MAX = 2_000_000
_SHOWN_MAX = 12
_END = b","
"""Terminates each item of a list with distinguishable items."""
_UNSEEN = b"\0nobody has seen it"


class Undecided(AssertionError):
    """The search exceeded its number of steps. Treat this as a failure and make the history smaller."""


def check(history: History, log: Log | None = None) -> None:
    """Raise Violation or Undecided unless both checkers accept."""
    check_versions(history, log)
    check_search(history)


def check_search(history: History, *, steps_max: int = STEPS_MAX) -> None:
    """Raise Violation unless each key has an order, or Undecided if the search takes more than `steps_max` steps."""
    for key, operations in sorted(history.by_key().items()):
        order = search(relevant(operations), _step_of(operations), None, steps_max=steps_max)
        if order is not None:
            shown = "\n  ".join(map(str, order[:_SHOWN_MAX]))
            raise Violation(f"{key!r}: no order of operations explains all answers; stuck at\n  {shown}")


def register(held: Value, operation: Operation) -> tuple[bool, Value]:
    """Apply an operation to a key's value. Return True if its answer fits, and the value after it."""
    known = operation.result is not Result.INFO
    match operation.kind:
        case Kind.PUT:
            return True, operation.value
        case Kind.GET:
            return operation.value == held, held
        case Kind.DEL:
            return True, None
        case Kind.CAS if operation.condition_failed:
            return operation.expected != held, held
        case Kind.CAS:
            fits = operation.expected == held
            return fits or not known, operation.value if fits else held
        case Kind.INCR:
            total = (held if isinstance(held, int) else 0) + operation.delta
            return total == operation.value or not known, total
        case Kind.SWAP:
            return operation.expected == held or not known, operation.value
        case Kind.APPEND:
            assert isinstance(operation.value, bytes)
            grown = (held if isinstance(held, bytes) else b"") + operation.value
            return len(grown) == operation.delta or not known, grown


Step = Callable[[Value, Operation], tuple[bool, Value]]


def _step_of(operations: list[Operation]) -> Step:
    """Return the step function of a key. This is `register`, with a stricter check for a list with distinguishable
    items: the items before an item in an answer are the list at the time of its append. Raises Violation if two
    answers differ or an answer holds an item that no process appended."""
    if not _are_items(operations):
        return register
    appended = {o.value for o in operations if o.kind is Kind.APPEND and o.result is not Result.FAIL}
    before: dict[Value, bytes] = {}
    for answer in map(_found, operations):
        prefix = b""
        for item in answer.split(_END)[:-1] if isinstance(answer, bytes) else ():
            if before.setdefault(item + _END, prefix) != prefix:
                raise Violation(f"{item + _END!r} stands after {prefix!r} and after {before[item + _END]!r}")
            if item + _END not in appended:
                raise Violation(f"{item + _END!r} stands after {prefix!r}, but was never appended")
            prefix += item + _END

    def step(held: Value, operation: Operation) -> tuple[bool, Value]:
        if operation.kind is Kind.APPEND and before.get(operation.value, held or b"") != (held or b""):
            return False, held
        return register(held, operation)

    return step


def _found(operation: Operation) -> Value:
    """Return the former value of the key according to the operation's answer."""
    if operation.result is not Result.OK:
        return None
    return operation.value if operation.kind is Kind.GET else operation.expected


def _are_items(operations: list[Operation]) -> bool:
    """Return True if the key is a list with distinguishable items."""
    if any(o.kind in (Kind.PUT, Kind.CAS, Kind.SWAP, Kind.INCR) and o.value is not None for o in operations):
        return False
    appended = [o.value for o in operations if o.kind is Kind.APPEND]
    items = [each for each in appended if isinstance(each, bytes) and each.find(_END) == len(each) - len(_END)]
    return bool(items) and len(items) == len(appended)


def relevant(operations: list[Operation]) -> list[Operation]:
    """Drop operations without information: failed reads, refused writes, and PUTs of unknown outcome that no other
    operation can have noticed. If such a PUT may have been noticed because the value differed, give all unseen
    values one common value."""
    told = [o for o in operations if o.result is Result.OK or o.condition_failed or (_is_unknown(o) and o.is_write)]
    kinds = {o.kind for o in told}
    if Kind.APPEND in kinds:
        return _with_unseen_suffixes(told)
    seen = {o.value for o in told if o.kind is Kind.GET} | {o.expected for o in told}
    if kinds <= {Kind.PUT, Kind.GET, Kind.DEL}:
        return [o for o in told if not (_is_unseen(o, seen) and o.kind is Kind.PUT)]
    return [replace(o, value=_UNSEEN) if _is_unseen(o, seen) else o for o in told]


def _with_unseen_suffixes(told: list[Operation]) -> list[Operation]:
    """Replace appended items that occur in no answer by placeholders: only their length is noticeable."""
    answers = [each for each in map(_found, told) if isinstance(each, bytes)]
    if _are_items(told):
        seen = {item + _END for answer in answers for item in answer.split(_END)}
        is_seen = seen.__contains__
    else:
        text = b"\n".join(answers)
        is_seen = text.__contains__
    return [
        replace(o, value=b"?" * len(o.value))
        if o.kind is Kind.APPEND and isinstance(o.value, bytes) and not is_seen(o.value)
        else o
        for o in told
    ]


def _is_unseen(operation: Operation, seen: set[Value]) -> bool:
    """Return True if this is a write of unknown outcome whose value occurs in no answer."""
    is_put = operation.kind in (Kind.PUT, Kind.CAS, Kind.SWAP) and operation.value is not None
    return is_put and _is_unknown(operation) and operation.value not in seen


def search(
    operations: list[Operation],
    step: Callable[[S, Operation], tuple[bool, S]],
    start: S,
    *,
    steps_max: int = STEPS_MAX,
) -> list[Operation] | None:
    """Return None if `step` accepts all operations in some order. Otherwise return the operations in flight at the
    furthest moment that could be explained. Raises Undecided."""
    operations = sorted(operations, key=lambda o: (o.began, o.ended))
    must = sum(1 << index for index, o in enumerate(operations) if not _is_unknown(o))
    tried = _Tried[S](must)
    path = [(0, start, iter(_choices(operations, 0, step, start)))]
    furthest, stuck = 0, _first(operations, 0)
    for _ in range(steps_max):
        done, _, choices = path[-1]
        if done & must == must:
            return None
        choice = next(choices, None)
        if choice is None:
            path.pop()
            if not path:
                return [operations[index] for index in stuck]
        elif tried.is_new(*choice):
            path.append((*choice, iter(_choices(operations, choice[0], step, choice[1]))))
            if len(path) > furthest:
                furthest, stuck = len(path), _first(operations, choice[0])
    raise Undecided(f"no verdict on {len(operations)} operations of {operations[0].key!r} after {steps_max} steps")


class _Tried(Generic[S]):
    """The states that a search has visited. A state that differs from a visited one only by additional done
    operations of unknown outcome is not new: it has no continuation that the visited state lacks."""

    def __init__(self, must: int) -> None:
        self._must = must
        self._done: defaultdict[tuple[int, S], list[int]] = defaultdict(list)

    def is_new(self, done: int, state: S) -> bool:
        before = self._done[done & self._must, state]
        if any(each & ~done == 0 for each in before):
            return False
        before.append(done & ~self._must)
        return True


def _choices(
    operations: list[Operation], done: int, step: Callable[[S, Operation], tuple[bool, S]], state: S
) -> list[tuple[int, S]]:
    """Return the possible next states as (done, state), ordered by the end of the operation that leads there.

    A read that fits is done at once without alternatives, because any valid order allows moving it here. Operations of
    unknown outcome that change nothing are never done. Of equal operations of unknown outcome only the first is tried,
    because the others have the same continuations.
    """
    found = []
    likes = set()
    for index in _first(operations, done):
        operation = operations[index]
        fits, after = step(state, operation)
        if fits and after == state and _only_reads(operation):
            return [(done | 1 << index, state)]
        if fits and _is_unknown(operation):
            like = operation.kind, operation.value, operation.expected, operation.delta
            if after == state or like in likes:
                continue
            likes.add(like)
        if fits:
            found.append((operation.ended, done | 1 << index, after))
    found.sort(key=lambda each: each[0])
    return [(following, after) for _, following, after in found]


def _first(operations: list[Operation], done: int) -> list[int]:
    """Return the operations that may come next: pending operations that began before any pending operation ended."""
    end = inf
    found = []
    rest = ~done & ((1 << len(operations)) - 1)
    while rest:
        lowest = rest & -rest
        index = lowest.bit_length() - 1
        if operations[index].began > end:
            break
        end = min(end, operations[index].ended)
        found.append(index)
        rest ^= lowest
    return found


def _only_reads(operation: Operation) -> bool:
    return operation.kind is Kind.GET or operation.condition_failed


def _is_unknown(operation: Operation) -> bool:
    return operation.result is Result.INFO
