"""Describes how close a namespace is to its limits, from a server's report: text for commands and the dashboard.
Decides only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.proto import admin_pb2

FULL_SHARE = 0.9
"""Part of a quota from which on an operator should know: refusals come next."""
REFUSING_S = 60.0
"""A namespace counts as refusing if it has refused within this many seconds."""
KINDS = ("keys", "bytes", "operations")
"""The kinds of limits."""


def shares_of(space: admin_pb2.Namespace) -> dict[str, float]:
    """Return the used part of each quota that the namespace has."""
    limits = space.limits
    quotas = (("keys", space.keys, limits.keys_max), ("bytes", space.bytes, limits.bytes_max))
    return {quota: used / limit for quota, used, limit in quotas if limit}


def refusing(space: admin_pb2.Namespace) -> list[str]:
    """Return the kinds for which it has refused recently, in a fixed order."""
    return [kind for kind in KINDS if space.refused_ago_s.get(kind, REFUSING_S) < REFUSING_S]


def warning_of(space: admin_pb2.Namespace) -> str:
    """Describe the limits that a namespace is near or at; empty if there are none."""
    used = {"keys": (space.keys, space.limits.keys_max), "bytes": (space.bytes, space.limits.bytes_max)}
    full = [
        f"{share:.0%} of its {quota} are used ({used[quota][0]:,} of {used[quota][1]:,})"
        for quota, share in shares_of(space).items()
        if share >= FULL_SHARE
    ]
    refused = [
        f"it refuses for its {_named(kind)} ({space.refused.get(kind, 0):,} so far, the last "
        f"{space.refused_ago_s[kind]:.0f} s ago)"
        for kind in refusing(space)
    ]
    return ", ".join(full + refused)


def _named(kind: str) -> str:
    return "rate" if kind == "operations" else f"quota of {kind}"
