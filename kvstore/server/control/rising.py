"""When the cluster's version rises, and to what. Decides only (docs/protocol.md V1)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvstore import versions
from kvstore.server.routing.cluster_version import ClusterVersion
from kvstore.server.routing.topology import Member
from kvstore.types import ServerId


def common_version(members: Mapping[ServerId, Member], wanted: Collection[ServerId]) -> int:
    """The highest version that all servers can do: those that are registered, and those that hold replicas by the ring.
    One that is not there may come back as it was, so it counts as of the first release."""
    if not members or any(each not in members for each in wanted):
        return versions.FIRST
    return min(member.can for member in members.values())


def next_version(now: ClusterVersion, members: Mapping[ServerId, Member], wanted: Collection[ServerId]) -> int | None:
    """The version to rise to; None if it stays."""
    common = min(common_version(members, wanted), versions.LATEST)
    return common if common > now.version and not now.is_held else None


def what_holds_it(
    now: ClusterVersion, members: Mapping[ServerId, Member], wanted: Collection[ServerId], version: int
) -> str:
    """Why the cluster is not at `version` yet, for people; empty if it is."""
    if now.version >= version:
        return ""
    away = sorted(each for each in wanted if each not in members)
    old = sorted(each for each, member in members.items() if member.can < version)
    reasons = [f"{', '.join(old)} cannot do it yet"] if old else []
    if away:
        reasons.append(f"{', '.join(away)} hold replicas and are not up")
    if now.is_held:
        reasons.append("it is held (`kvstore cluster version --rise`)")
    return "; ".join(reasons) or "it rises within seconds"
