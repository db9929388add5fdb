"""Keeps this server's znode in place: over lost sessions, from `publish` until `withdraw`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from kvstore.env.ports import Nursery
from kvstore.errors import MetadataError, NodeExists, UndecodableNode
from kvstore.meta import paths
from kvstore.meta.ephemeral import KeptEphemeral
from kvstore.meta.store import MetadataStore
from kvstore.server.cluster.topology import Member
from kvstore.types import ServerId

log = logging.getLogger(__name__)


class Announcement:
    """Tells the cluster about this server. Errors are logged: the znode is kept up meanwhile."""

    def __init__(self, store: MetadataStore, member: Member) -> None:
        self.member = member
        self.on_placed: Callable[[], None] = lambda: None
        """Called each time that the znode has come to say what it should: it is registered from then on."""
        self._is_placed = asyncio.Event()
        self._kept = KeptEphemeral(
            store,
            paths.server(ServerId(member.id)),
            is_our_former=self._is_our_former,
            on_placed=self._note_placed,
        )

    # docs/protocol.md H12
    async def publish(self, nursery: Nursery) -> None:
        """Let the cluster know of this server, now or as soon as that can be (`on_placed`). Where another process has
        its place it returns when that one is gone: a second one of the same id would take its replicas' places."""
        self._kept.start(nursery)
        try:
            await self._kept.publish(self.member.encode())
        except NodeExists:
            log.warning("another process announces itself as server=%s; waiting until it is gone", self.member.id)
            await self._is_placed.wait()
            log.info("server=%s is announced", self.member.id)
        except MetadataError as error:
            log.warning("server=%s is not announced yet: %s", self.member.id, error)

    def _note_placed(self) -> None:
        self._is_placed.set()
        self.on_placed()

    # docs/protocol.md V1
    async def announce_up(self) -> None:
        """Let the cluster know that this server has started."""
        self.member = replace(self.member, starting=False)
        try:
            await self._kept.publish(self.member.encode())
        except MetadataError as error:
            log.info("that server=%s is up is not announced yet: %s", self.member.id, error)

    async def announce_draining(self, is_draining: bool) -> None:
        """Let the cluster know whether this server takes no replicas any more."""
        self.member = replace(self.member, draining=is_draining)
        try:
            await self._kept.publish(self.member.encode())
        except MetadataError as error:
            log.warning("that server=%s drains, or not, is not announced yet: %s", self.member.id, error)

    async def withdraw(self) -> None:
        """Let the cluster know that this server is leaving; the session's end does it too."""
        try:
            await self._kept.publish(None)
        except MetadataError as error:
            log.warning("server=%s could not be withdrawn: %s", self.member.id, error)

    def _is_our_former(self, data: bytes) -> bool:
        """Whether a znode is of a process that is gone, because it names this server at this address, where this
        process listens."""
        try:
            former = Member.decode(data)
        except UndecodableNode:
            return True
        return (former.id, former.resp) == (self.member.id, self.member.resp)
