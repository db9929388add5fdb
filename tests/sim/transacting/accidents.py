"""Accidents of transactions: something strikes when a leader evaluates a certain record of a transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any

import pytest

from kvstore.errors import StoreError
from kvstore.partition.leading.prepare import TransactionRules
from kvstore.partition.state.commands import Prepare, Resolve
from kvstore.partition.state.overlay import UNTOUCHED
from kvstore.partition.transactions.attempts import Decide, End
from tests.sim.world.loop import current_node

RECORDS: dict[str, type] = {"prepare": Prepare, "decide": Decide, "resolve": Resolve, "end": End}
Strike = Callable[[str, Any], None]
"""Called with the name of the node that evaluates the record, and the operation."""


class Accident:
    """Strikes at some of the records of one kind."""

    def __init__(self, record: str, times: int = 3, every: int = 7) -> None:
        """`times`: how often it strikes. `every`: at which of the records."""
        self.record, self.left, self._every = record, times, every
        self.strike: Strike | None = None
        """Set by the story."""
        self.struck = 0
        self._seen = 0

    def evaluated(self, op: Any) -> None:
        """A leader has evaluated a record, which is in the entry under construction."""
        if self.strike is None or not self.left:
            return
        self._seen += 1
        if self._seen % self._every == 0:
            node = current_node.get()
            assert node is not None
            self.left -= 1
            self.struck += 1
            # In its own context, so that what it begins does not end with the node's process.
            asyncio.get_running_loop().call_soon(self.strike, node.name, op, context=Context())


@contextmanager
def at_records(accident: Accident) -> Iterator[None]:
    """Let the accident see each record that a leader evaluates in the block."""
    original, kind = TransactionRules.__init__, RECORDS[accident.record]

    def init(self: TransactionRules, *args: Any) -> None:
        original(self, *args)
        evaluate = self.by_class[kind]

        def evaluate_and_tell(op: Any, item: Any, row_key: bytes) -> Any:
            result = evaluate(op, item, row_key)
            if result is not UNTOUCHED and not isinstance(result, StoreError):
                accident.evaluated(op)
            return result

        self.by_class[kind] = evaluate_and_tell

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionRules, "__init__", init)
        yield
