"""Changes of the namespace table: each change holds its arguments and produces a new table. Decides only.

A change that is already in effect returns the table unchanged, so a change whose outcome is unknown can be retried. A
change of a namespace that does not exist raises NotThere. A caller that retries a removal treats NotThere as success.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from kvstore.errors import InvalidRequest, NotThere
from kvstore.namespaces.table import Namespace, NamespaceTable


@dataclass(frozen=True, slots=True)
class Add:
    """A change that creates a namespace."""

    namespace: Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Set:
    """A change of a namespace's limits. A field that is None keeps its limit. The prefix cannot change, because a
    namespace with another prefix would be another namespace."""

    name: str
    keys_max: int | None = None
    bytes_max: int | None = None
    ops_per_s: int | None = None
    burst: int | None = None
    ttl_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Remove:
    """A change that removes a namespace. The keys in it are kept."""

    name: str


Change = Add | Set | Remove


def applied(table: NamespaceTable, change: Change) -> NamespaceTable:
    """Return the table with the change applied. Raises InvalidRequest if the change is invalid, and NotThere if the
    namespace does not exist."""
    try:
        return _applied(table, change)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _applied(table: NamespaceTable, change: Change) -> NamespaceTable:
    match change:
        case Add(namespace):
            known = table.find_or_none(namespace.name)
            if known == namespace:
                return table
            if known is not None:
                raise InvalidRequest(
                    f"namespace {namespace.name} already exists; change its limits with `kvstore namespace set`"
                )
            return _with(table, namespace)
        case Set():
            return _with(table, _set(_find(table, change.name), change))
        case Remove(name):
            _find(table, name)
            return NamespaceTable(namespaces=tuple(each for each in table.namespaces if each.name != name))
        case _:
            assert_never(change)


def _set(namespace: Namespace, change: Set) -> Namespace:
    keys, size, ops, burst, ttl = change.keys_max, change.bytes_max, change.ops_per_s, change.burst, change.ttl_ms
    if keys is size is ops is burst is ttl is None:
        raise InvalidRequest(f"namespace {change.name}: expected at least one limit to set, got none")
    if ops == 0 and burst is None:
        burst = 0  # a burst without a rate has no meaning
    return replace(
        namespace,
        keys_max=namespace.keys_max if keys is None else keys,
        bytes_max=namespace.bytes_max if size is None else size,
        ops_per_s=namespace.ops_per_s if ops is None else ops,
        burst=namespace.burst if burst is None else burst,
        ttl_ms=namespace.ttl_ms if ttl is None else ttl,
    )


def _find(table: NamespaceTable, name: str) -> Namespace:
    found = table.find_or_none(name)
    if found is None:
        raise NotThere(f"no namespace {name[:80]!r}; `kvstore namespace list` shows all namespaces")
    return found


def _with(table: NamespaceTable, namespace: Namespace) -> NamespaceTable:
    others = [each for each in table.namespaces if each.name != namespace.name]
    return NamespaceTable(namespaces=tuple(sorted([*others, namespace], key=lambda each: each.name)))
