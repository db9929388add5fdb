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
        self._had_some = False

    def take(self, table: NamespaceTable) -> None:
        self._had_some = bool(table.namespaces)
        self._took(table)

    def is_lost(self) -> bool:
        """Nobody removes namespaces like that: `kvstore namespace remove` leaves a table without them."""
        return self._had_some

    def refuse(self, error: UndecodableNode) -> None:  # a quota that is not known refuses nobody: it protects no data
        log.error("the table of namespaces cannot be read; the last one holds: %s", error)
