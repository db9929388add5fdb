"""The error of a call when servers reject the login."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvstore.client.aio.link import LinkState
from kvstore.client.aio.links import AsyncLinks
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.login_refusals import LoginRefusals
from kvstore.client.core.retries import NoServerReachable
from kvstore.client.core.routing import Routing
from kvstore.env.library_env import library_env
from kvstore.errors import NotAuthenticated, Unavailable

REMOVED, NOBODY = NotAuthenticated("user acme was removed"), NotAuthenticated("no such user")


def test_error_is_that_of_the_server_that_served_the_user_before() -> None:
    refusals, addresses = LoginRefusals(), ("a", "b")
    assert isinstance(refusals.judge("b", REMOVED, addresses), Unavailable)
    assert isinstance(refusals.judge("b", NOBODY, addresses), Unavailable)
    assert refusals.judge("a", NOBODY, addresses) is REMOVED


def test_server_that_answers_again_has_no_login_error() -> None:
    refusals, addresses = LoginRefusals(), ("a", "b")
    refusals.record("a", REMOVED)
    refusals.record("a", None)
    assert isinstance(refusals.judge("b", NOBODY, addresses), Unavailable)
    assert refusals.judge("a", NOBODY, addresses) is NOBODY


def test_refusal_of_a_served_login_is_final_only_on_a_new_connection() -> None:
    refusals, addresses = LoginRefusals(), ("a",)
    assert isinstance(refusals.judge("a", REMOVED, addresses, has_served=True), Unavailable)
    assert isinstance(refusals.of_all(NoServerReachable(), addresses, is_late=False), NoServerReachable)
    assert refusals.error_or_none(addresses, is_late=True) is REMOVED
    assert refusals.judge("a", NOBODY, addresses) is REMOVED
    assert refusals.of_all(NOBODY, addresses, is_late=False) is REMOVED
    assert isinstance(refusals.judge("a", NOBODY, addresses, has_served=True), Unavailable)


def test_asyncio_callers_get_their_own_copy_of_the_last_error() -> None:
    """Raising a kept exception again makes it keep the frames of all its callers."""
    nothing: Any = None
    config = ClientConfig(endpoints=("a:1",))
    links = AsyncLinks(
        library_env("links"), config, Routing(), nothing, changed=lambda: None, on_answers=lambda _: None, tokens={}
    )
    for error in (REMOVED, NOBODY):
        link: Any = SimpleNamespace(address="a:1", state=LinkState.DOWN, frames=0, login_error=error)
        links._on_change(link)
        first, second = (links.login_error_or_none(is_late=False) for _ in range(2))
        assert type(first) is NotAuthenticated
        assert str(first) == str(second) == str(error)
        assert len({id(first), id(second), id(error)}) == 3
