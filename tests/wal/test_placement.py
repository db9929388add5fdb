"""The choice of the bookies of an ensemble."""

import itertools
from collections import Counter
from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import NotEnoughBookies
from kvstore.types import BookieId, Quorum
from kvstore.wal.placement import better_place, choose, clashes, newcomers_of, quorum_for, spread_out, swaps
from tests.wal.ledgers import B1, B2, B3, B4, B5, B6, e, ledger

DEFAULT = Quorum(3, 3, 2)
NOWHERE = dict.fromkeys((B1, B2, B3, B4, B5), "")
ZONES = {B1: "a", B2: "a", B3: "b", B4: "b", B5: "c", B6: "c"}


def test_ensemble_shrinks_with_the_bookies_down_to_the_ack_quorum() -> None:
    assert quorum_for(5, DEFAULT) == DEFAULT
    assert quorum_for(2, DEFAULT) == Quorum(2, 2, 2)
    with pytest.raises(NotEnoughBookies):
        quorum_for(1, DEFAULT)


def test_striped_ensemble_shrinks_from_its_size() -> None:
    assert quorum_for(4, Quorum(6, 3, 2)) == Quorum(4, 3, 2)
    assert quorum_for(2, Quorum(6, 3, 2)) == Quorum(2, 2, 2)


def test_chosen_bookies_are_distinct() -> None:
    for seed in range(50):
        chosen = choose(NOWHERE, 3, Random(seed))
        assert len(set(chosen)) == 3


def test_own_bookie_is_always_chosen() -> None:
    assert all(B4 in choose(NOWHERE, 3, Random(seed), own=B4) for seed in range(50))


def test_other_bookies_are_drawn_at_random() -> None:
    taken = {bookie for seed in range(50) for bookie in choose(NOWHERE, 3, Random(seed), own=B4)}
    assert taken == set(NOWHERE)


def test_zones_are_spread() -> None:
    for seed in range(50):
        assert {ZONES[bookie] for bookie in choose(ZONES, 3, Random(seed), own=B1)} == {"a", "b", "c"}


def test_avoided_bookies_are_chosen_only_without_others() -> None:
    assert all(B2 not in choose(NOWHERE, 3, Random(seed), avoid={B2}) for seed in range(50))
    assert B2 in choose(NOWHERE, 5, Random(0), avoid={B2})


def test_one_seed_gives_one_choice() -> None:
    assert choose(ZONES, 3, Random(7)) == choose(dict(reversed(ZONES.items())), 3, Random(7))


def test_failed_bookie_is_replaced_from_an_unused_zone() -> None:
    for seed in range(20):
        replaced = swaps((B1, B3, B5), {B5}, ZONES, Random(seed))
        assert replaced == {B5: B6}


def test_failed_bookies_are_replaced_as_far_as_spares_last() -> None:
    zones = dict.fromkeys((B1, B2, B3, B4), "")
    assert len(swaps((B1, B2, B3), {B2, B3}, zones, Random(1))) == 1
    assert swaps((B1, B2, B3), {B2}, dict.fromkeys((B1, B2, B3), ""), Random(1)) == {}


# Zones: docs/protocol.md, W10.

places = st.dictionaries(
    st.sampled_from([BookieId(f"b{n}") for n in range(9)]), st.sampled_from(["a", "b", "c", ""]), min_size=3
)


def fewest(zones: dict[BookieId, str], count: int, own: BookieId | None = None) -> int:
    """Return the fewest clashes of any choice of `count` bookies whose write sets are the whole ensemble."""
    choices = itertools.combinations(sorted(zones), count)
    return min(clashes(choice, count, zones) for choice in choices if own is None or own in choice)


@given(places, st.integers(0, 2**32))
def test_choice_has_as_few_clashes_as_possible(zones: dict[BookieId, str], seed: int) -> None:
    """docs/protocol.md, W10: with too few zones, as distinct as possible."""
    own = min(zones)
    assert clashes(choose(zones, 3, Random(seed), own=own), 3, zones) == fewest(zones, 3, own)


@given(places, st.integers(0, 2**32))
def test_replacement_has_as_few_clashes_as_possible(zones: dict[BookieId, str], seed: int) -> None:
    ensemble = tuple(sorted(zones)[:3])
    leaving = ensemble[seed % 3]
    replaced = swaps(ensemble, {leaving}, zones, Random(seed), own=max(zones))
    options = [
        clashes([spare if each == leaving else each for each in ensemble], 3, zones)
        for spare in zones
        if spare not in ensemble
    ]
    assert len(replaced) == bool(options)
    for newcomer in replaced.values():
        assert clashes([newcomer if each == leaving else each for each in ensemble], 3, zones) == min(options)


PROCESSES = st.sampled_from(["", ".2", ".12"])
FORMER, NOW = BookieId("n2-000000000001"), BookieId("n2-0000000000ff")
OTHERS = tuple(BookieId(f"n{number}-00000000000a") for number in (1, 3, 4))


@pytest.mark.parametrize("seed", range(20))
def test_machine_registered_twice_gets_one_place(seed: int) -> None:
    zones = {FORMER: "", NOW: "", **dict.fromkeys(OTHERS, "")}
    luck = Random(seed)
    for avoid in ((), OTHERS[:1]):
        for count in (4, 5):
            assert len({FORMER, NOW} & set(choose(zones, count, luck, avoid=avoid))) == 1
    ensemble = (FORMER, OTHERS[0], OTHERS[1])
    assert swaps(ensemble, {OTHERS[0]}, zones, luck) == {OTHERS[0]: OTHERS[2]}
    assert swaps(ensemble, {FORMER}, {NOW: "", **dict.fromkeys(ensemble, "")}, luck) == {FORMER: NOW}
    ensemble = (OTHERS[0], NOW, OTHERS[1])
    registered = {FORMER: "", **dict.fromkeys(ensemble, "")}
    for failed in (ensemble[:1], ensemble[:2]):
        taken = swaps(ensemble, failed, registered, luck)
        assert OTHERS[0] not in taken, "a failed bookie may come back; a lost disk does not"
    newest = BookieId("n2-000000000fff")
    lost_twice = (FORMER, NOW, OTHERS[0])
    assert swaps(lost_twice, {FORMER, NOW}, {newest: ""}, luck) == {FORMER: newest}
    both = swaps(lost_twice, {FORMER, NOW}, {newest: "", OTHERS[1]: ""}, luck)
    assert sorted(both.values()) == sorted((newest, OTHERS[1]))


processes = st.dictionaries(
    st.builds(lambda machine, process: BookieId(f"n{machine}{process}-00000000000a"), st.integers(1, 4), PROCESSES),
    st.sampled_from(["a", "b", ""]),
    min_size=3,
)


def machines(bookies: Iterable[BookieId]) -> int:
    return len({bookie[:2] for bookie in bookies})


# docs/protocol.md H15
@given(processes, st.integers(0, 2**32))
def test_ensembles_are_on_distinct_machines(zones: dict[BookieId, str], seed: int) -> None:
    """Also with fewer machines than copies."""
    luck, own = Random(seed), min(zones)
    ensemble = choose(zones, 3, luck, own=own)
    assert own in ensemble
    assert len(ensemble) == min(3, machines(zones)) == machines(ensemble)
    for failed in (ensemble[:1], ensemble[:2]):
        taken = swaps(ensemble, failed, zones, luck, own)
        assert machines(taken.get(each, each) for each in ensemble) == len(ensemble)
    better = spread_out(ledger(*ensemble, ack=1), zones, set(zones), luck)
    for fragment in better.fragments if better is not None else ():
        assert machines(fragment.ensemble) == len(ensemble)


def test_failed_bookie_is_replaced_by_another_process_of_its_machine() -> None:
    one, two, other = (BookieId(f"{name}-00000000000a") for name in ("n1", "n1.2", "n2"))
    zones = dict.fromkeys((one, two, other), "")
    assert swaps((one, other), {one}, zones, Random(1)) == {one: two}
    assert swaps((one, other), {other}, zones, Random(1)) == {}


def test_copies_are_not_spread_over_one_machine() -> None:
    zones = {FORMER: "a", OTHERS[0]: "b", OTHERS[1]: "b", NOW: "c"}
    assert spread_out(ledger(FORMER, *OTHERS[:2]), zones, set(zones), Random(1)) is None


@given(places, st.integers(0, 2**32))
def test_spreading_ends_when_nothing_is_more_distinct(zones: dict[BookieId, str], seed: int) -> None:
    zones = {bookie: zone or "d" for bookie, zone in zones.items()}
    metadata = ledger(*sorted(zones)[:3])
    better = spread_out(metadata, zones, set(zones), Random(seed))
    ensemble = (better or metadata).fragments[0].ensemble
    assert clashes(ensemble, 3, zones) == fewest(zones, 3)
    if better is not None:
        assert newcomers_of(metadata, better) == set(ensemble) - set(metadata.fragments[0].ensemble)
        assert spread_out(better, zones, set(zones), Random(seed)) is None


def test_striped_ensemble_is_ordered_for_distinct_write_sets() -> None:
    for seed in range(50):
        chosen = choose(ZONES, 6, Random(seed), write=3, own=B1)
        for first in range(6):
            assert len({ZONES[chosen[(first + place) % 6]] for place in range(3)}) == 3


def test_bookie_without_zone_clashes_with_nobody() -> None:
    assert clashes((B1, B2, B3), 3, NOWHERE) == 0
    assert clashes((B1, B2, B3), 3, {}) == 0


def test_copies_do_not_move_to_an_unknown_zone() -> None:
    assert better_place((B1, B2, B3), 3, {**ZONES, B5: "", B6: ""}, {B5, B6}, Random(1)) is None


def test_own_bookie_stays_if_another_can_leave() -> None:
    for seed in range(20):
        move = better_place((B1, B2, B3), 3, ZONES, {B5, B6}, Random(seed), own=B1)
        assert move is not None
        assert move.leaving == B2


def test_each_fragment_is_spread() -> None:
    metadata = ledger(B1, B2, B3).with_ensemble(e(5), (B1, B3, B5)).with_ensemble(e(9), (B5, B6, B1))
    better = spread_out(metadata, ZONES, set(ZONES), Random(1))
    assert better is not None
    assert [Counter(ZONES[each] for each in part.ensemble) for part in better.fragments] == [Counter("abc")] * 3
    assert better.fragments[1] == metadata.fragments[1]
