"""Which error ends what no server knows the user of."""

from __future__ import annotations

from kvstore.client.core.strangers import Strangers
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
