"""Paths of the tree as etcd's keys. Decides only. docs/reference/formats.md (Metadata in etcd) has the table.

Every node has one key, `<prefix><path>`; the root's is `<prefix>/`. Two kinds of nodes are where BookKeeper's proposal
for etcd puts them: writable bookies, and ledgers, in one list ordered by id. No path has an empty part, so a key that
begins with `<prefix>//` is not a node: it is a session or a counter of births.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kvstore.meta import paths
from kvstore.types import LedgerId

_LEDGER_DIGITS = 19
_LEDGERS = f"{paths.LEDGERS}/ledgers/"
_READWRITE = f"{paths.AVAILABLE}/readwrite/"
_PARENT_OF_LEDGERS = re.compile(rf"{paths.LEDGERS}/([0-9]{{2}}/[0-9]{{4}}|[0-9]{{3}}(/[0-9]{{4}}){{3}})")
_LEDGERS_PER_PARENT = 10_000
_BEHIND_SLASH = "0"
"""The character after the slash: all keys that begin with `a/` are from `a/` to `a0`."""


class KeySpan(NamedTuple):
    """All keys from `start` up to, but not including, `end`."""

    start: bytes
    end: bytes


class EtcdKeys:
    """The keys of one cluster, all of which begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self.prefix = f"/{prefix.strip('/')}" if prefix.strip("/") else ""

    def key(self, path: str) -> bytes:
        """Return the key of a node. Raises ValueError for a malformed path."""
        paths.check(path)
        return (self.prefix + _place(path)).encode()

    def path_or_none(self, key: bytes) -> str | None:
        """Return the node that has this key; None if the key is not a node's."""
        path = _path(key.decode(errors="replace").removeprefix(self.prefix))
        try:
            return path if self.key(path) == key else None
        except ValueError:
            return None

    def births(self, path: str) -> bytes:
        """Return the key of the counter that rises with each transaction that gives the node a child."""
        return f"{self.prefix}//births{path}".encode()

    def session(self, session: int) -> bytes:
        return f"{self.prefix}//sessions/{session:016x}".encode()

    def everything(self) -> KeySpan:
        return KeySpan(f"{self.prefix}/".encode(), f"{self.prefix}{_BEHIND_SLASH}".encode())

    def spans(self, path: str) -> list[KeySpan]:
        """Return the spans with the keys of the node's children, and of many nodes below them."""
        base = self._base(path)
        spans = [KeySpan(base, base[:-1] + _BEHIND_SLASH.encode())]
        if match := _PARENT_OF_LEDGERS.fullmatch(path):
            first = int(match[1].replace("/", "")) * _LEDGERS_PER_PARENT
            ends = (f"{self.prefix}{_LEDGERS}{number:0{_LEDGER_DIGITS}d}" for number in (first, first + 10_000))
            spans.append(KeySpan(*(end.encode() for end in ends)))
        return spans

    def child_or_none(self, path: str, key: bytes) -> str | None:
        """Return the name of the child of `path` that has this key, or None."""
        found = self.path_or_none(key)
        is_child = found is not None and found != "/" and paths.parent(found) == path
        return found.rpartition("/")[2] if found is not None and is_child else None

    def next_key(self, path: str, key: bytes) -> bytes:
        """Return the first key behind `key` that may be a child of `path`, skipping nodes below a child."""
        base = self._base(path)
        name, slash, _ = key.removeprefix(base).partition(b"/")
        if not slash or not key.startswith(base) or self.child_or_none(path, key) is not None:
            return key + b"\0"
        return base + name + _BEHIND_SLASH.encode()

    def _base(self, path: str) -> bytes:
        return f"{self.prefix}{path.rstrip('/')}/".encode()


def _place(path: str) -> str:
    ledger = paths.ledger_of(path)
    if ledger is not None:
        return f"{_LEDGERS}{ledger:0{_LEDGER_DIGITS}d}"
    if paths.parent(path) == paths.AVAILABLE and path != paths.READONLY:
        return f"{_READWRITE}{path.rpartition('/')[2]}"
    return path


def _path(place: str) -> str:
    """Return the node that is stored there, or the place itself."""
    number = place.removeprefix(_LEDGERS)
    if number != place and re.fullmatch(r"[0-9]{19}", number) and int(number) <= paths.LEDGER_MAX:
        return paths.ledger(LedgerId(int(number)))
    bookie = place.removeprefix(_READWRITE)
    return place if bookie == place else f"{paths.AVAILABLE}/{bookie}"
