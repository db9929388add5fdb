"""Decides on nothing but plain puts, as loads bring them by the million, in columns. Decides only.

What it decides is what `operations` decides one by one; whatever is not plain is left to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any

from kvstore.limits import BATCH_BYTES_MAX, KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.partition.state.commands import Code, Op
from kvstore.partition.state.draft import Draft
from kvstore.partition.state.engine import Engine
from kvstore.partition.state.operations import BATCH_OPS_MAX
from kvstore.partition.state.overlay import Overlay
from kvstore.partition.state.rows import AGED, EXPIRES

LOOKED_UP_MAX = 128
"""Records read at once: any of them may have a megabyte."""

_PUT = int(Code.PUT)
_version = Struct(">Q")
_NEVER = bytes(_version.size)


def put_all(
    draft: Draft, ops: tuple[Op, ...], row_keys: list[bytes], engine: Engine, overlay: Overlay
) -> list[int] | None:
    """Write the keys of a batch; `row_keys` are where their records stand. Returns the versions; None, and nothing is
    written, if it is not plain: flags, expiries, sizes that are refused, a key twice or touched by what is under way,
    or a record there that expires. Raises OSError."""
    if not 0 < len(ops) <= BATCH_OPS_MAX or any(op[0] != _PUT or op[3] or op[4] for op in ops):
        return None
    keys, values = [op[1] for op in ops], [op[2] for op in ops]
    if overlay.touched_of(keys) or not _may_be_together(draft, keys, values):
        return None
    created: list[int] = []
    for begin in range(0, len(row_keys), LOOKED_UP_MAX):
        some = _created(engine.multi_get(row_keys[begin : begin + LOOKED_UP_MAX]))
        if some is None:
            return None
        created += some
    return draft.put_all(keys, row_keys, values, created)


def put_together(
    draft: Draft,
    items: list[tuple[Op, Any, int]],
    keys: list[bytes],
    row_keys: list[bytes],
    rows: Sequence[bytes | None],
) -> list[int] | None:
    """The same for operations that came by themselves, if none has a request id. Nothing under way touches the keys,
    and `rows` are what the engine has of them."""
    for op, _, _ in items:
        if op[0] != _PUT or op[3] or op[4] or op[6] is not None:
            return None
    values = [op[2] for op, _, _ in items]
    if not _may_be_together(draft, keys, values):
        return None
    created = _created(rows)
    return None if created is None else draft.put_all(keys, row_keys, values, created)


def _may_be_together(draft: Draft, keys: list[bytes], values: list[bytes]) -> bool:
    """Whether all keys differ, the draft has none of them, and the store takes these sizes."""
    is_new = len(set(keys)) == len(keys) and draft.layer.rows.keys().isdisjoint(keys)
    return is_new and _fit(list(map(len, keys)), list(map(len, values)))


def _created(rows: Sequence[bytes | None]) -> list[int] | None:
    """The sequence that created each record, 0 for one that is absent; None if a record expires."""
    if not any(rows):
        return [0] * len(rows)
    flags = bytes([row[0] if row is not None else 0 for row in rows])
    if max(flags) >= EXPIRES:
        return None
    versions = [
        _NEVER if row is None else row[17:25] if flag == AGED else row[1:9]
        for flag, row in zip(flags, rows, strict=True)
    ]
    return [each for (each,) in _version.iter_unpack(b"".join(versions))]


def _fit(keys: list[int], values: list[int]) -> bool:
    """Whether the store takes keys and values of these lengths in one batch."""
    each_fits = min(keys) > 0 and max(keys) <= KEY_BYTES_MAX and max(values) <= VALUE_BYTES_MAX
    return each_fits and sum(keys) + sum(values) <= BATCH_BYTES_MAX
