"""Decides when a leader rolls to a new ledger. Decides only."""

from __future__ import annotations

from kvstore.types import LedgerMetadata
from kvstore.wal.choice import BookieChoice
from kvstore.wal.config import LogConfig
from kvstore.wal.repair import bookies_of
from kvstore.wal.writer import LedgerWriter

YOUNG_S = 60.0
"""Minimum age at which a ledger of a long list is rolled for a reason other than its size."""


def is_full(config: LogConfig, writer: LedgerWriter, growth: int) -> bool:
    """Return True if the open ledger has reached its size or entry limit, each multiplied by `growth`."""
    return writer.length >= config.roll_bytes * growth or writer.last_added + 1 >= config.roll_entries * growth


def roll_reason(
    config: LogConfig, writer: LedgerWriter, choice: BookieChoice, *, growth: int, age_s: float, written_s: float
) -> str:
    """Return the reason to roll the open ledger, or "" if there is none. `age_s` is the number of seconds since the
    ledger was created, `written_s` since its first entry. `growth` multiplies the usual size and age."""
    if is_full(config, writer, growth):
        return "the ledger is full"
    if written_s >= config.roll_age_s * growth:
        return "the ledger is old"
    if growth > 1 and age_s < YOUNG_S * growth:
        return ""  # other reasons may recur often: a long list has to wait
    if len(writer.metadata.fragments) >= config.roll_fragments:
        return "its ensemble has changed too often"
    if writer.metadata.quorum.ensemble < min(config.quorum.ensemble, choice.ensemble_max):
        return "there are more bookies now"
    if _has_lost_a_bookie(choice, writer.metadata):
        return "one of its bookies is gone and there are enough others"
    return ""


def _has_lost_a_bookie(choice: BookieChoice, metadata: LedgerMetadata) -> bool:
    """Return True if a bookie that the open ledger names, even for old entries, is not registered, and enough other
    bookies exist for the same number of copies.

    Once the ledger is closed, its copies can be made on other bookies. If no other bookie can take the place in a
    striped ensemble, the next ensemble is narrower and survives the next loss. Returns False while the metadata store
    is unreachable.
    """
    if choice.ensemble_max < metadata.quorum.write:
        return False
    return not all(map(choice.is_registered, bookies_of(metadata)))
