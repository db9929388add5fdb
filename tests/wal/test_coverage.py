"""The coverage rule, against its definitions, for every quorum up to six bookies."""

from collections.abc import Iterator
from itertools import combinations

import pytest

from kvstore.types import EntryId, Fragment, Quorum
from kvstore.wal.coverage import is_covered, is_somewhere_short, is_window_covered, write_set_indexes
from tests.wal.ledgers import B1, B2, B3, B4, B5, B6

QUORUMS = [
    Quorum(ensemble, write, ack)
    for ensemble in range(1, 7)
    for write in range(1, ensemble + 1)
    for ack in range(1, write + 1)
]


def subsets(size: int) -> Iterator[frozenset[int]]:
    for count in range(size + 1):
        yield from map(frozenset, combinations(range(size), count))


def some_ack_quorum_is_silent(silent: frozenset[int], quorum: Quorum) -> bool:
    """The definition: a set of Qa bookies of one write set, none of which has answered."""
    write_sets = [[(first + i) % quorum.ensemble for i in range(quorum.write)] for first in range(quorum.ensemble)]
    return any(set(acks) <= silent for members in write_sets for acks in combinations(members, quorum.ack))


@pytest.mark.parametrize("quorum", QUORUMS, ids=str)
def test_covered_means_that_no_ack_quorum_is_silent(quorum: Quorum) -> None:
    for definite in subsets(quorum.ensemble):
        silent = frozenset(range(quorum.ensemble)) - definite
        assert is_covered(definite, quorum) == (not some_ack_quorum_is_silent(silent, quorum)), (definite, quorum)


@pytest.mark.parametrize("quorum", QUORUMS, ids=str)
def test_covered_bookies_meet_every_ack_quorum(quorum: Quorum) -> None:
    for definite in subsets(quorum.ensemble):
        ack_quorums = [
            set(acks)
            for first in range(quorum.ensemble)
            for acks in combinations(write_set_indexes(EntryId(first), quorum), quorum.ack)
        ]
        assert is_covered(definite, quorum) == all(acks & definite for acks in ack_quorums)


@pytest.mark.parametrize("quorum", QUORUMS, ids=str)
def test_write_set_is_covered_when_the_others_are_no_ack_quorum(quorum: Quorum) -> None:
    for entry in range(quorum.ensemble):
        window = write_set_indexes(EntryId(entry), quorum)
        for definite in subsets(quorum.ensemble):
            rest = set(window) - definite
            assert is_window_covered(window, definite, quorum) == (len(rest) < quorum.ack)


@pytest.mark.parametrize("quorum", QUORUMS, ids=str)
def test_somewhere_short_means_a_write_set_without_ack_quorum(quorum: Quorum) -> None:
    for lost in subsets(quorum.ensemble):
        left = [set(write_set_indexes(EntryId(first), quorum)) - lost for first in range(quorum.ensemble)]
        assert is_somewhere_short(lost, quorum) == (min(map(len, left)) < quorum.ack)


@pytest.mark.parametrize("quorum", [quorum for quorum in QUORUMS if quorum.write == quorum.ensemble], ids=str)
def test_coverage_is_a_count_without_striping(quorum: Quorum) -> None:
    for definite in subsets(quorum.ensemble):
        assert is_covered(definite, quorum) == (len(definite) > quorum.ensemble - quorum.ack)


@pytest.mark.parametrize(
    ("quorum", "needed"),
    [(Quorum(3, 3, 2), 2), (Quorum(3, 2, 2), 2), (Quorum(3, 3, 3), 1), (Quorum(2, 2, 2), 1), (Quorum(5, 3, 2), 4)],
)
def test_smallest_covering_sets_match_the_definition(quorum: Quorum, needed: int) -> None:
    assert min(len(definite) for definite in subsets(quorum.ensemble) if is_covered(definite, quorum)) == needed


def test_places_and_write_sets_agree() -> None:
    ensemble = (B1, B2, B3, B4, B5, B6)
    for quorum in (quorum for quorum in QUORUMS if quorum.ensemble == 6):
        fragment = Fragment(EntryId(0), ensemble)
        for entry in map(EntryId, range(13)):
            places = write_set_indexes(entry, quorum)
            assert {ensemble[i] for i in places} == set(fragment.write_set(entry, quorum))
