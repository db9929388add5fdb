"""The versions of a cluster: what all of its nodes can do together (docs/protocol.md, Versions). Decides only.

A cluster version is a whole number. Each raises what servers may write into logs and say to each other; it rises once
every server can do it, and never falls. DO NOT CHANGE what a version stands for once a release has had it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

FIRST = 1
"""What a server can do that says nothing about it."""
LATEST = 2
"""What this build can do. In 2, logs say by which version they are written, links take more fields,
and leaders and doors hold what namespaces may."""

RELEASES = {1: "0.1.0", 2: "0.2.0"}
"""The first release that can do each."""

LINK_FIRST = 2
"""Of a link between servers, at the first cluster version. In 1 nobody had to prove anything."""


def link_version(cluster_version: int) -> int:
    """Say which version of the link a server speaks that can do `cluster_version`: both rise together."""
    return LINK_FIRST + cluster_version - FIRST


LINK_LATEST = link_version(LATEST)


def release_for(cluster_version: int, unknown: str = "") -> str:
    """Name the release to install for a cluster version; `told`: what is said of one that this build does not know."""
    return RELEASES.get(cluster_version, unknown) or "a later one"


class Versions(Protocol):
    """The cluster version that a server can do, and the one that its cluster is at as far as it knows."""

    @property
    def can(self) -> int: ...
    @property
    def cluster(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Versions that do not change: of a part that stands alone."""

    can: int = LATEST
    cluster: int = FIRST


FIXED = Fixed()
