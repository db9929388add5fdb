"""Slots shared by network, and the networks that are known."""

from __future__ import annotations

import pytest

from kvstore.env import networks
from kvstore.env.networks import KnownNetworks, network_of
from kvstore.env.shares import UNKNOWN_SHARE, Shares, largest_of_largest, may_take_slot


def shares_of(*places: tuple[str, str], known: str = "") -> Shares[str]:
    """Occupants with their networks, oldest first."""
    networks_known = KnownNetworks()
    if known:
        networks_known.note(known)
    found: Shares[str] = Shares(networks_known)
    for occupant, network in places:
        found.add(occupant, network)
    return found


def test_oldest_occupant_of_the_fullest_network_goes_first() -> None:
    shares = shares_of(("a1", "a"), ("b1", "b"), ("b2", "b"), ("c1", "c"))
    assert shares.first_to_go() == "b1"
    assert shares.discard("b1")
    assert shares.first_to_go() == "a1", "of equal networks the oldest"
    assert not shares.discard("b1")


def test_known_network_goes_last() -> None:
    shares = shares_of(("k1", "k"), ("k2", "k"), ("a1", "a"), ("b1", "b"), known="k")
    assert shares.first_to_go() == "a1"
    shares.discard("a1")
    assert shares.first_to_go() == "k1", "the last unknown occupant stays"
    shares.discard("b1")
    shares.discard("k1")
    shares.discard("k2")
    assert (shares.first_to_go(), len(shares)) == (None, 0)


@pytest.mark.parametrize(
    ("newcomer", "gone"),
    [("c", "a1"), ("b", "a1"), ("a", None), ("k", "a1")],
    ids=["new network", "smaller network", "fullest network", "known network"],
)
def test_newcomer_displaces_only_a_network_that_has_more(newcomer: str, gone: str | None) -> None:
    places = [("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b")]
    assert shares_of(*places, known="k").displaced_by(newcomer) == gone


def test_unknown_newcomer_displaces_no_known_network_beyond_its_share() -> None:
    places = [("k1", "k"), ("k2", "k"), ("k3", "k"), ("b1", "b")]
    assert shares_of(*places, known="k").displaced_by("a") is None


def test_unknown_networks_keep_a_share_of_the_slots() -> None:
    """One login makes a network known; it may then hold as many connections as there are slots."""
    shares = shares_of(*((f"k{number}", "k") for number in range(UNKNOWN_SHARE)), known="k")
    assert shares.displaced_by("a") == "k0"
    assert shares.order_of("a") < shares.order_of("k")
    shares.add("a1", "a")
    assert shares.first_to_go() == "k0", "the only unknown occupant does not go"
    shares.discard("k0")
    assert shares.displaced_by("b") is None, "the share is taken"
    assert shares.order_of("k") < shares.order_of("b")
    shares.add("b1", "b")
    assert shares.first_to_go() == "a1"


def test_occupant_keeps_its_age_when_it_is_added_again() -> None:
    shares = shares_of(("a1", "a"), ("a2", "a"))
    shares.add("a1", "b", 5.0)
    assert (shares.count("a"), shares.count("b"), shares.since("a1"), shares.first_to_go()) == (2, 0, 0.0, "a1")


def test_known_networks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "NETWORKS_MAX", 2)
    known = KnownNetworks()
    for each in ("a", "b", "a", "c"):
        known.note(each)
    assert [each in known for each in ("a", "b", "c")] == [True, False, True]


def test_ipv6_addresses_of_one_64_bit_network_count_as_one() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::2:1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.9") == network_of("10.0.0.9")


def test_each_owner_takes_half_of_the_slots_that_the_earlier_ones_leave() -> None:
    free, taken = 32, []
    while free:
        own = 0
        while may_take_slot(own, free):
            own, free = own + 1, free - 1
        taken.append(own)
    assert taken == [16, 8, 4, 2, 1, 1]


def test_largest_holder_of_the_network_with_the_most_gives_way() -> None:
    held = [("alone", "few", 5), *((f"{number}", "many", number) for number in (1, 3, 2))]
    assert largest_of_largest(held) == "3"
    assert largest_of_largest(held[:3]) == "alone"
