"""Converts namespaces to messages: limits, usage and refusals known to a server. Decides only."""

from __future__ import annotations

from kvstore.namespaces import NamespaceTable
from kvstore.proto import admin_pb2
from kvstore.server.namespaces.keeper import Keeper


def messages_of(known: Keeper, table: NamespaceTable) -> list[admin_pb2.Namespace]:
    """Return the messages of all namespaces in a table."""
    refusals, ago_s = known.refusals(), known.refused_ago_s()
    found = []
    for each in table.namespaces:
        used = known.book.used(each.name)
        limits = admin_pb2.NamespaceLimits(
            keys_max=each.keys_max,
            bytes_max=each.bytes_max,
            ops_per_s=each.ops_per_s,
            burst=each.burst,
            ttl_ms=each.ttl_ms,
        )
        found.append(
            admin_pb2.Namespace(
                name=each.name,
                prefix=each.prefix,
                limits=limits,
                keys=used.keys,
                bytes=used.bytes,
                refused=dict(refusals.get(each.name, {})),
                refused_ago_s=dict(ago_s.get(each.name, {})),
            )
        )
    return found
