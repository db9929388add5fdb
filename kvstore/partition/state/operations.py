"""Implements each operation on keys: conditions, counters, appends, expiries. Decides only.

An operation finds the key's live record, adds effects to the draft, and returns its result or raises Refused. Before it
may treat a key that is past its expiry as absent, the key's delete must be in the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvstore.errors import ConditionFailed, InvalidRequest, StoreError
from kvstore.limits import BATCH_BYTES_MAX, BATCH_OPS_MAX, CLIENT_BYTES, KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.partition.state.commands import (
    Append,
    Batch,
    Check,
    Code,
    Delete,
    Expire,
    Flag,
    Get,
    Increment,
    Meta,
    Op,
    Put,
    Record,
    RequestId,
    Result,
    Transact,
)
from kvstore.partition.state.draft import Draft
from kvstore.partition.state.overlay import Row
from kvstore.partition.state.traits import IN_BATCH, WRITES

# Plain integers, because `&` on an IntFlag costs ten times as much.
_IF_ABSENT, _IF_PRESENT, _IF_VERSION = int(Flag.IF_ABSENT), int(Flag.IF_PRESENT), int(Flag.IF_VERSION)
_KEEP_TTL, _RETURN_OLD, _RELATIVE_TTL = int(Flag.KEEP_TTL), int(Flag.RETURN_OLD), int(Flag.RELATIVE_TTL)
_IF_NO_TTL, _IF_TTL, _IF_LONGER = int(Flag.IF_NO_TTL), int(Flag.IF_TTL), int(Flag.IF_LONGER)
_IF_SHORTER, _INDEPENDENT = int(Flag.IF_SHORTER), int(Flag.INDEPENDENT)
_ANY_CONDITION = _IF_ABSENT | _IF_PRESENT | _IF_VERSION

INTEGER_MIN, INTEGER_MAX = -(1 << 63), (1 << 63) - 1
INTEGER_DIGITS_MAX = 20
BATCH_EFFECT_BYTES_MAX = 5 << 19
"""Maximum bytes that a batch adds to its entry, remembered results included. A bookie accepts no entry of 5 MiB."""
BATCH_RESULT_BYTES_MAX = 16 << 20
"""Maximum bytes of values in the answer to a batch."""
_U64 = 1 << 64
EXPIRES_MS_MAX = 1 << 62
"""Values in the log must fit its columns: an entry that cannot be applied would stop every replica."""


class Deciding(Protocol):
    """The interface through which an operation reads and changes the state."""

    draft: Draft

    def live(self, key: bytes) -> Row | None:
        """Return the key's record as the preceding operations leave it; None if the key is absent."""
        ...


def check_sizes(key: bytes, value: bytes = b"") -> None:
    """Raise InvalidRequest if the key is empty or too long, or the value is too long."""
    if not 0 < len(key) <= KEY_BYTES_MAX:
        raise InvalidRequest(f"expected a key of 1 to {KEY_BYTES_MAX} bytes, got {len(key)}")
    if len(value) > VALUE_BYTES_MAX:
        raise InvalidRequest(f"expected a value of at most {VALUE_BYTES_MAX} bytes, got {len(value)}")


def check_request(request: RequestId) -> None:
    """Raise InvalidRequest if the request id is malformed."""
    client, sequence, first_unacked, seen_ms = request
    if len(client) != CLIENT_BYTES or not (0 < sequence < _U64 and 0 <= first_unacked < _U64 and 0 <= seen_ms < _U64):
        raise InvalidRequest(f"expected a client of {CLIENT_BYTES} bytes and 64-bit numbers, got {tuple(request)}")


def _record(row: Row | None) -> Record | None:
    return None if row is None else Record._make(row)


def _get(d: Deciding, op: Get) -> Result:
    return _record(d.live(op.key))


def _meta(d: Deciding, op: Meta) -> Result:
    row = d.live(op.key)
    return None if row is None else (len(row[0]), *row[1:])


def is_met(flags: int, version: int, row: Row | tuple[Any, ...] | None) -> bool:
    """Return True if the condition in `flags` and `version` holds for a row, or for the result of a META."""
    if not flags & _ANY_CONDITION:
        return True
    found = 0 if row is None else row[1]
    if flags & _IF_ABSENT and found:
        return False
    if flags & _IF_PRESENT and not found:
        return False
    return not flags & _IF_VERSION or version == found


def _expiry_at(draft: Draft, expires_ms: int, flags: int) -> int:
    at_ms = draft.time_ms + expires_ms if flags & _RELATIVE_TTL else expires_ms
    if at_ms > EXPIRES_MS_MAX:
        raise InvalidRequest(f"expected an expiry before {EXPIRES_MS_MAX} ms, got {at_ms}")
    return at_ms


# docs/protocol.md N4
def _default_expiry(draft: Draft, key: bytes) -> int:
    """Return the expiry of a record whose write sets none."""
    return 0 if draft.meter is None else draft.meter.expiry_ms(key, draft.time_ms)


def _put(d: Deciding, op: Put) -> Result:
    key, value, expires_ms, flags = op.key, op.value, op.expires_ms, int(op.flags)
    check_sizes(key, value)
    row = d.live(key)
    if not is_met(flags, op.version, row):
        found = 0 if row is None else row[1]
        if flags & _RETURN_OLD:
            return (False, found, _record(row))
        raise ConditionFailed(found)
    if flags & _KEEP_TTL:
        expires_ms = _default_expiry(d.draft, key) if row is None else row[4]
    elif expires_ms:
        expires_ms = _expiry_at(d.draft, expires_ms, flags)
    elif d.draft.meter is not None:
        expires_ms = _default_expiry(d.draft, key)
    if 0 < expires_ms <= d.draft.time_ms or expires_ms < 0:
        # The record expires as it is written; the effect is that the former record is gone.
        seq = d.draft.note(key) if row is None else d.draft.delete(key, row)
    else:
        seq = d.draft.put(key, value, row, expires_ms)
    return (True, seq, _record(row)) if flags & _RETURN_OLD else seq


def _delete(d: Deciding, op: Delete) -> Result:
    key, flags = op.key, int(op.flags)
    check_sizes(key)
    row = d.live(key)
    if not is_met(flags, op.version, row):
        raise ConditionFailed(0 if row is None else row[1])
    seq = 0 if row is None else d.draft.delete(key, row)
    return (seq, _record(row)) if flags & _RETURN_OLD else seq


def _integer(value: bytes) -> int:
    """Parse a value as an integer. Raises InvalidRequest."""
    digits = value[1:] if value.startswith(b"-") else value
    canonical = digits.isdigit() and len(value) <= INTEGER_DIGITS_MAX and (digits[:1] != b"0" or value == b"0")
    number = int(value) if canonical else INTEGER_MAX + 1
    if not INTEGER_MIN <= number <= INTEGER_MAX:
        raise InvalidRequest("value is not an integer or out of range")
    return number


def _increment(d: Deciding, op: Increment) -> Result:
    key = op.key
    check_sizes(key)
    row = d.live(key)
    number = (0 if row is None else _integer(row[0])) + op.delta
    if not INTEGER_MIN <= number <= INTEGER_MAX:
        raise InvalidRequest("increment or decrement would overflow")
    return (number, d.draft.put(key, b"%d" % number, row, _default_expiry(d.draft, key) if row is None else row[4]))


def _append(d: Deciding, op: Append) -> Result:
    key = op.key
    row = d.live(key)
    value = op.value if row is None else row[0] + op.value
    check_sizes(key, value)
    return (len(value), d.draft.put(key, value, row, _default_expiry(d.draft, key) if row is None else row[4]))


def _may_set_expiry(flags: int, old_ms: int, new_ms: int) -> bool:
    """Apply the conditions of Redis's EXPIRE NX, XX, GT, LT. No expiry counts as the latest."""
    if flags & _IF_NO_TTL and old_ms:
        return False
    if flags & _IF_TTL and not old_ms:
        return False
    if flags & _IF_LONGER and (not old_ms or new_ms <= old_ms):
        return False
    return not (flags & _IF_SHORTER and old_ms and new_ms >= old_ms)


def _expire(d: Deciding, op: Expire) -> Result:
    key, expires_ms, flags = op.key, op.expires_ms, int(op.flags)
    check_sizes(key)
    row = d.live(key)
    if row is None:
        return False
    if not expires_ms and not flags & _RELATIVE_TTL:
        if not row[4]:
            return False
        d.draft.put(key, row[0], row, 0)
        return True
    expires_ms = _expiry_at(d.draft, expires_ms, flags)
    if not _may_set_expiry(flags, row[4], expires_ms):
        return False
    if expires_ms <= d.draft.time_ms:
        d.draft.delete(key, row)
    else:
        d.draft.put(key, row[0], row, expires_ms)
    return True


def _check(d: Deciding, op: Check) -> Result:
    check_sizes(op.key)
    row = d.live(op.key)
    found = 0 if row is None else row[1]
    if not is_met(int(op.flags), op.version, row):
        raise ConditionFailed(found)
    return found


# docs/protocol.md P11
def carry_out_batch(d: Deciding, op: Batch | Transact, returned_bytes: int = 0) -> Result:
    """Carry out a batch in one entry: completely or not at all, or with INDEPENDENT each operation on its own, provided
    that every CHECK holds. `returned_bytes` are the bytes of values that other partitions add to its answer, which is
    logged here if the batch has a request id."""
    ops, flags, request = op.ops, op.flags, op.request
    _check_batch(ops)
    results: list[Result | StoreError] = []
    answer_bytes = returned_bytes
    mark = d.draft.begin(is_atomic=not flags & _INDEPENDENT)
    for each in ops:
        try:
            results.append(_RULES[each.code](d, each))
        except StoreError as error:
            if not flags & _INDEPENDENT or each.__class__ is Check:
                d.draft.undo(mark)
                # Deletes of expired keys stay, because the client may have seen a refusal that calls a key absent.
                for found in ops[: len(results) + 1]:
                    d.live(found.key)
                if isinstance(error, ConditionFailed) and op.__class__ is not Batch:
                    raise ConditionFailed(error.version, each.key) from None
                raise
            results.append(error)
        answer_bytes += _value_bytes(results[-1])
        logged_bytes = d.draft.size - mark.size + (answer_bytes if request is not None else 0)
        if logged_bytes > BATCH_EFFECT_BYTES_MAX or answer_bytes > BATCH_RESULT_BYTES_MAX:
            d.draft.undo(mark)
            raise InvalidRequest(
                f"expected a batch that logs {BATCH_EFFECT_BYTES_MAX} and returns {BATCH_RESULT_BYTES_MAX} bytes, "
                f"at most, got at least {logged_bytes} and {answer_bytes}; split the batch"
            )
    try:
        d.draft.keep(mark)
    except StoreError:
        d.draft.undo(mark)
        for each in ops:
            d.live(each.key)
        raise
    return results


def _value_bytes(result: Result) -> int:
    """Return the bytes of the values in the result of one operation."""
    if result.__class__ is Record:
        return len(result.value)
    return sum(map(_value_bytes, result)) if result.__class__ is tuple else 0


def _check_batch(ops: tuple[Op, ...]) -> None:
    """Raise InvalidRequest if the batch is empty, too large, or contains an operation that cannot be in a batch."""
    if not 0 < len(ops) <= BATCH_OPS_MAX:
        raise InvalidRequest(f"expected 1 to {BATCH_OPS_MAX} operations in a batch, got {len(ops)}; split the batch")
    for op in ops:
        if op.code not in IN_BATCH:
            raise InvalidRequest(f"expected operations that may be in a batch, got {op.code}")
    size = sum(map(size_of, ops))
    # One value may fill a batch; its key may come on top.
    if size > BATCH_BYTES_MAX + KEY_BYTES_MAX:
        raise InvalidRequest(f"expected up to {BATCH_BYTES_MAX} bytes of keys and values in a batch, got {size}")


def size_of(op: Op) -> int:
    """Return the number of bytes of the keys and values that the operation carries. The end of a range is a key, and
    may be as long as a value."""
    if op.__class__ is Put or op.__class__ is Append:
        return len(op.key) + len(op.value)
    return sum(map(size_of, op.ops)) if op.ops else len(op.key) + len(op.end)


_RULES: dict[int, Callable[[Deciding, Any], Result]] = {
    Code.GET: _get,
    Code.META: _meta,
    Code.PUT: _put,
    Code.DELETE: _delete,
    Code.INCREMENT: _increment,
    Code.APPEND: _append,
    Code.EXPIRE: _expire,
    Code.CHECK: _check,
    Code.BATCH: carry_out_batch,
    Code.TRANSACT: carry_out_batch,
}
MUTATIONS = {code: rule for code, rule in _RULES.items() if code in WRITES}
"""The mutations that a leader's queue accepts, by code, without DELETE_RANGE."""
