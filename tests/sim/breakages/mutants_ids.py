"""Ways to break the assignment of ledger ids, and a recovery's handling of two payloads (docs/protocol.md, B36 and
G27). tests/sim/breakages/mutants_wal.py has the other breakages of the log and runs all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.errors import BookieError
from kvstore.meta.layout import ClusterIdentity
from kvstore.wal import new_ids, opener
from kvstore.wal.new_ids import NewLedgerIds

Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Patch] = {}


def mutant(name: str) -> Callable[[Patch], Patch]:
    def register(patch: Patch) -> Patch:
        MUTANTS[name] = patch
        return patch

    return register


@mutant("takes a ledger id without asking the bookies")
def _unasked_id(patch: pytest.MonkeyPatch) -> None:
    async def ask(*_: Any) -> None: ...

    patch.setattr(NewLedgerIds, "_ask", ask)


@mutant("takes a ledger id before it asks the bookies")
def _early_id(patch: pytest.MonkeyPatch) -> None:
    ask = NewLedgerIds._ask

    async def early(self: Any, *of: Any) -> None:
        ledger = await self._ids.next_id()

        async def next_id(_seen: Any) -> Any:
            del self._ids.next_id
            return ledger

        self._ids.next_id = next_id
        await ask(self, *of)

    patch.setattr(NewLedgerIds, "_ask", early)


@mutant("forgets the ledger ids that it has seen in lists")
def _forgotten_ids(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NewLedgerIds, "saw_list", lambda *_: None)


@mutant("goes on giving ids in an older copy")
def _ids_after_the_mark(patch: pytest.MonkeyPatch) -> None:
    async def check(*_: Any) -> None: ...

    patch.setattr(ClusterIdentity, "check", check)


@mutant("takes another ledger id where one was given again")
def _second_id(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(new_ids, "RANGE_BITS", 0)


@mutant("waits for every bookie before it takes a ledger id")
def _waits_for_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(new_ids, "ANSWERS_S", 60.0)


@mutant("takes a ledger id without an ack quorum of answers")
def _unanswered_id(patch: pytest.MonkeyPatch) -> None:
    ask = NewLedgerIds._ask
    patch.setattr(NewLedgerIds, "_ask", lambda self, ensemble, _: ask(self, ensemble, 0))


@mutant("a recovery chooses between two payloads")
def _chooses(patch: pytest.MonkeyPatch) -> None:
    class Nothing(BookieError):
        """An error that no bookie returns."""

    patch.setattr(opener, "LedgerFenced", Nothing)
