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
    """A decision about a write, or about the key that the write presents."""

    ADMIT = auto()
    ASK = auto()
    """The bookie cannot decide alone; the ledger's metadata must be read."""
    FENCED = auto()
    """The sender is no longer the ledger's writer."""
    WRONG_KEY = auto()
    UNKNOWN = auto()
    """The bookie can neither accept nor deny the write; the sender must use another bookie."""


# docs/protocol.md L6
def judge_add(ledger: Ledger | None, *, key: bytes, recovery: bool, is_tombstoned: bool) -> WriteVerdict:
    """Judge an add from this bookie's own records. `ledger` is None if the ledger is unknown here. A fence does not
    stop recovery adds. Returns ASK if only the ledger's metadata can decide."""
    if is_tombstoned:
        return WriteVerdict.FENCED
    known = judge_key(ledger, key)
    if known is not WriteVerdict.ADMIT or ledger is None or recovery:
        return known
    if ledger.is_fenced:
        return WriteVerdict.FENCED
    return WriteVerdict.ADMIT if ledger.is_admitted else WriteVerdict.ASK


def judge_key(ledger: Ledger | None, key: bytes) -> WriteVerdict:
    """Return ADMIT if `key` is the ledger's key, WRONG_KEY if it is not, and ASK if no key is recorded here. A client
    cannot set a missing or lost key by being the first to present one (docs/protocol.md, B13)."""
    if ledger is None or not ledger.key:
        return WriteVerdict.ASK
    return WriteVerdict.ADMIT if ledger.key == key else WriteVerdict.WRONG_KEY


def judge_by_metadata(metadata: LedgerMetadata | None, bookie: BookieId, key: bytes) -> WriteVerdict:
    """Judge an ordinary add from the ledger's metadata, which must be read after the writer's request arrived.
    `metadata` is None if the ledger does not exist."""
    if metadata is None:
        return WriteVerdict.FENCED
    if master_key(metadata.password) != key:
        return WriteVerdict.WRONG_KEY
    if metadata.state is not LedgerState.OPEN:
        return WriteVerdict.FENCED
    return WriteVerdict.ADMIT if names(metadata, bookie) else WriteVerdict.UNKNOWN


def judge_key_by_metadata(metadata: LedgerMetadata | None, key: bytes) -> WriteVerdict:
    """Judge a key from the ledger's metadata. If the ledger does not exist (`metadata` is None), the verdict is
    UNKNOWN: no key is known for such a ledger, and no node recovers it."""
    if metadata is None:
        return WriteVerdict.UNKNOWN
    return WriteVerdict.ADMIT if master_key(metadata.password) == key else WriteVerdict.WRONG_KEY


# docs/protocol.md B5
def may_deny(metadata: LedgerMetadata | None, bookie: BookieId) -> bool:
    """Return True if this bookie may answer "no such entry" to a client that did not say which bookie it means.

    While a ledger is being written or recovered, only a bookie that the ledger names may deny. A bookie that took over
    the address of another one knows nothing of the ledger, and its denial would end a recovery too early.
    """
    return metadata is None or metadata.state is LedgerState.CLOSED or names(metadata, bookie)


def names(metadata: LedgerMetadata, bookie: BookieId) -> bool:
    """Return True if at least one of the ledger's ensembles includes this bookie."""
    return any(bookie in fragment.ensemble for fragment in metadata.fragments)
