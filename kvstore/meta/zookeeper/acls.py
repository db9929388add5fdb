"""The ACLs of a whole tree in ZooKeeper: restrict it to one user, or open it to everyone, also while it is in use."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kazoo.security import ACL, CREATOR_ALL_ACL, OPEN_ACL_UNSAFE, READ_ACL_UNSAFE

from kvstore.errors import MetadataDenied, NoSuchNode
from kvstore.meta import paths
from kvstore.meta.login import Acl, MetadataLogin
from kvstore.meta.transfer import ZOOKEEPERS_OWN
from kvstore.meta.zookeeper.store import ZooKeeperStore

TOGETHER = 64
"""Number of nodes that are processed concurrently."""
PASSES_MAX = 5
_WORLD = "world"


@dataclass(slots=True)
class AclOutcome:
    """Counts of a tree after its ACLs were set."""

    nodes: int = 0
    """Number of nodes."""
    changed: int = 0
    """Number of nodes that had another ACL."""
    denied: list[str] = field(default_factory=list)
    """Nodes of other users, which our user may not change or not read."""


async def set_acls(store: ZooKeeperStore, acl: Acl) -> AclOutcome:
    """Set the ACL of the chroot and of every node below it. Repeat this until no node has another ACL, because a
    process that does not set ACLs yet may have created a node meanwhile.

    Parents come before their children, so that no new nodes are created below a restricted one. Raises MetadataDenied
    if nodes keep being created with another ACL, MetadataUnavailable, MetadataUnknown.
    """
    total = AclOutcome()
    for _ in range(PASSES_MAX):
        found = await _pass(store, acl)
        total = AclOutcome(found.nodes, total.changed + found.changed, found.denied)
        if not found.changed:
            return total
    raise MetadataDenied(
        f"after {PASSES_MAX} passes there are still new nodes with another ACL than {acl}: some process "
        "creates them so; set metadata.acl of every node first, and restart it"
    )


async def close_root(address: str, login: MetadataLogin) -> None:
    """Let other users read the root of a ZooKeeper but create nothing in it, because nodes beside a cluster's own
    use memory and disk of the same servers. `address` may have a chroot. Raises the errors of
    `ZooKeeperStore.connect`."""
    store = await ZooKeeperStore.connect(address.partition("/")[0], login=login)
    try:
        await store.set_acl("/", [*CREATOR_ALL_ACL, *READ_ACL_UNSAFE])
    finally:
        await store.close()


async def _pass(store: ZooKeeperStore, acl: Acl) -> AclOutcome:
    outcome = AclOutcome()
    left = ["/"]
    while left:
        batch, left = left[:TOGETHER], left[TOGETHER:]
        for children in await asyncio.gather(*(_set_one(store, path, acl, outcome) for path in batch)):
            left += children
    outcome.denied.sort()
    return outcome


async def _set_one(store: ZooKeeperStore, path: str, acl: Acl, outcome: AclOutcome) -> Sequence[str]:
    """Set the ACL of one node, and return the paths of its children."""
    try:
        if not _is(await store.acl(path), acl):
            await store.set_acl(path, OPEN_ACL_UNSAFE if acl is Acl.OPEN else CREATOR_ALL_ACL)
            outcome.changed += 1
        children = [paths.join(path, name) for name in await store.children(path)]
    except NoSuchNode:
        return ()
    except MetadataDenied:
        outcome.nodes += 1
        outcome.denied.append(path)
        return ()
    outcome.nodes += 1
    return [child for child in children if child != ZOOKEEPERS_OWN or store.has_chroot]


def _is(found: Sequence[ACL], acl: Acl) -> bool:
    is_open = any(each.id.scheme == _WORLD for each in found)
    return is_open if acl is Acl.OPEN else not is_open and len(found) > 0
