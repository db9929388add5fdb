"""Decides when a leader goes on in a new ledger. Decides only."""

from __future__ import annotations

from kvstore.types import LedgerMetadata
from kvstore.wal.choice import BookieChoice
from kvstore.wal.config import LogConfig
from kvstore.wal.repair import bookies_of
from kvstore.wal.writer import LedgerWriter

YOUNG_S = 60.0
"""A ledger of a long list is not rolled before that for anything but its size."""


def is_full(config: LogConfig, writer: LedgerWriter, growth: int) -> bool:
    """Whether the open ledger has as many bytes or entries as it may. `growth`: times the usual."""
    return writer.length >= config.roll_bytes * growth or writer.last_added + 1 >= config.roll_entries * growth


def roll_reason(
    config: LogConfig, writer: LedgerWriter, choice: BookieChoice, *, growth: int, age_s: float, written_s: float
) -> str:
    """Say why the open ledger should be followed by another one; empty: it should not. `age_s`: since it was made,
    `written_s`: since its first entry; `growth`: how much larger and older than usual it gets."""
    if is_full(config, writer, growth):
        return "it is full"
    if written_s >= config.roll_age_s * growth:
        return "it is old"
    if growth > 1 and age_s < YOUNG_S * growth:
        return ""  # other reasons may come again and again: a long list has to wait
    if len(writer.metadata.fragments) >= config.roll_fragments:
        return "its ensemble has changed too often"
    if writer.metadata.quorum.ensemble < min(config.quorum.ensemble, choice.room):
        return "there are more bookies now"
    if _has_lost_a_bookie(choice, writer.metadata):
        return "one of its bookies is gone and there are enough others"
    return ""


def _has_lost_a_bookie(choice: BookieChoice, metadata: LedgerMetadata) -> bool:
    """Whether a bookie that the open ledger names, be it for entries long written, is not registered, and there are
    enough others for as many copies: closed, its copies can be made again elsewhere. Where no other can take its place
    in a striped ensemble the next one is narrower, and stands the next loss. Not while the metadata store is away."""
    if choice.room < metadata.quorum.write:
        return False
    return not all(map(choice.is_registered, bookies_of(metadata)))
