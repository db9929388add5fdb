"""Reads the names of the cluster's nodes and bookies from the metadata store. No user may have one of these names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress

from kvstore.access import AccessTable, Change
from kvstore.access.principals import NAMING, ClusterNames, PrincipalKind
from kvstore.errors import NoSuchNode, UndecodableNode
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.registration import RegistrationClient
from kvstore.meta.store import MetadataStore
from kvstore.meta.tables.access import AccessStore
from kvstore.server.cluster.cluster_reader import ClusterReader

_WITH_INCARNATION = re.compile(r"(.+)-[0-9a-f]{12}")
"""A bookie id that a node derived from its own id (kvstore/bookie/identity.py)."""


class ClusterNamesReader:
    """Reads the names. Each method raises MetadataUnavailable, MetadataUnknown."""

    def __init__(self, store: MetadataStore) -> None:
        self._cluster = ClusterReader(store)
        self._cookies, self._registered = CookieStore(store), RegistrationClient(store)

    async def read(self) -> dict[str, PrincipalKind]:
        """Return the ids and hosts of all nodes and bookies: those that are registered, those that the ring names, and
        those that have a cookie."""
        addresses: list[str] = []
        nodes: set[str] = set()
        with suppress(NoSuchNode, UndecodableNode):
            ring = await self._cluster.ring()
            nodes.update(replica for member in ring.partitions.values() for replica in member.replicas)
        for id, member in (await self._cluster.servers(None)).items():
            nodes.add(id)
            addresses += [member.resp, member.grpc, member.http, member.bookie]
        bookies = set(await self._cookies.bookies())
        for bookie, address in (await self._registered.bookies()).all.items():
            bookies.add(bookie)
            addresses.append(address)
        nodes.update(made[1] for each in bookies if (made := _WITH_INCARNATION.fullmatch(each)))
        found = dict.fromkeys(_hosts((*addresses, *bookies)), PrincipalKind.NODE)
        return (
            found
            | dict.fromkeys(map(str, bookies), PrincipalKind.BOOKIE)
            | dict.fromkeys(map(str, nodes), PrincipalKind.NODE)
        )


async def change_access(store: MetadataStore, change: Change, known: ClusterNames | None = None) -> AccessTable:
    """Change the access table and return the new one. Every change of every process passes through this function.

    `known` are names that the caller learned in other ways. The names of nodes and bookies are read only if the change
    gives a user a name. So removing a right depends on nothing else in the metadata store. Raises InvalidRequest,
    NotThere, MetadataError.
    """
    if isinstance(change, NAMING):
        names = ClusterNames()
        names.take(await ClusterNamesReader(store).read())
        for each in (names, known):
            if each is not None:
                each.check(change)
    return await AccessStore(store).change(change)


def _hosts(addresses: Iterable[str]) -> set[str]:
    """Return the hosts of all addresses of the form `host:port`."""
    found = {host.strip("[]") for host, colon, _ in (each.rpartition(":") for each in addresses) if colon}
    return found - {""}
