"""Judges writes to a ledger on this bookie, and denials of entries. Decides only; facts.py makes it durable.

A fence is never lifted, outlives its ledger as a tombstone, and is on disk before the request that set it gets any
answer (docs/protocol.md, bookies). A bookie that has lost its disk has lost its fences too. So the ledger's metadata
judges an ordinary add that the bookie cannot judge by itself: a recovery marks the metadata before it fences any
bookie.
"""

from __future__ import annotations

from enum import Enum, auto

from kvstore.bookie.ledger import Ledger
from kvstore.proto.digest import master_key
from kvstore.types import BookieId, LedgerMetadata, LedgerState


class WriteVerdict(Enum):
    ADMIT = auto()
    ASK = auto()
    """Only the ledger's metadata can decide."""
    FENCED = auto()
    """The sender is no longer the ledger's writer."""
    WRONG_KEY = auto()
    UNKNOWN = auto()
    """Neither yes nor no: the sender must ask another bookie."""


# docs/protocol.md L6
def judge_add(ledger: Ledger | None, *, key: bytes, recovery: bool, is_tombstoned: bool) -> WriteVerdict:
    """Judge an add by what this bookie knows itself. Recovery adds pass a fence."""
    if is_tombstoned:
        return WriteVerdict.FENCED
    known = judge_key(ledger, key)
    if known is not WriteVerdict.ADMIT or ledger is None or recovery:
        return known
    if ledger.is_fenced:
        return WriteVerdict.FENCED
    return WriteVerdict.ADMIT if ledger.is_admitted else WriteVerdict.ASK


def judge_key(ledger: Ledger | None, key: bytes) -> WriteVerdict:
    """Judge whether this is the ledger's key. A key that is not recorded here, or was lost, cannot be set by presenting
    it first (docs/protocol.md, B13)."""
    if ledger is None or not ledger.key:
        return WriteVerdict.ASK
    return WriteVerdict.ADMIT if ledger.key == key else WriteVerdict.WRONG_KEY


def judge_by_metadata(metadata: LedgerMetadata | None, bookie: BookieId, key: bytes) -> WriteVerdict:
    """Judge an ordinary add by the ledger's metadata, read after the writer's request arrived; None: the ledger does
    not exist."""
    if metadata is None:
        return WriteVerdict.FENCED
    if master_key(metadata.password) != key:
        return WriteVerdict.WRONG_KEY
    if metadata.state is not LedgerState.OPEN:
        return WriteVerdict.FENCED
    return WriteVerdict.ADMIT if names(metadata, bookie) else WriteVerdict.UNKNOWN


def judge_key_by_metadata(metadata: LedgerMetadata | None, key: bytes) -> WriteVerdict:
    """Judge a key by the ledger's metadata. Nobody knows the key of a ledger that does not exist, and nobody recovers
    it."""
    if metadata is None:
        return WriteVerdict.UNKNOWN
    return WriteVerdict.ADMIT if master_key(metadata.password) == key else WriteVerdict.WRONG_KEY


# docs/protocol.md B5
def may_deny(metadata: LedgerMetadata | None, bookie: BookieId) -> bool:
    """Return True if this bookie may say "no such entry" to a client that did not name the bookie it means.

    For a ledger that is still being written or recovered, only a bookie that the ledger names may deny. A bookie that
    came to the address later knows nothing of the ledger, and its denial would end a recovery too early.
    """
    return metadata is None or metadata.state is LedgerState.CLOSED or names(metadata, bookie)


def names(metadata: LedgerMetadata, bookie: BookieId) -> bool:
    """Return True if any of the ledger's ensembles has this bookie."""
    return any(bookie in fragment.ensemble for fragment in metadata.fragments)
