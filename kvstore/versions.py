"""Cluster versions: what all servers of a cluster can do (docs/protocol.md, Versions). Decides only.

A cluster version is an integer. Each version adds what servers may write into logs and send to each other. The cluster
version rises once every server supports the next one, and never falls. DO NOT CHANGE the meaning of a version after a
release has had it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

FIRST = 1
"""The version of a server that does not state its version."""
LATEST = 3
"""The version of this build. Version 2 adds: logs record the version they are written by, links carry more fields, and
leaders and endpoints enforce namespaces. Version 3 adds transactions over several partitions."""

RELEASES = {1: "0.1.0", 2: "0.2.0", 3: "0.2.0"}
"""The first release that supports each version."""

LINK_FIRST = 2
"""Link version at the first cluster version. Link version 1 had no proof of identity."""


def link_version(cluster_version: int) -> int:
    """Return the link version of a server that supports `cluster_version`. Both versions rise together."""
    return LINK_FIRST + cluster_version - FIRST


LINK_LATEST = link_version(LATEST)


def release_for(cluster_version: int) -> str:
    """Return the first release that supports a cluster version."""
    return RELEASES.get(cluster_version, "a later one")


def build_for(cluster_version: int, unknown: str = "") -> str:
    """Return what to install for a cluster version, as text for operators. `unknown` is the release for a version that
    this build does not know."""
    release = RELEASES.get(cluster_version, unknown)
    return f"kvstore {release} or later" if release else "a later release of kvstore"


class Versions(Protocol):
    """The cluster version that a server supports, and the last known version of its cluster."""

    @property
    def can(self) -> int: ...
    @property
    def cluster(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Constant versions, for a part that runs without a cluster."""

    can: int = LATEST
    cluster: int = FIRST


FIXED = Fixed()
