"""Users at a bookie's port, which knows no rights (docs/protocol.md B33)."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from kvstore.access import RemoveUser, Switch
from kvstore.env.tls import Tls
from kvstore.proto.bookkeeper import Status
from kvstore.server.access.identities import Access
from tests.bookie.test_start_tls import asked, served, within
from tests.env.runners import on_asyncio
from tests.server.access.tables import table


@pytest.fixture(scope="module")
def issue(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tls]:
    """Makes the certificate of a name, of one CA."""
    folder, authority = tmp_path_factory.mktemp("users"), trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))

    def made(name: str) -> Tls:
        issued, place = authority.issue_cert("127.0.0.1", common_name=name), folder / f"{name}.pem"
        issued.private_key_and_cert_chain_pem.write_to_path(str(place))
        return Tls(cert=place, key=place, ca=folder / "ca.pem")

    return made


@pytest.mark.parametrize(
    ("access", "name", "is_let_in"),
    [
        (Access(table()), "tenant", False),
        (Access(table()), "root", False),
        (Access(table()), "n1", True),
        (Access(table(RemoveUser("tenant"))), "tenant", True),
        (Access(table(Switch(False))), "tenant", True),
        (Access(is_wanted=True), "tenant", True),
    ],
)
def test_a_users_certificate_is_refused_before_anything_is_read_and_others_are_not(
    tmp_path: Path, issue: Callable[[str], Tls], access: Access, name: str, is_let_in: bool
) -> None:
    async def go() -> None:
        own = replace(issue("bookie"), verify_clients=True)
        async with served(tmp_path, own, is_user=access.is_user) as one:
            if is_let_in:
                assert (await asked(one, issue(name))).status == Status.NO_LEDGER
            else:
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError, ssl.SSLError)):
                    await asked(one, issue(name))
            assert one.statistics.refused_user == (0 if is_let_in else 1)

    on_asyncio(within(go))
