"""User certificates at a bookie's port, which knows no permissions (docs/protocol.md B33)."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme

from kvstore.access import RemoveUser, Switch
from kvstore.access.principals import PrincipalKind
from kvstore.env.real import real_env
from kvstore.env.tls import Tls
from kvstore.errors import BookieError
from kvstore.proto.bookkeeper import Status
from kvstore.ranges import WrongSettings
from kvstore.server.access.identities import Access
from kvstore.server.composition import _is_no_client_of_bookies
from kvstore.server.config import NodeConfig
from kvstore.types import BookieId
from kvstore.wal.bookies import BookieClients
from tests.bookie.peers.test_start_tls import asked, served
from tests.server.access.tables import table
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def issue(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tls]:
    """Return a function that issues certificates of one CA for a name."""
    folder, authority = tmp_path_factory.mktemp("users"), trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))

    def made(name: str) -> Tls:
        issued, place = authority.issue_cert("127.0.0.1", common_name=name), folder / f"{name}.pem"
        issued.private_key_and_cert_chain_pem.write_to_path(str(place))
        return Tls(cert=place, key=place, ca=folder / "ca.pem")

    return made


def like_a_node(name: str) -> Access:
    """Return the users of a cluster that has a node of this name."""
    access = Access(table())
    access.cluster_names.take({name: PrincipalKind.NODE})
    return access


@pytest.mark.parametrize(
    ("access", "name", "is_let_in"),
    [
        (Access(table()), "tenant", False),
        (Access(table()), "root", False),
        (Access(table()), "n1", True),
        (Access(table(RemoveUser("tenant"))), "tenant", True),
        (Access(table(Switch(False))), "tenant", True),
        (Access(is_wanted=True), "tenant", True),
        (like_a_node("tenant"), "tenant", True),
        (like_a_node("Tenant"), "tenant", True),
    ],
)
async def test_bookie_refuses_user_certificate_before_reading_a_request(
    tmp_path: Path, issue: Callable[[str], Tls], access: Access, name: str, is_let_in: bool
) -> None:
    own = replace(issue("bookie"), verify_clients=True)
    async with served(tmp_path, own, is_user=access.is_user) as one:
        if is_let_in:
            assert (await asked(one, issue(name))).status == Status.NO_LEDGER
        else:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError, ssl.SSLError)):
                await asked(one, issue(name))
        assert one.statistics.refused_user == (0 if is_let_in else 1)


@pytest.mark.parametrize(
    ("name", "is_let_in"), [("n1", True), ("n2", False), ("tenant", False), ("a.kv.internal", True), ("repairs", True)]
)
async def test_bookie_with_client_list_refuses_other_certificates(
    tmp_path: Path, issue: Callable[[str], Tls], name: str, is_let_in: bool
) -> None:
    """A client of the cluster's endpoints may have a certificate of the same CA, and has no business at a bookie."""
    config = SimpleNamespace(bookie_clients=("n1", "*.kv.internal", "Repairs"))
    node: Any = SimpleNamespace(access=Access(table(Switch(False))), config=config)
    own = replace(issue("bookie"), verify_clients=True)
    async with served(tmp_path, own, is_user=partial(_is_no_client_of_bookies, node)) as one:
        if is_let_in:
            assert (await asked(one, issue(name))).status == Status.NO_LEDGER
        else:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError, ssl.SSLError)):
                await asked(one, issue(name))
        assert one.statistics.refused_user == (0 if is_let_in else 1)


def test_config_check_reports_client_names_without_a_certificate(tmp_path: Path) -> None:
    files = {"data_dir": tmp_path, "secret_file": tmp_path / "secret"}
    with pytest.raises(WrongSettings, match=r"bookie_clients: expected \[tls\] verify_clients"):
        NodeConfig(id="n1", zookeeper="zk:2181", bookie_clients=("n1",), **files)  # type: ignore[arg-type]


def test_bookie_treats_listed_user_certificate_as_a_user() -> None:
    """The user's permissions apply at the endpoints of servers."""
    config = SimpleNamespace(bookie_clients=("tenant",))
    node: Any = SimpleNamespace(access=Access(table()), config=config)
    certificate = {"subject": ((("commonName", "tenant"),),)}
    shown: Any = SimpleNamespace(get_extra_info={"peercert": certificate, "peername": ("10.0.0.7", 1)}.get)
    nothing: Any = SimpleNamespace(get_extra_info=lambda _: None)
    assert _is_no_client_of_bookies(node, shown)
    assert not _is_no_client_of_bookies(node, nothing), "where TLS is only preferred what comes plain has none"


async def test_bookie_client_reports_a_refusal_until_it_is_accepted(
    tmp_path: Path, issue: Callable[[str], Tls]
) -> None:
    access, b1 = Access(table()), BookieId("b1-aaaa")
    env = real_env(tmp_path / "client", tls=issue("tenant"))
    async with served(
        tmp_path / "bookie", replace(issue("bookie"), verify_clients=True), is_user=access.is_user
    ) as one:
        bookies = BookieClients(env, lambda _: one.address)
        with pytest.raises(BookieError):
            await bookies.space(b1)
        assert bookies.refusals()[b1].startswith("the bookie closed the connection before any answer")
        access.take(table(RemoveUser("tenant")))

        async def is_accepted() -> bool:
            with suppress(BookieError):  # the bookie waits between two connections
                await bookies.space(b1)
            return not bookies.refusals()

        await wait_until(is_accepted, what="the bookie accepts the client")
        bookies.close()
    await env.nursery.close()
