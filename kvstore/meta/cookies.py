"""Bookies' cookies and their bytes. A cookie ties directories to a bookie's id; a copy is in each directory and in the
metadata store. Decides only.

    cookie := "5" LF protobuf text of CookieFormat

A list of directories is comma-separated. Ledger directories have their count in front: count TAB directory TAB …
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf import text_format

from kvstore.errors import Corrupted
from kvstore.proto.bookkeeper_metadata_pb2 import CookieFormat
from kvstore.types import BookieId

LAYOUT_VERSION = 5
_READABLE = (4, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cookie:
    """The identity of a bookie's directories. Two cookies that differ in any field do not belong together."""

    bookie: BookieId
    journal_dirs: tuple[str, ...]
    ledger_dirs: tuple[str, ...]
    instance_id: str
    index_dirs: tuple[str, ...] = ()


def encode_cookie(cookie: Cookie) -> bytes:
    message = CookieFormat(
        bookieHost=cookie.bookie,
        journalDir=",".join(cookie.journal_dirs),
        ledgerDirs=_counted(cookie.ledger_dirs),
        instanceId=cookie.instance_id,
    )
    if cookie.index_dirs:
        message.indexDirs = _counted(cookie.index_dirs)
    return f"{LAYOUT_VERSION}\n{text_format.MessageToString(message)}".encode()


def decode_cookie(data: bytes, *, what: str) -> Cookie:
    """Return the cookie in `data`; `what` names its place in errors. Raises Corrupted if the cookie is malformed or has
    an unknown layout version."""
    version, _, text = data.decode(errors="replace").partition("\n")
    if version not in map(str, _READABLE):
        raise Corrupted(f"{what} has cookie layout version {version[:20]!r}; this build reads {_READABLE}")
    try:
        message = text_format.Parse(text, CookieFormat(), allow_unknown_field=True)
        if not message.bookieHost:
            raise ValueError("it names no bookie")
        return Cookie(
            bookie=BookieId(message.bookieHost),
            journal_dirs=tuple(message.journalDir.split(",")),
            ledger_dirs=_uncounted(message.ledgerDirs),
            instance_id=message.instanceId,
            index_dirs=_uncounted(message.indexDirs) if message.indexDirs else (),
        )
    except (text_format.ParseError, ValueError, RecursionError) as error:
        raise Corrupted(f"{what} is not a cookie: {error}") from error


def _counted(directories: tuple[str, ...]) -> str:
    return "\t".join((str(len(directories)), *directories))


def _uncounted(text: str) -> tuple[str, ...]:
    count, *directories = text.split("\t")
    if int(count) != len(directories):
        raise ValueError(f"expected {count} directories, got {directories}")
    return tuple(directories)
