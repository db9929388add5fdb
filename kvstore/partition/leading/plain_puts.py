"""A batch of nothing but plain puts, as loads bring them by the million: decided on in columns. Decides only.

What it decides is what `operations` decides one by one; whatever is not plain is left to that.
"""

from __future__ import annotations

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


def put_all(
    draft: Draft, ops: tuple[Op, ...], row_keys: list[bytes], engine: Engine, overlay: Overlay
) -> list[int] | None:
    """Write the keys of a batch; `row_keys` are where their records stand. Returns the versions; None, and nothing is
    written, if it is not plain: flags, expiries, sizes that are refused, a key twice or touched by what is under way,
    or a record there that expires. Raises OSError."""
    if not 0 < len(ops) <= BATCH_OPS_MAX or any(op[0] != _PUT or op[3] or op[4] for op in ops):
        return None
    keys, values = [op[1] for op in ops], [op[2] for op in ops]
    is_touched = overlay.touched_of(keys) or not draft.layer.rows.keys().isdisjoint(keys)
    if is_touched or len(set(keys)) < len(keys) or not _fit(list(map(len, keys)), list(map(len, values))):
        return None
    created: list[int] = []
    for begin in range(0, len(row_keys), LOOKED_UP_MAX):
        for row in engine.multi_get(row_keys[begin : begin + LOOKED_UP_MAX]):
            if row is not None and row[0] >= EXPIRES:
                return None
            created.append(0 if row is None else int.from_bytes(row[17:25] if row[0] == AGED else row[1:9], "big"))
    return draft.put_all(keys, row_keys, values, created)


def _fit(keys: list[int], values: list[int]) -> bool:
    """Whether the store takes keys and values of these lengths in one batch."""
    each_fits = min(keys) > 0 and max(keys) <= KEY_BYTES_MAX and max(values) <= VALUE_BYTES_MAX
    return each_fits and sum(keys) + sum(values) <= BATCH_BYTES_MAX
