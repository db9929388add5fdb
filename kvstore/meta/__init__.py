"""The metadata store: one interface, drivers behind it, and Apache BookKeeper's layout on top. Drivers are imported by
name."""

from kvstore.meta.bookies import BookieView
from kvstore.meta.cookies import Cookie
from kvstore.meta.ephemeral import KeptEphemeral
from kvstore.meta.layout import LayoutManager
from kvstore.meta.ledger_ids import LedgerIdGenerator
from kvstore.meta.ledgers import LedgerManager
from kvstore.meta.registration import BookieRegistration, Bookies, RegistrationClient, RegistrationManager
from kvstore.meta.store import (
    Change,
    Check,
    Create,
    Delete,
    MetadataStore,
    SessionState,
    SetData,
    Stat,
    Watch,
    ensure_path,
)

__all__ = [
    "BookieRegistration",
    "BookieView",
    "Bookies",
    "Change",
    "Check",
    "Cookie",
    "Create",
    "Delete",
    "KeptEphemeral",
    "LayoutManager",
    "LedgerIdGenerator",
    "LedgerManager",
    "MetadataStore",
    "RegistrationClient",
    "RegistrationManager",
    "SessionState",
    "SetData",
    "Stat",
    "Watch",
    "ensure_path",
]
