"""Passwords of the ledgers that the cluster makes, and the keys by which its bookies know them. Decides only."""

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
    """Each ledger has a password of its own, made of the cluster's secret, so that one that is known opens no other."""
    return _made_of(secret.derive(_PURPOSE))


# docs/protocol.md B29
def made_with(secret: ClusterSecret) -> Callable[[LedgerId, bytes], bool]:
    """Tell whether a key is of the password that a ledger of this cluster has, by any secret that is accepted."""
    makers = [_made_of(key) for key in secret.derive_all(_PURPOSE)]
    return lambda ledger, key: any(key == master_key(password(ledger)) for password in makers)


def _made_of(key: bytes) -> Callable[[LedgerId], bytes]:
    return lambda ledger: hmac.digest(key, b"%d" % ledger, hashlib.sha256).hex().encode()
