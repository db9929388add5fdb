"""Passwords of ledgers, and which ledgers a bookie takes for the cluster's own because of them."""

from __future__ import annotations

from kvstore.env.secret import ClusterSecret
from kvstore.proto.digest import master_key
from kvstore.server.ledger_passwords import made_with, password_of
from kvstore.types import LedgerId

FORMER, PRESENT = ClusterSecret((b"a" * 32,)), ClusterSecret((b"b" * 32, b"a" * 32))


# docs/protocol.md B13
def test_each_ledger_has_its_own_password() -> None:
    password = password_of(PRESENT)
    assert len({password(LedgerId(1)), password(LedgerId(2)), password_of(FORMER)(LedgerId(1))}) == 3


# docs/protocol.md B29
def test_ledger_is_recognized_by_any_accepted_secret() -> None:
    is_ours = made_with(PRESENT)
    for secret in (FORMER, PRESENT):
        assert is_ours(LedgerId(7), master_key(password_of(secret)(LedgerId(7))))
    assert not is_ours(LedgerId(8), master_key(password_of(PRESENT)(LedgerId(7))))
    assert not made_with(FORMER)(LedgerId(7), master_key(password_of(PRESENT)(LedgerId(7))))
    assert not is_ours(LedgerId(7), master_key(b""))
