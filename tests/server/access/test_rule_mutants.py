"""Each way to break authentication at bookies (docs/protocol.md B32, B33), by tokens, and with preferred or required
TLS (S1) is caught by the test beside it."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.access import RemoveToken, Switch
from kvstore.access.tokens import Token
from kvstore.env import transport
from kvstore.env.tls import Tls
from kvstore.env.transport import TcpTransport
from kvstore.server.access import identities, logins
from kvstore.server.access.identities import Access, UserIdentity
from kvstore.wal.connection import Connection
from tests.certificates import Files
from tests.env import test_tls_preferred
from tests.env.test_tls_preferred import files
from tests.server.access import test_identities_bookies, test_logins_tokens
from tests.server.access.tables import table
from tests.server.access.test_identities_bookies import issue
from tests.server.access.test_logins_tokens import FALSE, Server, server
from tests.sim.world import test_connection

__all__ = ["files", "issue", "server"]

Patch = pytest.MonkeyPatch
NOTICED = (AssertionError, pytest.fail.Exception)
_of_token, _init, _expire = Access.of_token, TcpTransport.__init__, Access.expire


# ── bookies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _by_no_certificate(patch: Patch) -> None:
    patch.setattr(Access, "is_user", lambda self, stream: False)


def _whoever_has_one(patch: Patch) -> None:
    def is_user(self: Access, stream: Any) -> bool:
        return self.is_on and bool(list(identities.common_names(stream.get_extra_info("peercert"))))

    patch.setattr(Access, "is_user", is_user)


def _where_nobody_is_asked(patch: Patch) -> None:
    def is_user(self: Access, stream: Any) -> bool:
        return self.of_certificate(identities.common_names(stream.get_extra_info("peercert"))) is not None

    patch.setattr(Access, "is_user", is_user)


AT_BOOKIES: dict[str, tuple[Callable[[Patch], None], Access, str, bool]] = {
    "users are let in": (_by_no_certificate, Access(table()), "tenant", False),
    "nodes are kept out": (_whoever_has_one, Access(table()), "n1", True),
    "users are kept out where nobody is asked": (_where_nobody_is_asked, Access(table(Switch(False))), "tenant", True),
}


@pytest.mark.parametrize("name", sorted(AT_BOOKIES))
async def test_broken_port_of_a_bookie_is_noticed(
    name: str, monkeypatch: Patch, tmp_path: Path, issue: Callable[[str], Tls]
) -> None:
    """docs/protocol.md B33"""
    breakage, *case = AT_BOOKIES[name]
    breakage(monkeypatch)
    with pytest.raises((*NOTICED, ConnectionError, EOFError, ssl.SSLError)):
        await test_identities_bookies.test_bookie_refuses_user_certificate_before_reading_a_request(
            tmp_path,
            issue,
            *case,  # type: ignore[arg-type]
        )


def test_broken_caller_of_bookies_is_noticed(monkeypatch: Patch) -> None:
    """docs/protocol.md B32: a caller that does not recognise a refusal."""
    monkeypatch.setattr(Connection, "_hello_answered", lambda self, answer: setattr(self, "_hello_txn", -1))
    with pytest.raises(NOTICED):
        test_connection.test_bookie_of_another_cluster_refuses_with_specific_error()


# ── tokens ────────────────────────────────────────────────────────────────────────────────────────────────────────────

Case = Callable[[Server], Awaitable[None]]
_ends: Case = test_logins_tokens.test_token_and_its_connections_end_when_it_expires
_is_revoked: Case = partial(
    test_logins_tokens.test_connections_of_a_token_end_when_it_or_its_user_is_removed,
    change=RemoveToken(test_logins_tokens.ID),
)
_stays: Case = test_logins_tokens.test_token_survives_other_changes_and_follows_its_users_rights


async def _wrong_secret(server: Server) -> None:
    with pytest.raises(logins.NotAuthenticated):
        await server.logins.login("", FALSE, "a")


async def _another_name(server: Server) -> None:
    with pytest.raises(logins.NotAuthenticated):
        await server.logins.login("root", test_logins_tokens.WORD, "a")


def _keep_what_came(patch: Patch) -> None:
    patch.setattr(UserIdentity, "end", lambda self, why: None)


def _look_at_no_name(patch: Patch) -> None:
    known = logins.Logins.known_or_none
    patch.setattr(logins.Logins, "known_or_none", lambda self, user, password: known(self, "", password))


def _end_all(patch: Patch) -> None:
    take = Access._take_tokens

    def anew(self: Access, found: Any) -> None:
        for _, identity in self._tokens.values():
            identity.end("another table")
        take(self, found)

    patch.setattr(Access, "_take_tokens", anew)


OF_TOKENS: dict[str, tuple[Callable[[Patch], None], Case]] = {
    "a token that has expired lets in": (
        lambda patch: patch.setattr(Access, "of_token", lambda self, id_, word, now_ms: _of_token(self, id_, word, 0)),
        _ends,
    ),
    "it expires a moment late": (
        lambda patch: patch.setattr(
            Access, "of_token", lambda self, id_, word, now_ms: _of_token(self, id_, word, now_ms - 1)
        ),
        _ends,
    ),
    "what came with it stays when it expires": (lambda patch: patch.setattr(Access, "expire", lambda *_: None), _ends),
    "what came with it ends a moment early": (
        lambda patch: patch.setattr(Access, "expire", lambda self, now_ms: _expire(self, now_ms + 1)),
        _ends,
    ),
    "what came with it stays when it is revoked": (_keep_what_came, _is_revoked),
    "whatever changes ends it": (_end_all, _stays),
    "its secret is not looked at": (
        lambda patch: patch.setattr(Token, "is_right", lambda self, word: True),
        _wrong_secret,
    ),
    "it lets in under any name": (_look_at_no_name, _another_name),
}


@pytest.mark.parametrize("name", sorted(OF_TOKENS))
async def test_broken_token_is_noticed(name: str, monkeypatch: Patch, server: Server) -> None:
    breakage, case = OF_TOKENS[name]
    breakage(monkeypatch)
    with pytest.raises((*NOTICED, logins.NotAuthenticated)):
        await case(server)


# ── TLS, preferred and required ───────────────────────────────────────────────────────────────────────────────────────


def _always(patch: Patch) -> None:
    """Accept connections without TLS although it is required."""
    patch.setattr(TcpTransport, "__init__", lambda self, **options: _init(self, **{**options, "admits_plain": True}))


def _never(patch: Patch) -> None:
    patch.setattr(TcpTransport, "__init__", lambda self, **options: _init(self, **{**options, "admits_plain": False}))


def _go_without_at_once(patch: Patch) -> None:
    """Connect without TLS wherever it is only preferred."""
    connected = TcpTransport._connected

    async def plain(self: TcpTransport, address: str, handler: Any, tls: Any, prelude: Any) -> Any:
        return await connected(self, address, handler, *((None, None) if self._admits_plain else (tls, prelude)))

    patch.setattr(TcpTransport, "_connected", plain)


def _after_any_error(patch: Patch) -> None:
    patch.setattr(transport, "speaks_no_tls", lambda error: True)


WITH_TLS: dict[str, tuple[Callable[[Patch], None], Callable[[Files], Awaitable[None]]]] = {
    "a port that requires it takes what is plain": (
        _always,
        partial(test_tls_preferred.test_port_that_requires_tls_accepts_no_plain_connection, prelude=None),
    ),
    "a bookie's port that requires it takes what is plain": (
        _always,
        partial(
            test_tls_preferred.test_port_that_requires_tls_accepts_no_plain_connection,
            prelude=test_tls_preferred.bookies_prelude,
        ),
    ),
    "who requires it calls without": (
        _always,
        partial(test_tls_preferred.test_only_a_caller_that_prefers_tls_calls_without_it, says=b"", says_first=None),
    ),
    "a port that prefers it takes nothing plain": (
        _never,
        partial(test_tls_preferred.test_port_that_prefers_tls_accepts_both_and_counts_plain_connections, prelude=None),
    ),
    "who prefers it calls without where there is some": (
        _go_without_at_once,
        partial(test_tls_preferred.test_call_uses_tls_when_the_server_has_it, prelude=None),
    ),
    "a certificate that is not trusted is a reason to go without": (
        _after_any_error,
        test_tls_preferred.test_untrusted_certificate_is_no_reason_to_call_without_tls,
    ),
}


@pytest.mark.parametrize("name", sorted(WITH_TLS))
async def test_broken_preference_of_tls_is_noticed(name: str, monkeypatch: Patch, files: Files) -> None:
    """docs/protocol.md S1"""
    breakage, case = WITH_TLS[name]
    breakage(monkeypatch)
    with pytest.raises((*NOTICED, OSError, EOFError)):
        await case(files)
