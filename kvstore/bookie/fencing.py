"""Judges writes to a ledger on this bookie, and denials of entries. Decides only; facts.py persists.

A fence is never lifted, outlives its ledger as a tombstone, and is on the disk before the request that set it gets any
answer (docs/protocol.md, bookies). A bookie that has lost its disk has lost its fences too, so an ordinary add that it
cannot judge by itself is judged by the ledger's metadata: a recovery marks it there before it fences anybody.
"""

from __future__ import annotations

from enum import Enum, auto

from kvstore.bookie.ledger import Ledger
from kvstore.proto.digest import master_key
from kvstore.types import BookieId, LedgerMetadata, LedgerState


class WriteVerdict(Enum):
    ADMIT = auto()
    ASK = auto()
    """Only the ledger's metadata can tell."""
    FENCED = auto()
    """The sender is not the ledger's writer any more."""
    WRONG_KEY = auto()
    UNKNOWN = auto()
    """Neither yes nor no: the sender must turn to somebody else."""


# docs/protocol.md L6
def judge_add(ledger: Ledger | None, *, key: bytes, recovery: bool, is_tombstoned: bool) -> WriteVerdict:
    """May this add be stored, as far as this bookie knows by itself? Recovery's own adds pass a fence."""
    if is_tombstoned:
        return WriteVerdict.FENCED
    known = judge_key(ledger, key)
    if known is not WriteVerdict.ADMIT or ledger is None or recovery:
        return known
    if ledger.is_fenced:
        return WriteVerdict.FENCED
    return WriteVerdict.ADMIT if ledger.is_admitted else WriteVerdict.ASK


def judge_key(ledger: Ledger | None, key: bytes) -> WriteVerdict:
    """Is this the ledger's key? One that is not written down here, or was lost, nobody may set by showing it first
    (docs/protocol.md, B13)."""
    if ledger is None or not ledger.key:
        return WriteVerdict.ASK
    return WriteVerdict.ADMIT if ledger.key == key else WriteVerdict.WRONG_KEY


def judge_by_metadata(metadata: LedgerMetadata | None, bookie: BookieId, key: bytes) -> WriteVerdict:
    """May the ledger's writer add to it here? `metadata` was read after a word of its writer had arrived; None: there
    is none."""
    if metadata is None:
        return WriteVerdict.FENCED
    if master_key(metadata.password) != key:
        return WriteVerdict.WRONG_KEY
    if metadata.state is not LedgerState.OPEN:
        return WriteVerdict.FENCED
    return WriteVerdict.ADMIT if names(metadata, bookie) else WriteVerdict.UNKNOWN


def judge_key_by_metadata(metadata: LedgerMetadata | None, key: bytes) -> WriteVerdict:
    """Is this the ledger's key? Of one that does not exist nobody knows the key, and nobody recovers it."""
    if metadata is None:
        return WriteVerdict.UNKNOWN
    return WriteVerdict.ADMIT if master_key(metadata.password) == key else WriteVerdict.WRONG_KEY


# docs/protocol.md B5
def may_deny(metadata: LedgerMetadata | None, bookie: BookieId) -> bool:
    """May this bookie say "no such entry" to somebody who did not name the bookie that it means?

    Of a ledger that is still written or recovered, only a bookie that it names may: one that came to the address later
    knows nothing of it, and its "no" would end a recovery too early.
    """
    return metadata is None or metadata.state is LedgerState.CLOSED or names(metadata, bookie)


def names(metadata: LedgerMetadata, bookie: BookieId) -> bool:
    """Whether any of the ledger's ensembles has this bookie."""
    return any(bookie in fragment.ensemble for fragment in metadata.fragments)
