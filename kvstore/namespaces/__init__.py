"""Namespaces: named prefixes of keys with quotas, a rate limit and a default time to live."""

from kvstore.namespaces.book import Amounts, Book, UsageReport
from kvstore.namespaces.changes import Add, Change, Remove, Set, applied
from kvstore.namespaces.meter import Meter
from kvstore.namespaces.table import Namespace, NamespaceTable

__all__ = [
    "Add",
    "Amounts",
    "Book",
    "Change",
    "Meter",
    "Namespace",
    "NamespaceTable",
    "Remove",
    "Set",
    "UsageReport",
    "applied",
]
