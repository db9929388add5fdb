"""Administration of namespaces. Converts messages to changes of the table of namespaces, and the table and its usage
to messages."""

from __future__ import annotations

from kvstore.errors import InvalidRequest, NotYetRaised
from kvstore.meta.store import MetadataStore
from kvstore.meta.tables.namespaces import NamespaceStore
from kvstore.namespaces import Add, Change, Namespace, NamespaceTable, Remove, Set
from kvstore.proto import admin_pb2
from kvstore.server.namespaces.keeper import Keeper
from kvstore.server.namespaces.usage_messages import messages_of
from kvstore.versions import RELEASES, Versions

SINCE = 2
"""The first cluster version whose servers all enforce quotas."""


class NamespaceAdmin:
    """Reads and changes the table of namespaces. Methods raise StoreError."""

    def __init__(self, store: MetadataStore, keeper: Keeper, versions: Versions) -> None:
        self._store, self._keeper, self._versions = NamespaceStore(store), keeper, versions

    async def read(self) -> admin_pb2.NamespacesResponse:
        return self._response(await self._store.read())

    # docs/protocol.md V3
    async def change(self, request: admin_pb2.ChangeNamespacesRequest) -> admin_pb2.NamespacesResponse:
        change = change_of(request)
        if self._versions.cluster < SINCE and not isinstance(change, Remove):
            raise NotYetRaised(
                f"expected cluster version {SINCE} (kvstore {RELEASES[SINCE]}) or later for namespaces, got "
                f"{self._versions.cluster}: older servers would not enforce quotas; `kvstore cluster version` "
                "shows what the upgrade waits for"
            )
        table = await self._store.change(change)
        self._keeper.take_own(table)  # at this server at once; the other servers follow by their watch
        return self._response(table)

    def _response(self, table: NamespaceTable) -> admin_pb2.NamespacesResponse:
        return admin_pb2.NamespacesResponse(
            namespaces=messages_of(self._keeper, table),
            uncounted=self._keeper.uncounted() if table.namespaces else [],
        )


def change_of(request: admin_pb2.ChangeNamespacesRequest) -> Change:
    """Return the requested change. Raises InvalidRequest."""
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
                    f"namespace {request.set.name[:80]}: expected no prefix, got one; add another namespace for it"
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
            raise InvalidRequest("expected a change of namespaces, got one that this server does not know")
