"""Changes the leader's znode as the role machine decides. The changes are made one at a time and in order, so that a
claim never overtakes a resignation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore.errors import MetadataError, StoreError
from kvstore.partition.election import role_events
from kvstore.partition.election.leader_znode import Claims
from kvstore.partition.election.ranking import RANK_DELAY_S, LeaderRecord
from kvstore.partition.election.role_events import Command, Event
from kvstore.partition.state.state import ReplicaState
from kvstore.types import ServerId

log = logging.getLogger(__name__)

PENDING_MAX = 64
TWIN_DELAY_MAX_S = 5.0
"""Maximum seconds between two removals of a znode with this server's name and another process's nonce. A former process
leaves at most one. More come from a live process on another machine that was given the same id: it claims again each
time."""


class Claiming:
    """Claims the leader's znode for one replica. `feed` receives the outcome of each claim. `reread` is set when the
    znode must be read again."""

    def __init__(
        self,
        claims: Claims,
        state: ReplicaState,
        server: ServerId,
        nonce: str,
        *,
        feed: Callable[[Event], None],
        reread: asyncio.Event,
        is_stopped: Callable[[], bool],
    ) -> None:
        self.claimed = LeaderRecord(server, 0, nonce)
        """The record of the last claim."""
        self._claims, self._state, self._server, self._nonce = claims, state, server, nonce
        self._feed, self._reread, self._is_stopped = feed, reread, is_stopped
        self._commands: asyncio.Queue[Command] = asyncio.Queue(PENDING_MAX)
        self._own_removed = 0
        """Number of znodes with this server's name that were removed."""
        self._changing = asyncio.Lock()
        """Held while the leader's znode is changed."""

    def enqueue(self, command: Command) -> None:
        """Queue a command. It is carried out after all earlier commands."""
        if self._commands.full():
            self._reread.set()  # nothing is lost: the next read of the znode decides again
        else:
            self._commands.put_nowait(command)

    async def run(self) -> None:
        """Carry out commands until the replica stops."""
        while True:
            command = await self._commands.get()
            try:
                async with self._changing:
                    if not self._is_stopped():
                        await self._change(command)
                await self._pause_after(command)
            except StoreError as error:
                log.info("partition=%s %s: %r", self._state.partition, command, error)
                if isinstance(command, role_events.Claim | role_events.ReplaceLeader):
                    self._feed(role_events.NotClaimed())
                await asyncio.sleep(RANK_DELAY_S)
                self._reread.set()

    async def _pause_after(self, command: Command) -> None:
        if isinstance(command, role_events.RemoveStale) and command.record.server == self._server:
            self._own_removed += 1
            if self._own_removed > 1:
                await asyncio.sleep(min(RANK_DELAY_S * (1 << min(self._own_removed, 8)), TWIN_DELAY_MAX_S))

    async def resign(self) -> None:
        """Remove this replica's leader znode after the replica has stopped. A claim in progress finishes first;
        otherwise its znode would remain for as long as the session."""
        async with self._changing:
            try:
                await self._claims.release(self.claimed)
            except MetadataError as error:
                log.info("partition=%s leader znode not removed: %s", self._state.partition, error)

    async def withdraw(self) -> None:
        """Remove this replica from the leader's znode and from the published progress, after it has stopped. Raises
        MetadataError if either may remain."""
        await self._claims.withdraw(self.claimed)

    async def _change(self, command: Command) -> None:
        match command:
            case role_events.Claim():
                self.claimed = LeaderRecord(self._server, self._state.epoch, self._nonce)
                won = await self._claims.claim(self.claimed)
                self._feed(role_events.Claimed() if won else role_events.NotClaimed())
            case role_events.ReplaceLeader(term=term):
                self.claimed = LeaderRecord(self._server, self._state.epoch, self._nonce)
                won = await self._claims.replace_leader(term, self.claimed)
                self._feed(role_events.Claimed() if won else role_events.NotClaimed())
            case role_events.RemoveStale(record):
                await self._claims.remove_stale(record)
                self._reread.set()
            case role_events.Resign():
                await self._claims.release(self.claimed)
                self._reread.set()
