"""Principals: the parties that a certificate can identify. Users, nodes and bookies are separate kinds of principals.
Decides only.

A certificate identifies a principal by its common name. The name of a node or a bookie never identifies a user, and no
user can be created under such a name. A user therefore cannot gain a node's permissions, or change them, through the
choice of a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvstore.access.changes import AddUser, Change, FoundAdmin
from kvstore.errors import InvalidRequest

NAMING = AddUser | FoundAdmin
"""The changes that create a user's name."""


class PrincipalKind(StrEnum):
    """The kinds of principals. Names of different kinds are independent."""

    USER = "user"
    NODE = "node"
    BOOKIE = "bookie"


@dataclass(frozen=True, slots=True)
class Principal:
    """A party that a certificate identifies."""

    kind: PrincipalKind
    name: str


class ClusterNames:
    """The names of a cluster's nodes and bookies. Lookups ignore case."""

    def __init__(self) -> None:
        self._registered: dict[str, Principal] = {}
        self._shown: dict[str, tuple[Principal, ...]] = {}
        """Common names in the certificates of nodes with proven identity, by node."""
        self._shown_by_name: dict[str, Principal] = {}
        """The same principals by name, because every call with a certificate looks one up."""

    def take(self, registered: Mapping[str, PrincipalKind]) -> None:
        """Replace the registered names, which are the ids and hosts of nodes and bookies."""
        self._registered = {name.lower(): Principal(kind, name) for name, kind in registered.items()}

    def note_shown(self, node: str, names: Iterable[str]) -> None:
        """Record the common names in the certificate of a node that has proven its identity."""
        self._shown[node] = tuple(Principal(PrincipalKind.NODE, name) for name in names)
        self._shown_by_name = {each.name.lower(): each for shown in self._shown.values() for each in shown}

    def principal_or_none(self, name: str) -> Principal | None:
        """Return the node or bookie with this name, or None."""
        name = name.lower()
        return self._registered.get(name) or self._shown_by_name.get(name)

    def check(self, change: Change) -> None:
        """Raise InvalidRequest if the change would give a user the name of a node or a bookie."""
        if not isinstance(change, NAMING):
            return
        found = self.principal_or_none(change.name)
        if found is not None:
            raise InvalidRequest(
                f"expected a user name that no node or bookie has, got {change.name!r}, the name of a {found.kind}; "
                "choose another name"
            )
