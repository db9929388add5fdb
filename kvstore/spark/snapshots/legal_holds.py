"""The file of a legal hold (docs/reference/formats.md, Snapshots): why a snapshot must stay, and since when."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import Corrupted
from kvstore.meta import codec
from kvstore.spark.snapshots.remote import Location
from kvstore.spark.snapshots.stored import read_document

REASON_MAX = 500
"""Maximum characters of a reason."""
UNREADABLE = "its file cannot be read, so the hold stays until it is released"


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalHold:
    """A legal hold on one snapshot."""

    reason: str
    placed_ms: int
    """Time in milliseconds since 1970, by the clock of the machine that placed the hold; 0 if the file cannot be
    read."""


def encode_hold(hold: LegalHold) -> bytes:
    return codec.encode(hold)


def decode_hold(path: Location) -> LegalHold:
    """Return the hold in a file. A file that is damaged or not regular is a hold, too: a doubt must not remove
    anything. Raises FileNotFoundError, and OSError if the place cannot be reached."""
    try:
        return codec.decode(LegalHold, read_document(path, levels=1), what=str(path))
    except Corrupted:
        return LegalHold(reason=UNREADABLE, placed_ms=0)
