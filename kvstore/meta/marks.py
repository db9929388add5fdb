"""The contents of auto-recovery's nodes and their bytes, as Apache BookKeeper writes them. Decides only.

LAYOUT                          protobuf text of LedgerRereplicationLayoutFormat
ledgers/…/urL<ledger>           protobuf text of UnderreplicatedLedgerFormat
locks/urL<ledger>               protobuf text of LockDataFormat
auditorelection, its children   protobuf text of AuditorVoteFormat
lostBookieRecoveryDelay         seconds in decimal
…ctime                          binary protobuf: one int64, field 1
disable                         empty
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message

from kvstore.errors import Corrupted
from kvstore.meta.store import Stat
from kvstore.proto.bookkeeper_metadata_pb2 import (
    AuditorVoteFormat,
    CheckTimeFormat,
    LedgerRereplicationLayoutFormat,
    LockDataFormat,
    UnderreplicatedLedgerFormat,
)
from kvstore.types import BookieId, LedgerId

M = TypeVar("M", bound=Message)

LAYOUT = ("BASIC", 1)
"""The only layout of marks that exists, by name and version."""
DELAY_S_MAX = 2**31 - 1
_DELAY = re.compile(rb"\s*(\d{1,10})\s*")


@dataclass(frozen=True, slots=True)
class LedgerMark:
    """The mark of a ledger that is, or may be, under-replicated."""

    ledger: LedgerId
    replicas: tuple[BookieId, ...]
    """Bookies whose copies are missing or damaged. If empty, the mark's bytes could not be read, and any bookie may
    be meant."""
    marked_ms: int
    """Time at which the mark last grew, in milliseconds since 1970; 0 if it is not known."""
    version: int
    """Version of the mark's node. `mark_replicated` compares it."""
    created: int
    """Transaction that created the mark's node. It distinguishes this mark from a later mark of the same ledger."""


def encode_layout() -> bytes:
    kind, version = LAYOUT
    return _text(LedgerRereplicationLayoutFormat(type=kind, version=version))


def decode_layout(data: bytes, *, what: str) -> tuple[str, int]:
    """Raises Corrupted."""
    message = _parsed(data, LedgerRereplicationLayoutFormat(), what)
    return message.type, message.version


def encode_mark(replicas: Iterable[BookieId], marked_ms: int) -> bytes:
    return _text(UnderreplicatedLedgerFormat(replica=list(replicas), ctime=marked_ms))


def decode_mark(ledger: LedgerId, data: bytes, stat: Stat) -> LedgerMark:
    """Decode the mark of a ledger. A mark that cannot be read still counts; the result then names only the ledger."""
    try:
        message = _parsed(data, UnderreplicatedLedgerFormat(), f"the mark of ledger {ledger}")
    except Corrupted:
        return LedgerMark(ledger, (), 0, stat.version, stat.created)
    replicas = tuple(BookieId(each) for each in message.replica)
    return LedgerMark(ledger, replicas, message.ctime, stat.version, stat.created)


def encode_lock(worker: str) -> bytes:
    return _text(LockDataFormat(bookieId=worker))


def decode_lock(data: bytes, *, what: str) -> str:
    """Return the name of the worker that holds the lock. Raises Corrupted."""
    return _parsed(data, LockDataFormat(), what).bookieId


def encode_vote(candidate: str) -> bytes:
    return _text(AuditorVoteFormat(bookieId=candidate))


def decode_vote(data: bytes, *, what: str) -> str:
    """Return the name of the candidate. Raises Corrupted."""
    return _parsed(data, AuditorVoteFormat(), what).bookieId


def encode_delay(seconds: int) -> bytes:
    if not 0 <= seconds <= DELAY_S_MAX:
        raise ValueError(f"expected a delay of 0 to {DELAY_S_MAX} whole seconds, got {seconds}")
    return b"%d" % seconds


def decode_delay(data: bytes, *, what: str) -> int:
    """Raises Corrupted."""
    match = _DELAY.fullmatch(data)
    if match is None or int(match.group(1)) > DELAY_S_MAX:
        raise Corrupted(f"{what}: expected 0 to {DELAY_S_MAX} in decimal, got {data[:40]!r}")
    return int(match.group(1))


def encode_checked(at_ms: int) -> bytes:
    return CheckTimeFormat(checkedMs=at_ms).SerializeToString(deterministic=True)


def decode_checked(data: bytes, *, what: str) -> int:
    """Raises Corrupted."""
    try:
        return CheckTimeFormat.FromString(data).checkedMs
    except DecodeError as error:
        raise Corrupted(f"{what} is malformed: {error}") from error


def _text(message: Message) -> bytes:
    return text_format.MessageToString(message).encode()


def _parsed(data: bytes, message: M, what: str) -> M:
    try:
        return text_format.Parse(data.decode(), message, allow_unknown_field=True)
    except (text_format.ParseError, ValueError, RecursionError) as error:
        raise Corrupted(f"{what} is malformed: {error}") from error
