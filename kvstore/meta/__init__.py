"""The metadata store: one interface, its drivers, and Apache BookKeeper's layout on top. Drivers are imported
by name."""

from kvstore.meta.auditor_votes import AuditorVotes
from kvstore.meta.bookies import BookieView
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.cookies import Cookie
from kvstore.meta.ephemeral import KeptEphemeral
from kvstore.meta.layout import LayoutStore
from kvstore.meta.ledger_ids import LedgerIdGenerator
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.marks import LedgerMark
from kvstore.meta.recovery_settings import CheckKind, RecoverySettings
from kvstore.meta.registration import BookieRegistration, RegisteredBookies, RegistrationClient
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
from kvstore.meta.underreplication import MarkLock, Underreplication

__all__ = [
    "AuditorVotes",
    "BookieRegistration",
    "BookieView",
    "Change",
    "Check",
    "CheckKind",
    "Cookie",
    "CookieStore",
    "Create",
    "Delete",
    "KeptEphemeral",
    "LayoutStore",
    "LedgerIdGenerator",
    "LedgerMark",
    "LedgerStore",
    "MarkLock",
    "MetadataStore",
    "RecoverySettings",
    "RegisteredBookies",
    "RegistrationClient",
    "SessionState",
    "SetData",
    "Stat",
    "Underreplication",
    "Watch",
    "ensure_path",
]
