"""Users, nodes and bookies are principals of separate kinds."""

from __future__ import annotations

import pytest

from kvstore.access import AddUser, FoundAdmin, RemoveUser, SetPassword
from kvstore.access.principals import ClusterNames, Principal, PrincipalKind
from kvstore.errors import InvalidRequest


@pytest.fixture
def names() -> ClusterNames:
    found = ClusterNames()
    found.take({"n1": PrincipalKind.NODE, "n1-0123456789ab": PrincipalKind.BOOKIE, "kv1.example": PrincipalKind.NODE})
    found.note_shown("n2", ["kvstore-nodes"])
    return found


@pytest.mark.parametrize("name", ["n1", "N1", "n1-0123456789ab", "kv1.example", "Kvstore-Nodes"])
def test_user_with_name_of_node_or_bookie_is_refused(names: ClusterNames, name: str) -> None:
    for change in (AddUser(name), FoundAdmin(name, "hash")):
        with pytest.raises(InvalidRequest, match="expected a user name that no node or bookie has"):
            names.check(change)


def test_user_with_unused_name_is_accepted_and_can_be_changed(names: ClusterNames) -> None:
    for change in (AddUser("n10"), AddUser("n"), RemoveUser("n1"), SetPassword("n1", "hash")):
        names.check(change)


def test_node_name_stays_reserved_when_node_shows_another_certificate(names: ClusterNames) -> None:
    names.note_shown("n2", ["renewed"])
    assert names.principal_or_none("kvstore-nodes") is None
    assert names.principal_or_none("renewed") == Principal(PrincipalKind.NODE, "renewed")
    assert names.principal_or_none("n1") == Principal(PrincipalKind.NODE, "n1")
