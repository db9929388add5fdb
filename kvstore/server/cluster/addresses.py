"""Finds the addresses of running servers, for programs that know only the metadata store."""

from __future__ import annotations

from contextlib import suppress

from kvstore.errors import NoSuchNode
from kvstore.meta import paths
from kvstore.meta.store import MetadataStore
from kvstore.server.cluster.topology import Member


async def addresses(store: MetadataStore) -> tuple[str, ...]:
    """Return the gRPC addresses. Raises NoSuchNode if there is no cluster, MetadataError."""
    members = []
    for name in await store.children(paths.SERVERS):
        with suppress(NoSuchNode):  # it has just stopped
            members.append(Member.decode((await store.get(f"{paths.SERVERS}/{name}"))[0]))
    return tuple(member.grpc for member in members if member.grpc)
