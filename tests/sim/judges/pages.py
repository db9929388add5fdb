"""Check one page of a range against one state of its partition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.partition.state.commands import Flag, Range, Record, Scan, ScanTokens
from kvstore.ring.hashing import KeyHash
from tests.sim.judges.log_states import LogStates

Fits = Callable[[int], bool]


def page_fits(op: Scan | Range | ScanTokens, result: Any, states: LogStates, hash: KeyHash) -> Fits:
    """Return a function that tells if a state gives this answer to a SCAN, a RANGE or a SCAN_TOKENS."""
    if isinstance(op, ScanTokens):
        return _tokens_fit(op, result, states, hash)
    start, end, limit, flags = op.key, op.end, op.limit, op.flags
    items, following = result
    backwards, is_range = bool(flags & Flag.REVERSE), isinstance(op, Range)
    if following is not None:
        start, end = (following, end) if backwards and is_range else (start, following)
    keys = states.keys_between(start, end)
    if is_range and flags & Flag.COUNT_ONLY:
        return lambda seq: _count_fits(states, keys, seq, items)
    if is_range and flags & Flag.BARE:
        names = list(items)
        return _listed(states, keys, names, backwards, limit, lambda key, seq: _is_there(states, key, seq))
    records = {key: Record(*record) for key, record in items}
    return _listed(
        states,
        keys,
        [key for key, _ in items],
        backwards and is_range,
        limit,
        lambda key, seq: _has(states, key, seq, records[key], keys_only=bool(flags & Flag.KEYS_ONLY)),
    )


def _tokens_fit(op: ScanTokens, result: Any, states: LogStates, hash: KeyHash) -> Fits:
    token_of = hash.token_of
    token, limit, flags = op.token, op.limit, op.flags
    items, following = result
    keys = [
        key for key in states.all_keys() if token <= token_of(key) and (following is None or token_of(key) < following)
    ]
    records = {key: Record(*record) for key, record in items}
    names = [key for key, _ in items]
    tokens = [token_of(key) for key in names]
    if tokens != sorted(tokens) or (following is not None and len(set(tokens)) > max(limit, 1) > 0):
        return lambda _seq: False
    return _listed(
        states,
        keys,
        sorted(names),
        False,
        0,
        lambda key, seq: _has(states, key, seq, records[key], keys_only=bool(flags & Flag.KEYS_ONLY)),
    )


def _listed(
    states: LogStates,
    keys: list[bytes],
    names: list[bytes],
    backwards: bool,
    limit: int,
    has: Callable[[bytes, int], bool],
) -> Fits:
    """Return a function that accepts a state if `names` are in order, at most `limit`, and the state has no other
    key of `keys`."""
    in_order = names == sorted(set(names), reverse=backwards)
    if not in_order or not set(names) <= set(keys) or (limit and len(names) > limit):
        return lambda _seq: False
    listed = set(names)
    absent = [key for key in keys if key not in listed]
    return lambda seq: all(has(key, seq) for key in names) and all(states.may_be(key, seq, None) for key in absent)


def _is_there(states: LogStates, key: bytes, seq: int) -> bool:
    return states.may_be(key, seq, states.record(key, seq)) and states.record(key, seq).version > 0


def _has(states: LogStates, key: bytes, seq: int, found: Record, *, keys_only: bool) -> bool:
    if not keys_only:
        return states.may_be(key, seq, found)
    record = states.record(key, seq)
    return record._replace(value=b"") == found and states.may_be(key, seq, record)


def _count_fits(states: LogStates, keys: list[bytes], seq: int, count: int) -> bool:
    sure = sum(not states.may_be(key, seq, None) for key in keys)
    return sure <= count <= sum(_is_there(states, key, seq) for key in keys)
