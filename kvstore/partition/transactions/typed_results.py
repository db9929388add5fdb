"""Restores results that came over a link to the types of `commands`. Decides only.

Links carry a tuple or a Record as a list. A home leader logs the results of all parts of a transaction, so they must
have the types that the partitions gave them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.errors import InvalidRequest, StoreError
from kvstore.partition.state.commands import Get, Op, Record, Result
from kvstore.partition.state.results import fits


def restored(ops: Sequence[Op], results: Any) -> list[Result | StoreError]:
    """Return the results of these operations with their types. Raises InvalidRequest if they are no results of these
    operations."""
    if not isinstance(results, list | tuple) or len(results) != len(ops):
        raise InvalidRequest(f"expected {len(ops)} results of a part of a transaction, got another value")
    return [_restored(op, result) for op, result in zip(ops, results, strict=True)]


def _restored(op: Op, result: Any) -> Result | StoreError:
    if isinstance(result, StoreError):
        return result
    if isinstance(result, list | tuple):
        try:
            result = Record(*result) if op.__class__ is Get else tuple(map(_record_within, result))
        except TypeError as error:
            raise InvalidRequest(f"malformed result of operation {op.code}: {error}") from error
    if not fits(op, result):
        raise InvalidRequest(f"expected a result of operation {op.code}, got {type(result).__name__}")
    return result


def _record_within(value: Any) -> Any:
    """Return the former record in the result of an operation with RETURN_OLD."""
    return Record(*value) if isinstance(value, list | tuple) else value
