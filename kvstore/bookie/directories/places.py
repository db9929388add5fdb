"""The file PLACE as bytes: which of a bookie's directories this one is, and which others exist. Pure. The grammar is in
docs/reference/formats.md.

A bookie with one directory has no such file. With several, each file names all directories, so that the loss of one is
noticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from crc32c import crc32c

PLACE = "PLACE"
FORMAT = 1
_MAGIC = "kvstore journal directories"


class MemberState(Enum):
    """The state of one directory, as the others know it."""

    JOINING = "joining"
    """The directory is being created. Nothing was ever stored in it."""
    PRESENT = "present"
    LOST = "lost"
    """The directory was declared lost. Its contents are not in limbo everywhere yet, so nothing was answered since."""
    GONE = "gone"
    """The directory was declared lost, and its contents are in limbo. It never comes back."""


@dataclass(frozen=True, slots=True)
class DirectoryMember:
    """One of a bookie's directories, present or not."""

    number: int
    """From 0; no number is used twice."""
    mark: str
    """16 hexadecimal digits, drawn when the directory joined."""
    state: MemberState
    path: str
    """The path when this was written."""


@dataclass(frozen=True, slots=True)
class PlaceFile:
    """The contents of one directory's file."""

    bookie: str
    version: int
    """Rises with every change; the highest version found counts."""
    here: int
    """The number of the directory that the file is in."""
    members: tuple[DirectoryMember, ...]
    """In the order of their numbers."""


def encode_place(place: PlaceFile) -> bytes:
    lines = [f"{_MAGIC} {FORMAT}", f"bookie {place.bookie}", f"version {place.version}", f"here {place.here}"]
    lines += [f"{each.number} {each.mark} {each.state.value} {each.path}" for each in place.members]
    text = "".join(f"{line}\n" for line in lines).encode()
    return text + b"crc %08x\n" % crc32c(text)


def decode_place(data: bytes) -> PlaceFile | None:
    """Return the decoded file, or None if it is damaged. Raises ValueError for a format that this version does not
    know."""
    text, _, last = data[:-1].rpartition(b"\n")
    text += b"\n"
    if not data.endswith(b"\n") or last != b"crc %08x" % crc32c(text):
        return None
    lines = text.decode().splitlines()
    if lines[0] != f"{_MAGIC} {FORMAT}":
        raise ValueError(f"expected format {_MAGIC} {FORMAT}, got {lines[0]!r}")
    bookie, version, here = (line.partition(" ")[2] for line in lines[1:4])
    members = tuple(_member(line) for line in lines[4:])
    return PlaceFile(bookie, int(version), int(here), members)


def _member(line: str) -> DirectoryMember:
    number, mark, state, path = line.split(" ", 3)
    return DirectoryMember(int(number), mark, MemberState(state), path)
