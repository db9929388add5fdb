"""Sentences about which bookies form an ensemble."""

from random import Random

import pytest

from kvstore.errors import NotEnoughBookies
from kvstore.types import Quorum
from kvstore.wal.placement import choose, quorum_for, swaps
from tests.wal.ledgers import B1, B2, B3, B4, B5, B6

DEFAULT = Quorum(3, 3, 2)
NOWHERE = dict.fromkeys((B1, B2, B3, B4, B5), "")
ZONES = {B1: "a", B2: "a", B3: "b", B4: "b", B5: "c", B6: "c"}


def test_a_ledger_takes_as_many_bookies_as_there_are_down_to_the_ack_quorum() -> None:
    assert quorum_for(5, DEFAULT) == DEFAULT
    assert quorum_for(2, DEFAULT) == Quorum(2, 2, 2)
    with pytest.raises(NotEnoughBookies):
        quorum_for(1, DEFAULT)


def test_striping_shrinks_from_its_ensemble() -> None:
    assert quorum_for(4, Quorum(6, 3, 2)) == Quorum(4, 3, 2)
    assert quorum_for(2, Quorum(6, 3, 2)) == Quorum(2, 2, 2)


def test_chosen_bookies_are_distinct() -> None:
    for seed in range(50):
        chosen = choose(NOWHERE, 3, Random(seed))
        assert len(set(chosen)) == 3


def test_the_own_bookie_is_always_taken() -> None:
    assert all(B4 in choose(NOWHERE, 3, Random(seed), own=B4) for seed in range(50))


def test_luck_spreads_the_others() -> None:
    taken = {bookie for seed in range(50) for bookie in choose(NOWHERE, 3, Random(seed), own=B4)}
    assert taken == set(NOWHERE)


def test_zones_are_spread() -> None:
    for seed in range(50):
        assert {ZONES[bookie] for bookie in choose(ZONES, 3, Random(seed), own=B1)} == {"a", "b", "c"}


def test_those_to_avoid_are_taken_only_when_there_are_no_others() -> None:
    assert all(B2 not in choose(NOWHERE, 3, Random(seed), avoid={B2}) for seed in range(50))
    assert B2 in choose(NOWHERE, 5, Random(0), avoid={B2})


def test_one_seed_gives_one_choice() -> None:
    assert choose(ZONES, 3, Random(7)) == choose(dict(reversed(ZONES.items())), 3, Random(7))


def test_a_failed_bookie_is_replaced_from_a_zone_that_is_not_there() -> None:
    for seed in range(20):
        replaced = swaps((B1, B3, B5), {B5}, ZONES, Random(seed))
        assert replaced == {B5: B6}


def test_as_many_are_replaced_as_there_are_spares() -> None:
    zones = dict.fromkeys((B1, B2, B3, B4), "")
    assert len(swaps((B1, B2, B3), {B2, B3}, zones, Random(1))) == 1
    assert swaps((B1, B2, B3), {B2}, dict.fromkeys((B1, B2, B3), ""), Random(1)) == {}
