"""Derives the passwords of the cluster's ledgers, and verifies the keys that bookies store for these passwords.
Decides only."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

from kvstore.env.secret import ClusterSecret
from kvstore.proto.digest import master_key
from kvstore.types import LedgerId

_PURPOSE = "ledger password"


# docs/protocol.md B13
def password_of(secret: ClusterSecret) -> Callable[[LedgerId], bytes]:
    """Return a function that derives the password of a ledger from the cluster's secret. Each ledger has its own
    password, so a leaked password opens no other ledger."""
    return _made_of(secret.derive(_PURPOSE))


# docs/protocol.md B29
def made_with(secret: ClusterSecret) -> Callable[[LedgerId, bytes], bool]:
    """Return a function that tells whether a key was made from the password of a given ledger of this cluster, under
    any accepted secret."""
    makers = [_made_of(key) for key in secret.derive_all(_PURPOSE)]
    return lambda ledger, key: any(key == master_key(password(ledger)) for password in makers)


def _made_of(key: bytes) -> Callable[[LedgerId], bytes]:
    return lambda ledger: hmac.digest(key, b"%d" % ledger, hashlib.sha256).hex().encode()
