"""Determines when the cluster version rises, and to which version (docs/protocol.md V1). Decides only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from kvstore import versions
from kvstore.server.cluster.cluster_version import ClusterVersion
from kvstore.server.cluster.topology import Member
from kvstore.types import ServerId

SOON = "it rises within seconds"
OLD, UNREADABLE, HELD = "cannot do it yet", "cannot be decoded", "it is held"
"""Parts of reasons that need an operator."""


def common_version(members: Mapping[ServerId, Member], wanted: Collection[ServerId]) -> int:
    """Return the highest version that all servers support: the registered ones, and those that hold replicas according
    to the ring. An absent server may come back unchanged, so it counts as supporting only the first version. So does a
    server that is still starting, because its start may fail."""
    if not members or any(each not in members for each in wanted):
        return versions.FIRST
    return min(versions.FIRST if member.starting else member.can for member in members.values())


def next_version(now: ClusterVersion, members: Mapping[ServerId, Member], wanted: Collection[ServerId]) -> int | None:
    """Return the version to which the cluster version should rise, or None if it should stay."""
    common = min(common_version(members, wanted), versions.LATEST)
    return common if common > now.version and not now.is_held else None


def may_rise(now: ClusterVersion, members: Mapping[ServerId, Member], wanted: Collection[ServerId]) -> bool:
    """Return True if it is worth reading the current registrations: a starting server may be up now."""
    up = {each: replace(member, starting=False) for each, member in members.items()}
    return next_version(now, up, wanted) is not None


def what_holds_it(
    now: ClusterVersion,
    members: Mapping[ServerId, Member],
    wanted: Collection[ServerId],
    version: int,
    unreadable: Collection[ServerId] = (),
) -> str:
    """Return why the cluster is not at `version` yet, as text for operators; empty if it is. `unreadable` are servers
    whose znodes cannot be decoded."""
    if now.version >= version:
        return ""
    away = sorted(each for each in wanted if each not in members and each not in unreadable)
    starting = sorted(each for each, member in members.items() if member.starting and member.can >= version)
    old = sorted(each for each, member in members.items() if member.can < version)
    reasons = [f"{', '.join(old)} {OLD}"] if old else []
    if away:
        reasons.append(f"{', '.join(away)} hold replicas but are not up")
    if starting:
        reasons.append(f"{', '.join(starting)} {_are(starting)} starting")
    if unreadable:
        reasons.append(
            f"the versions of {', '.join(sorted(unreadable))} are unknown: their nodes below /servers {UNREADABLE}"
        )
    if now.is_held:
        reasons.append(f"{HELD} (release it with `kvstore cluster version --rise`)")
    return "; ".join(reasons) or SOON


def lasts(reasons: str) -> bool:
    """Return True if the reasons of `what_holds_it` need an operator."""
    return any(each in reasons for each in (OLD, UNREADABLE, HELD))


def _are(some: Sequence[ServerId]) -> str:
    return "are" if len(some) > 1 else "is"
