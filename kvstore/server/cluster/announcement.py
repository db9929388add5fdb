"""Maintains this server's znode across lost sessions, from `publish` until `withdraw`."""

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
    """Registers this server in the cluster. Errors are logged, and registration is retried in the background."""

    def __init__(self, store: MetadataStore, member: Member) -> None:
        self.member = member
        self.on_placed: Callable[[], None] = lambda: None
        """Called each time the znode has received its intended content. The server is registered from then on."""
        self._is_placed = asyncio.Event()
        self._kept = KeptEphemeral(
            store,
            paths.server(ServerId(member.id)),
            is_our_former=self._is_our_former,
            on_placed=self._note_placed,
        )

    # docs/protocol.md H12
    async def publish(self, nursery: Nursery) -> None:
        """Register this server. If registration is not possible yet, it is retried, and `on_placed` is called when
        it succeeds. If another process holds the znode, wait until that process is gone, because a second process
        with the same id would take over its replicas."""
        self._kept.start(nursery)
        try:
            await self._kept.publish(self.member.encode())
        except NodeExists:
            log.warning("another process is registered as server=%s, waiting until it is gone", self.member.id)
            await self._is_placed.wait()
            log.info("server=%s is registered", self.member.id)
        except MetadataError as error:
            log.warning("server=%s is not registered yet: %s", self.member.id, error)

    def _note_placed(self) -> None:
        self._is_placed.set()
        self.on_placed()

    # docs/protocol.md V1
    async def announce_up(self) -> None:
        """Publish that this server has started."""
        self.member = replace(self.member, starting=False)
        try:
            await self._kept.publish(self.member.encode())
        except MetadataError as error:
            log.info("could not announce yet that server=%s has started: %s", self.member.id, error)

    async def announce_draining(self, is_draining: bool) -> None:
        """Publish whether this server is draining. A draining server gets no more replicas."""
        self.member = replace(self.member, draining=is_draining)
        try:
            await self._kept.publish(self.member.encode())
        except MetadataError as error:
            log.warning("could not announce yet whether server=%s is draining: %s", self.member.id, error)

    async def withdraw(self) -> None:
        """Remove this server's registration. The end of the session also does that."""
        try:
            await self._kept.publish(None)
        except MetadataError as error:
            log.warning("could not remove the registration of server=%s: %s", self.member.id, error)

    def _is_our_former(self, data: bytes) -> bool:
        """Return True if a znode belongs to a dead process: the znode names this server with this address, and now
        this process listens there."""
        try:
            former = Member.decode(data)
        except UndecodableNode:
            return True
        return (former.id, former.resp) == (self.member.id, self.member.resp)
