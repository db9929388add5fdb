"""The metadata of a cluster as a file. Decides only.

    file := header LF (node LF)* end LF              every line is JSON, in UTF-8
    header := {"kvstore_metadata": 1, "instance": text}
    node := {"path": text, "data": base64}           persistent nodes but the root, in the order of their paths
    end := {"nodes": count, "sha256": hex}           of all bytes before this line

A file without its end, or with a wrong one, is refused: it may lack a ledger.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec

from kvstore.errors import ConfigError
from kvstore.meta import paths

T = TypeVar("T")

FORMAT = 1


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    kvstore_metadata: int
    instance: str


class _Node(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    data: bytes


class _End(msgspec.Struct, forbid_unknown_fields=True):
    nodes: int
    sha256: str


def encode(nodes: Mapping[str, bytes], instance: str) -> bytes:
    lines = [_line(_Header(FORMAT, instance)), *(_line(_Node(path, nodes[path])) for path in sorted(nodes))]
    body = b"".join(lines)
    return body + _line(_End(len(nodes), hashlib.sha256(body).hexdigest()))


def decode(data: bytes) -> tuple[dict[str, bytes], str]:
    """Decode a file of metadata. Returns the nodes by path, and the cluster's instance id. Raises ConfigError."""
    *lines, last = data.splitlines(keepends=True) or [b""]
    end = _parsed(last, _End, "its last line")
    found = hashlib.sha256(b"".join(lines)).hexdigest()
    if found != end.sha256:
        raise ConfigError(f"expected lines with the digest {end.sha256}, got {found}: the file is damaged")
    if not lines:
        raise ConfigError("expected a header, got none")
    header = _parsed(lines[0], _Header, "its first line")
    if header.kvstore_metadata != FORMAT:
        raise ConfigError(f"the file has format {header.kvstore_metadata}; this build reads {FORMAT}")
    nodes = dict(_nodes(lines[1:]))
    if len(nodes) != end.nodes:
        raise ConfigError(f"expected {end.nodes} nodes, got {len(nodes)}")
    for path in nodes:
        if paths.parent(path) not in nodes and paths.parent(path) != "/":
            raise ConfigError(f"{path} has no parent in the file")
    return nodes, header.instance


def digest(nodes: Mapping[str, bytes]) -> str:
    """Return a digest of the nodes. Equal nodes have equal digests in every store."""
    return hashlib.sha256(b"".join(_line(_Node(path, nodes[path])) for path in sorted(nodes))).hexdigest()


def _nodes(lines: list[bytes]) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(lines, start=2):
        node = _parsed(line, _Node, f"line {number}")
        try:
            paths.check(node.path)
        except ValueError as error:
            raise ConfigError(f"line {number}: {error}") from None
        yield node.path, node.data


def _line(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _parsed(line: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{what} is malformed: {error}") from None
