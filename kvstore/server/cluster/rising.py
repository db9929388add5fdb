"""When the cluster's version rises, and to what. Decides only (docs/protocol.md V1)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from kvstore import versions
from kvstore.server.cluster.cluster_version import ClusterVersion
from kvstore.server.cluster.topology import Member
from kvstore.types import ServerId

SOON = "it rises within seconds"
OLD, UNREADABLE, HELD = "cannot do it yet", "cannot be decoded", "it is held"
"""Parts of the reasons that do not pass by themselves."""


def common_version(members: Mapping[ServerId, Member], wanted: Collection[ServerId]) -> int:
    """The highest version that all servers can do: those that are registered, and those that hold replicas by the ring.
    One that is not there may come back as it was, so it counts as of the first release; and so does one that is only
    starting, which may not come to anything."""
    if not members or any(each not in members for each in wanted):
        return versions.FIRST
    return min(versions.FIRST if member.starting else member.can for member in members.values())


def next_version(now: ClusterVersion, members: Mapping[ServerId, Member], wanted: Collection[ServerId]) -> int | None:
    """The version to rise to; None if it stays."""
    common = min(common_version(members, wanted), versions.LATEST)
    return common if common > now.version and not now.is_held else None


def may_rise(now: ClusterVersion, members: Mapping[ServerId, Member], wanted: Collection[ServerId]) -> bool:
    """Whether it is worth a look at what the metadata store says now: who was starting may be up."""
    up = {each: replace(member, starting=False) for each, member in members.items()}
    return next_version(now, up, wanted) is not None


def what_holds_it(
    now: ClusterVersion,
    members: Mapping[ServerId, Member],
    wanted: Collection[ServerId],
    version: int,
    unreadable: Collection[ServerId] = (),
) -> str:
    """Why the cluster is not at `version` yet, for people; empty if it is. `unreadable`: servers whose znodes cannot be
    decoded."""
    if now.version >= version:
        return ""
    away = sorted(each for each in wanted if each not in members and each not in unreadable)
    starting = sorted(each for each, member in members.items() if member.starting and member.can >= version)
    old = sorted(each for each, member in members.items() if member.can < version)
    reasons = [f"{', '.join(old)} {OLD}"] if old else []
    if away:
        reasons.append(f"{', '.join(away)} hold replicas and are not up")
    if starting:
        reasons.append(f"{', '.join(starting)} {_are(starting)} starting")
    if unreadable:
        reasons.append(f"what {', '.join(sorted(unreadable))} can do is not known: below /servers it {UNREADABLE}")
    if now.is_held:
        reasons.append(f"{HELD} (`kvstore cluster version --rise`)")
    return "; ".join(reasons) or SOON


def lasts(reasons: str) -> bool:
    """Whether somebody has to do something about what holds it, by what `what_holds_it` says."""
    return any(each in reasons for each in (OLD, UNREADABLE, HELD))


def _are(some: Sequence[ServerId]) -> str:
    return "are" if len(some) > 1 else "is"
