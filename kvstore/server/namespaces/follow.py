"""Follows the namespace table."""

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
    """Passes each table to `took`. Open it before this server leads anything."""

    def __init__(self, env: Env, store: MetadataStore, took: Callable[[NamespaceTable], None]) -> None:
        super().__init__(env, NamespaceStore(store), what="namespaces")
        self._took = took
        self._had_some = False

    def take(self, table: NamespaceTable) -> None:
        self._had_some = bool(table.namespaces)
        self._took(table)

    def is_lost(self) -> bool:
        """Return True if there were namespaces before: `kvstore namespace remove` leaves an empty table instead of
        none."""
        return self._had_some

    def refuse(
        self, error: UndecodableNode
    ) -> None:  # an unknown quota must not cause refusals, because it protects no data
        log.error("cannot decode the namespace table, the last one stays in force: %s", error)
