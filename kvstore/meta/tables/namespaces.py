"""The table of namespaces in the metadata store (docs/design/0019)."""

from __future__ import annotations

import msgspec

from kvstore.meta import paths
from kvstore.meta.store import MetadataStore
from kvstore.meta.tables.table import TableKind, TableStore
from kvstore.namespaces import Change, NamespaceTable, Remove, applied


class NamespaceStore(TableStore[NamespaceTable, Change]):
    """Stores the table of namespaces. The table is empty if the cluster has none."""

    def __init__(self, store: MetadataStore) -> None:
        super().__init__(store, KIND)


class _NamespaceParts(msgspec.Struct):
    """The part that a table of namespaces must have. A table without it must not be taken for an empty table."""

    namespaces: list[msgspec.Raw]


KIND: TableKind[NamespaceTable, Change] = TableKind(
    path=paths.NAMESPACES,
    what="the table of namespaces",
    empty=NamespaceTable(),
    whole=_NamespaceParts,
    applied=applied,
    removals=(Remove,),
)
