"""The file PLACE as bytes: which of a bookie's directories this one is, and which others there are. Pure. The grammar
is in docs/reference/formats.md.

A bookie with one directory has no such file. With several, each of them names them all, so that the loss of one is seen
from any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from crc32c import crc32c

PLACE = "PLACE"
FORMAT = 1
_MAGIC = "kvstore journal directories"


class State(Enum):
    """The state of one directory, as the others know it."""

    JOINING = "joining"
    """It is being made. Nothing was ever stored in it."""
    PRESENT = "present"
    LOST = "lost"
    """It was declared lost. What it may have held is not in limbo everywhere yet, so nothing was answered since."""
    GONE = "gone"
    """It was declared lost, and what it may have held is in limbo. It never comes back."""


@dataclass(frozen=True, slots=True)
class Member:
    """One of a bookie's directories, present or not."""

    number: int
    """From 0; no number is given twice."""
    mark: str
    """16 hexadecimal digits, drawn when the directory joined."""
    state: State
    path: str
    """Where it was when this was written."""


@dataclass(frozen=True, slots=True)
class Place:
    """The contents of one directory's file."""

    bookie: str
    version: int
    """Rises with every change; the highest one that is found counts."""
    here: int
    """The number of the directory that the file is in."""
    members: tuple[Member, ...]
    """By number."""


def encode_place(place: Place) -> bytes:
    lines = [f"{_MAGIC} {FORMAT}", f"bookie {place.bookie}", f"version {place.version}", f"here {place.here}"]
    lines += [f"{each.number} {each.mark} {each.state.value} {each.path}" for each in place.members]
    text = "".join(f"{line}\n" for line in lines).encode()
    return text + b"crc %08x\n" % crc32c(text)


def decode_place(data: bytes) -> Place | None:
    """None if it is not whole. Raises ValueError for a format that this build does not know."""
    text, _, last = data[:-1].rpartition(b"\n")
    text += b"\n"
    if not data.endswith(b"\n") or last != b"crc %08x" % crc32c(text):
        return None
    lines = text.decode().splitlines()
    if lines[0] != f"{_MAGIC} {FORMAT}":
        raise ValueError(f"want the format {_MAGIC} {FORMAT}, got {lines[0]!r}")
    bookie, version, here = (line.partition(" ")[2] for line in lines[1:4])
    members = tuple(_member(line) for line in lines[4:])
    return Place(bookie, int(version), int(here), members)


def _member(line: str) -> Member:
    number, mark, state, path = line.split(" ", 3)
    return Member(int(number), mark, State(state), path)
