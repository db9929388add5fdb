"""The metadata rules when a copy of the metadata store replaces the store."""

from __future__ import annotations

from dataclasses import replace

from kvstore.meta import ledger_metadata, paths
from kvstore.types import BookieId, DigestType, Fragment, LedgerId, LedgerMetadata, LedgerState, Quorum
from tests.sim.judges.rules import MetadataRules

LEDGER = LedgerId(18)
OPEN = LedgerMetadata(
    ledger=LEDGER,
    quorum=Quorum(3, 3, 2),
    fragments=(Fragment(0, tuple(map(BookieId, ("b1", "b2", "b3")))),),
    digest=DigestType.CRC32C,
)
IN_RECOVERY = replace(OPEN, state=LedgerState.IN_RECOVERY)
CLOSED = replace(OPEN, state=LedgerState.CLOSED, last_entry=22, length=100)


def broken_by(step: bool) -> list[str]:
    """Close the ledger, restore a copy in which the ledger is open, and let a node begin its recovery. With `step`,
    a write opens the ledger again instead of the restore."""
    broken: list[str] = []
    rules = MetadataRules(lambda _: -1, broken.append, lambda *_: None)
    path = paths.ledger(LEDGER)
    states = [ledger_metadata.encode(each) for each in (OPEN, CLOSED, OPEN, IN_RECOVERY)]
    rules(path, None, states[0])
    rules(path, states[0], states[1])
    (rules if step else rules.restored)(path, states[1], states[2])
    rules(path, states[2], states[3])
    return [each.partition(":")[0] for each in broken]


# docs/protocol.md B29
def test_node_in_restored_copy_is_judged_by_that_copy() -> None:
    """A node that did not know of a later copy began a recovery in the older one. The rules accused it of opening a
    closed ledger (seed 9500456)."""
    assert broken_by(step=False) == []
    assert "L1 states only go forward" in broken_by(step=True)


# docs/protocol.md B29
def test_writer_over_a_restored_copy_is_judged_by_its_own_ensemble() -> None:
    """It had replaced a bookie after the copy was made, and confirmed an entry before it noticed the copy. The rules
    accused it of an entry without an ack quorum (seed 1612517 of transactions)."""
    broken: list[str] = []
    rules = MetadataRules(lambda _: -1, broken.append, lambda *_: None)
    path = paths.ledger(LEDGER)
    moved = replace(OPEN, fragments=(Fragment(0, tuple(map(BookieId, ("b1", "b2", "b4")))),))
    before, after, recovering = map(ledger_metadata.encode, (OPEN, moved, IN_RECOVERY))
    rules(path, None, before)
    rules(path, before, after)
    rules.restored(path, after, before)
    rules(path, before, recovering)
    assert rules.ledgers[LEDGER] == IN_RECOVERY
    assert rules.written[LEDGER] == moved
    rules.restored(path, recovering, after)
    rules(path, after, None)
    assert (rules.written, broken) == ({}, [])
