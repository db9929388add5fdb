"""Ledger metadata as the bytes that Apache BookKeeper keeps in a ledger's znode. Decides only.

    bytes := "BookieMetadataFormatVersion" TAB version LF body
    body  := varint(length) message          version 3, which we write
           | message as protobuf text        version 2
           | lines                           version 1

Version 1's lines: write quorum, ensemble size, length, then `first TAB bookie TAB bookie …` for each fragment, then, if
closed, `last TAB CLOSED` (-102 for last: in recovery).

The ledger's id is not in the bytes but in the path.
"""

from __future__ import annotations

from google.protobuf import text_format
from google.protobuf.message import DecodeError

from kvstore.errors import Corrupted
from kvstore.proto.bookkeeper_metadata_pb2 import LedgerMetadataFormat
from kvstore.proto.varint import varint
from kvstore.types import (
    NO_ENTRY,
    BookieId,
    DigestType,
    EntryId,
    Fragment,
    LedgerId,
    LedgerMetadata,
    LedgerState,
    Quorum,
)

VERSION = 3
_HEADER = b"BookieMetadataFormatVersion\t"
_DIGITS_MAX = 9
_IN_RECOVERY_V1 = -102


def encode(metadata: LedgerMetadata) -> bytes:
    """Encode ledger metadata in format version 3."""
    body = _to_message(metadata).SerializeToString(deterministic=True)
    return b"%s%d\n%s%s" % (_HEADER, VERSION, varint(len(body)), body)


def decode(ledger: LedgerId, data: bytes) -> LedgerMetadata:
    """Decode the metadata of `ledger`, written in any of the three versions. Raises Corrupted if the data are
    malformed or have an unknown version."""
    header, _, body = data.partition(b"\n")
    digits = header[len(_HEADER) :]
    if not header.startswith(_HEADER) or not digits.isdigit() or len(digits) > _DIGITS_MAX:
        raise Corrupted(f"ledger {ledger}: expected metadata with a format version, got {header[:40]!r}")
    version = int(digits)
    reader = {1: _read_lines, 2: _read_text, 3: _read_delimited}.get(version)
    if reader is None:
        raise Corrupted(f"ledger {ledger}: metadata has format version {version}; this build reads 1, 2 and 3")
    try:
        return _from_message(ledger, reader(body))
    except (ValueError, DecodeError, text_format.ParseError, RecursionError) as error:
        raise Corrupted(f"ledger {ledger}: metadata of version {version} is malformed: {error}") from error


def _read_delimited(body: bytes) -> LedgerMetadataFormat:
    size = shift = start = 0
    while True:
        if start >= min(len(body), 5):
            raise ValueError("no length before the message")
        byte = body[start]
        size |= (byte & 0x7F) << shift
        start, shift = start + 1, shift + 7
        if byte < 0x80:
            break
    if len(body) - start < size:
        raise ValueError(f"expected {size} bytes of message, got {len(body) - start}")
    return LedgerMetadataFormat.FromString(body[start : start + size])


def _read_text(body: bytes) -> LedgerMetadataFormat:
    return text_format.Parse(body.decode(), LedgerMetadataFormat(), allow_unknown_field=True)


def _read_lines(body: bytes) -> LedgerMetadataFormat:
    write, ensemble, length, *rest = body.decode().split("\n")
    message = LedgerMetadataFormat(
        quorumSize=int(write),
        ensembleSize=int(ensemble),
        length=int(length),
        state=LedgerMetadataFormat.OPEN,
        lastEntryId=NO_ENTRY,
    )
    for line in filter(None, rest):
        first, *members = line.split("\t")
        if members == ["CLOSED"]:
            recovering = int(first) == _IN_RECOVERY_V1
            message.state = LedgerMetadataFormat.IN_RECOVERY if recovering else LedgerMetadataFormat.CLOSED
            message.lastEntryId = NO_ENTRY if recovering else int(first)
        else:
            message.segment.add(firstEntryId=int(first), ensembleMember=members)
    return message


def _to_message(metadata: LedgerMetadata) -> LedgerMetadataFormat:
    is_closed = metadata.state is LedgerState.CLOSED
    message = LedgerMetadataFormat(
        quorumSize=metadata.quorum.write,
        ensembleSize=metadata.quorum.ensemble,
        length=metadata.length if is_closed else 0,
        lastEntryId=metadata.last_entry if is_closed else NO_ENTRY,
        state=LedgerMetadataFormat.State.ValueType(metadata.state),
        digestType=LedgerMetadataFormat.DigestType.ValueType(metadata.digest),
        password=metadata.password,
        ackQuorumSize=metadata.quorum.ack,
        cToken=metadata.token,
    )
    if metadata.ctime_ms:
        message.ctime = metadata.ctime_ms
    for fragment in metadata.fragments:
        message.segment.add(firstEntryId=fragment.first, ensembleMember=fragment.ensemble)
    for key, value in metadata.custom:
        message.customMetadata.add(key=key, value=value)
    return message


def _from_message(ledger: LedgerId, message: LedgerMetadataFormat) -> LedgerMetadata:
    if not message.IsInitialized():
        raise ValueError("a required field is missing")
    is_closed = message.state == LedgerMetadataFormat.CLOSED
    if is_closed and not message.HasField("lastEntryId"):
        raise ValueError("closed without a last entry")
    ack = message.ackQuorumSize if message.HasField("ackQuorumSize") else message.quorumSize
    return LedgerMetadata(
        ledger=ledger,
        quorum=Quorum(ensemble=message.ensembleSize, write=message.quorumSize, ack=ack),
        fragments=tuple(
            Fragment(EntryId(segment.firstEntryId), tuple(BookieId(member) for member in segment.ensembleMember))
            for segment in message.segment
        ),
        state=LedgerState(message.state),
        last_entry=EntryId(message.lastEntryId) if is_closed else NO_ENTRY,
        length=message.length if is_closed else 0,
        # Ledgers older than the digest field were read with the digest that the client was configured with, by default
        # CRC32.
        digest=DigestType(message.digestType) if message.HasField("digestType") else DigestType.CRC32,
        password=message.password,
        custom=tuple(sorted((pair.key, pair.value) for pair in message.customMetadata)),
        ctime_ms=message.ctime,
        token=message.cToken,
    )
