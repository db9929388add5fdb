"""Which error ends what no server knows the user of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvstore.client.aio.link import State
from kvstore.client.aio.links import Links
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.retries import Nobody
from kvstore.client.core.routing import Routing
from kvstore.client.core.strangers import Strangers
from kvstore.env.library_env import library_env
from kvstore.errors import NotAuthenticated, Unavailable

REMOVED, NOBODY = NotAuthenticated("user acme was removed"), NotAuthenticated("no such user")


def test_the_reason_is_that_of_the_server_which_served_the_user_until_then() -> None:
    strangers, addresses = Strangers(), ("a", "b")
    assert isinstance(strangers.judge("b", REMOVED, addresses), Unavailable)
    assert isinstance(strangers.judge("b", NOBODY, addresses), Unavailable)
    assert strangers.judge("a", NOBODY, addresses) is REMOVED


def test_a_server_that_answers_meanwhile_has_no_reason_any_more() -> None:
    strangers, addresses = Strangers(), ("a", "b")
    strangers.hear("a", REMOVED)
    strangers.hear("a", None)
    assert isinstance(strangers.judge("b", NOBODY, addresses), Unavailable)
    assert strangers.judge("a", NOBODY, addresses) is NOBODY


def test_what_is_said_of_a_login_that_was_good_is_final_only_when_a_new_connection_hears_it_too() -> None:
    strangers, addresses = Strangers(), ("a",)
    assert isinstance(strangers.judge("a", REMOVED, addresses, has_served=True), Unavailable)
    assert isinstance(strangers.of_all(Nobody(), addresses, is_late=False), Nobody)
    assert strangers.why_or_none(addresses, is_late=True) is REMOVED
    assert strangers.judge("a", NOBODY, addresses) is REMOVED
    assert strangers.of_all(NOBODY, addresses, is_late=False) is REMOVED
    assert isinstance(strangers.judge("a", NOBODY, addresses, has_served=True), Unavailable)


def test_asyncio_callers_get_an_error_of_their_own_and_what_servers_said_last() -> None:
    """Whoever raises one that is kept has it keep his frames, and all of those who caught it before."""
    nothing: Any = None
    config = ClientConfig(endpoints=("a",))
    links = Links(
        library_env("links"), config, Routing(), nothing, changed=lambda: None, heard=lambda _: None, tokens={}
    )
    for error in (REMOVED, NOBODY):
        link: Any = SimpleNamespace(address="a", state=State.DOWN, frames=0, stranger=error)
        links._on_change(link)
        first, second = (links.stranger_or_none(is_late=False) for _ in range(2))
        assert type(first) is NotAuthenticated
        assert str(first) == str(second) == str(error)
        assert len({id(first), id(second), id(error)}) == 3
