"""When the cluster's version rises (docs/protocol.md V1)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.server.cluster.cluster_version import ClusterVersion
from kvstore.server.cluster.rising import lasts, may_rise, next_version, what_holds_it
from kvstore.server.cluster.topology import Member
from kvstore.types import ServerId
from kvstore.versions import LATEST

N1, N2, N3 = (ServerId(f"n{number}") for number in (1, 2, 3))
ALL = (N1, N2, N3)
FIRST, SECOND = ClusterVersion(1), ClusterVersion(2, "0.2.0")


def up(**can: int) -> dict[ServerId, Member]:
    return {ServerId(each): Member(id=each, resp=f"{each}:1", can=version) for each, version in can.items()}


@pytest.mark.parametrize(
    ("now", "members", "wanted", "waits_for"),
    [
        (FIRST, up(n1=2, n2=2, n3=2), 2, "it rises within seconds"),
        (FIRST, up(n1=2, n2=2, n3=1), None, "n3 cannot do it yet"),
        (FIRST, up(n1=2, n2=2), None, "n3 hold replicas but are not up"),
        (FIRST, up(n1=2, n2=2, n3=2, n4=1), None, "n4 cannot do it yet"),
        (FIRST, up(), None, "n1, n2, n3 hold replicas but are not up"),
        (ClusterVersion(1, "", True), up(n1=2, n2=2, n3=2), None, "it is held"),
        (SECOND, up(n1=2, n2=2, n3=2), None, ""),
        (SECOND, up(n1=1, n2=2, n3=2), None, ""),
        (FIRST, up(n1=LATEST + 7, n2=LATEST + 7, n3=LATEST + 7), LATEST, "it rises within seconds"),
    ],
    ids=(
        *("all can", "one cannot", "one that is down may be old", "one without replicas cannot", "nobody is up"),
        *("held", "there already", "it never falls", "no further than this build can"),
    ),
)
def test_version_rises_to_what_all_servers_support(
    now: ClusterVersion, members: dict[ServerId, Member], wanted: int | None, waits_for: str
) -> None:
    assert next_version(now, members, ALL) == wanted
    assert what_holds_it(now, members, ALL, 2).startswith(waits_for)


def test_starting_server_counts_as_old() -> None:
    """The upgrade may be abandoned, and then an operator wants to return to the previous release."""
    members = up(n1=2, n2=2, n3=2)
    members[N3] = replace(members[N3], starting=True)
    assert next_version(FIRST, members, ALL) is None
    assert may_rise(FIRST, members, ALL), "it may be up by now: the metadata store is asked"
    assert what_holds_it(FIRST, members, ALL, 2) == "n3 is starting"
    assert Member.decode(members[N3].encode()).starting
    assert not may_rise(FIRST, up(n1=2, n2=2, n3=1), ALL)


def test_undecodable_server_is_named() -> None:
    assert what_holds_it(FIRST, up(n1=2, n2=2), ALL, 2, [N3]).startswith("the versions of n3 are unknown")


def test_lasting_reasons_differ_from_passing_ones() -> None:
    """`kvstore up` waits for the former and not for the latter."""
    started = {each: replace(member, starting=True) for each, member in up(n1=2, n2=2).items()}
    for members in (up(n1=2, n2=2, n3=2), up(n1=2, n2=2), started):
        assert not lasts(what_holds_it(FIRST, members, ALL, 2))
    assert not lasts(what_holds_it(SECOND, up(n1=2, n2=2, n3=2), ALL, 2))
    assert lasts(what_holds_it(ClusterVersion(1, "", True), up(n1=2, n2=2, n3=2), ALL, 2))
    assert lasts(what_holds_it(FIRST, up(n1=2, n2=2, n3=1), ALL, 2))
    assert lasts(what_holds_it(FIRST, up(n1=2, n2=2), ALL, 2, [N3]))
