"""Follows the table of namespaces."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstore.env import Env
from kvstore.errors import UndecodableNode
from kvstore.meta.store import MetadataStore
from kvstore.meta.tables.namespaces import NamespaceStore
from kvstore.namespaces import NamespaceTable
from kvstore.server.table_follower import TableFollower

log = logging.getLogger(__name__)


class NamespaceFollower(TableFollower[NamespaceTable]):
    """Gives each table to `took`. Open it before anything is led here."""

    def __init__(self, env: Env, store: MetadataStore, took: Callable[[NamespaceTable], None]) -> None:
        super().__init__(env, NamespaceStore(store), what="namespaces")
        self._took = took

    def take(self, table: NamespaceTable) -> None:
        self._took(table)

    def refuse(self, error: UndecodableNode) -> None:  # a quota that is not known refuses nobody: it protects no data
        log.error("the table of namespaces cannot be read; the last one holds: %s", error)
