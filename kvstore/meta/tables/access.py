"""The access table in the metadata store (docs/design/0014)."""

from __future__ import annotations

import msgspec

from kvstore.access import AccessTable, Change, applied
from kvstore.access.changes import RemoveRole, RemoveToken, RemoveUser, RevokeRight, RevokeRole
from kvstore.meta import paths
from kvstore.meta.store import MetadataStore
from kvstore.meta.tables.table import TableKind, TableStore


class AccessStore(TableStore[AccessTable, Change]):
    """Stores the access table. The table is empty if the cluster has none."""

    def __init__(self, store: MetadataStore) -> None:
        super().__init__(store, KIND)


class _AccessParts(msgspec.Struct):
    """The parts that an access table must have. A table without `is_on` must not be taken for a table that is off."""

    is_on: bool
    users: list[msgspec.Raw]
    roles: list[msgspec.Raw]


KIND: TableKind[AccessTable, Change] = TableKind(
    path=paths.ACCESS,
    what="the table of users and roles",
    empty=AccessTable(),
    whole=_AccessParts,
    applied=applied,
    removals=(RemoveUser, RemoveRole, RevokeRole, RevokeRight, RemoveToken),
)
