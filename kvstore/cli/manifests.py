"""The representation of a file in the store. Decides only: values in, values out.

    small file   := its bytes, under its path
    other        := MAGIC | JSON, under its path: a file in chunks, or a symbolic link
    chunk number := bytes, under path | NUL | first 16 digits of the file's SHA-256 | NUL | number (8 digits)

No path contains a NUL, so no file's key is the key of another file's chunk. A file whose content begins with MAGIC is
stored in chunks, so that a value that begins with MAGIC is always a manifest. Chunks are named by content: while a file
is replaced, its old chunks stay until the new manifest is written. A file with unchanged content keeps its chunk size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import orjson

from kvstore.errors import Corrupted

MAGIC = b"\x00kvstore-file\n"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Chunked:
    """The manifest of a large file that is stored in chunks, one key for each chunk."""

    size: int
    sha256: str
    chunk_bytes: int

    @property
    def chunks(self) -> int:
        return -(-self.size // self.chunk_bytes)

    def key(self, path: bytes, number: int) -> bytes:
        """Return the key of a chunk."""
        return b"%b\x00%b\x00%08d" % (path, self.sha256[:16].encode(), number)

    def keys(self, path: bytes) -> Iterator[bytes]:
        """Yield the keys of all chunks."""
        return (self.key(path, number) for number in range(self.chunks))


@dataclass(frozen=True, slots=True)
class Symlink:
    """The manifest of a symbolic link."""

    target: bytes


Entry = bytes | Chunked | Symlink
"""A stored file; bytes for a small file, which is stored as it is."""


def is_plain(content: bytes, chunk_bytes: int) -> bool:
    """Return True if a file is stored as it is."""
    return len(content) <= chunk_bytes and not content.startswith(MAGIC)


def encode(entry: Entry) -> bytes:
    """Return the value that is stored under a path."""
    if isinstance(entry, bytes):
        return entry
    if isinstance(entry, Symlink):
        document: dict[str, object] = {"format": FORMAT, "type": "symlink", "target": entry.target.hex()}
    else:
        document = {
            "format": FORMAT,
            "type": "file",
            "size": entry.size,
            "sha256": entry.sha256,
            "chunk_bytes": entry.chunk_bytes,
        }
    return MAGIC + orjson.dumps(document)


def decode(value: bytes) -> Entry:
    """Decode a stored value. Raises Corrupted for an invalid manifest, or one of an unknown format."""
    if not value.startswith(MAGIC):
        return value
    try:
        document = orjson.loads(value[len(MAGIC) :])
        if document["format"] != FORMAT:
            raise Corrupted(f"file manifest: expected format {FORMAT}, got {document['format']}")
        if document["type"] == "symlink":
            return Symlink(bytes.fromhex(document["target"]))
        found = Chunked(int(document["size"]), str(document["sha256"]), int(document["chunk_bytes"]))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise Corrupted(f"not a file manifest: {error!r}") from error
    if found.chunk_bytes <= 0 or found.size < 0:
        raise Corrupted(f"not a file manifest: {found}")
    return found


def first_difference(one: bytes, other: bytes) -> int:
    """Return the first offset at which the two differ, or the shorter length if one is a prefix of the other."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
