"""Regularly checks whether the node has lost parts of its cluster, and logs the events that outages.py reports."""

from __future__ import annotations

import logging
from typing import Protocol

from kvstore.env import Env
from kvstore.meta.bookies import BookieView
from kvstore.meta.store import MetadataStore
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.config import NodeConfig
from kvstore.server.status.outages import ClusterView, Outages
from kvstore.types import PartitionId
from kvstore.wal.placement import machine_count

log = logging.getLogger(__name__)

CHECK_S = 1.0


class WatchedNode(Protocol):
    """The node. Implemented by kvstore.server.app.Node."""

    @property
    def config(self) -> NodeConfig: ...
    @property
    def store(self) -> MetadataStore: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def is_draining(self) -> bool: ...
    @property
    def topology(self) -> ClusterTopology: ...
    def leaderless(self) -> list[PartitionId]: ...


class OutageWatch:
    """Watches for outages from the point of view of one server."""

    def __init__(self, env: Env, node: WatchedNode, view: BookieView) -> None:
        self._env, self._node, self._view = env, node, view
        self._outages = Outages()
        self._nursery = env.nursery.child("outages")

    def start(self) -> None:
        self._nursery.spawn(self._poll(), name="poll")

    async def close(self) -> None:
        await self._nursery.close()

    async def _poll(self) -> None:
        while True:
            await self._env.beat.pause(CHECK_S)
            if self._node.is_open and not self._node.is_draining:
                self.poll()

    def poll(self) -> None:
        """Check once, and log the events."""
        for news in self._outages.poll(self._env.clock.now(), self._sight()):
            log.log(logging.WARNING if news.is_loss else logging.INFO, news.message, *news.arguments)

    def _sight(self) -> ClusterView:
        node, bookies = self._node, self._view.current
        topology = node.topology
        return ClusterView(
            metadata=node.store.state.name.lower(),
            writable=machine_count(bookies.writable),
            readonly=machine_count(bookies.readonly),
            ack=node.config.log.quorum.ack,
            leaders={partition: leader for partition, (leader, _) in topology.leaders.items()},
            leaderless=node.leaderless(),
            servers=frozenset(topology.servers),
        )
