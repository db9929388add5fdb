"""Namespaces as administrators see and change them: messages ↔ the table, and what is used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvstore.errors import InvalidRequest, NotYetRaised
from kvstore.meta.store import MetadataStore
from kvstore.meta.tables.namespaces import NamespaceStore
from kvstore.namespaces import Add, Change, Namespace, NamespaceTable, Remove, Set
from kvstore.proto import admin_pb2
from kvstore.server.namespaces import usage_messages
from kvstore.server.namespaces.usage_messages import messages_of
from kvstore.types import PartitionId
from kvstore.versions import RELEASES, Versions

SINCE = 2
"""The first cluster version whose servers all ask for quotas."""


class NamespaceChanges(usage_messages.NamespaceUsage, Protocol):
    """The knowledge of this server: kvstore.server.namespaces.keeper.Keeper."""

    def take_own(self, table: NamespaceTable) -> None: ...
    def uncounted(self) -> Iterable[PartitionId]: ...


class NamespaceAdmin:
    """Raises StoreError."""

    def __init__(self, store: MetadataStore, known: NamespaceChanges, known_versions: Versions) -> None:
        self._store, self._known, self._versions = NamespaceStore(store), known, known_versions

    async def read(self) -> admin_pb2.NamespacesResponse:
        return self._response(await self._store.read())

    # docs/protocol.md V3
    async def change(self, request: admin_pb2.ChangeNamespacesRequest) -> admin_pb2.NamespacesResponse:
        change = change_of(request)
        if self._versions.cluster < SINCE and not isinstance(change, Remove):
            raise NotYetRaised(
                f"namespaces want cluster version {SINCE} (kvstore {RELEASES[SINCE]}), the cluster is at "
                f"{self._versions.cluster}: servers that are older would refuse nothing; `kvstore cluster version` "
                "says what it waits for"
            )
        table = await self._store.change(change)
        self._known.take_own(table)  # here at once; the others hear of it by their watch
        return self._response(table)

    def _response(self, table: NamespaceTable) -> admin_pb2.NamespacesResponse:
        return admin_pb2.NamespacesResponse(
            namespaces=messages_of(self._known, table),
            uncounted=self._known.uncounted() if table.namespaces else [],
        )


def change_of(request: admin_pb2.ChangeNamespacesRequest) -> Change:
    """The change that is asked for. Raises InvalidRequest."""
    match request.WhichOneof("change"):
        case "add":
            limits = request.add.limits
            try:
                return Add(
                    Namespace(
                        name=request.add.name,
                        prefix=request.add.prefix,
                        keys_max=limits.keys_max,
                        bytes_max=limits.bytes_max,
                        ops_per_s=limits.ops_per_s,
                        burst=limits.burst,
                        ttl_ms=limits.ttl_ms,
                    )
                )
            except ValueError as error:
                raise InvalidRequest(str(error)) from None
        case "set":
            if request.set.prefix:
                raise InvalidRequest(
                    f"namespace {request.set.name[:80]}: want no prefix to set: another one is another namespace"
                )
            limits = request.set.limits
            return Set(
                name=request.set.name,
                keys_max=limits.keys_max if limits.HasField("keys_max") else None,
                bytes_max=limits.bytes_max if limits.HasField("bytes_max") else None,
                ops_per_s=limits.ops_per_s if limits.HasField("ops_per_s") else None,
                burst=limits.burst if limits.HasField("burst") else None,
                ttl_ms=limits.ttl_ms if limits.HasField("ttl_ms") else None,
            )
        case "remove":
            return Remove(request.remove)
        case _:
            raise InvalidRequest("want a change of namespaces, got one that this server does not know")
