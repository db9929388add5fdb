"""The election of the auditor in the metadata store, in Apache BookKeeper's layout. Each candidate has one ephemeral
sequential node, and the candidate with the lowest number is the auditor. Apache's auditors and ours take part in the
same election."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

from kvstore.errors import Corrupted, NoSuchNode, UndecodableNode, VersionConflict
from kvstore.meta import marks, paths
from kvstore.meta.layout import get_unless_closed
from kvstore.meta.store import MetadataStore, SessionState, Watch, ensure_path
from kvstore.meta.update import until_known

_VOTE = re.compile(r"V_(-?\d{10})")


class AuditorVotes:
    """One candidate of the auditor election. Calls raise MetadataUnavailable or MetadataUnknown."""

    def __init__(self, store: MetadataStore, candidate: str) -> None:
        self._store, self._candidate = store, candidate
        self._own, self._voted_in = "", 0
        self._elected_in = 0

    # docs/protocol.md A4
    @property
    def is_auditor(self) -> bool:
        """True if this candidate had the lowest vote when the votes were last read, and its session is not known to
        have ended.

        False while the connection is lost: the session may have ended, and another candidate may be the auditor.
        """
        is_connected = self._store.state is SessionState.CONNECTED
        return is_connected and 0 != self._elected_in == self._store.session

    async def stand(self) -> bool:
        """Become a candidate if this session has no vote yet. Returns True if this session's vote is the lowest, so
        that this candidate is the auditor."""
        session = self._store.session
        votes = await until_known(self._votes)
        if session != self._voted_in or self._own not in votes:
            self._own = await self._vote_once()
            self._voted_in = session
            votes = await until_known(self._votes)
        is_lowest = bool(votes) and self._own == votes[0] and self._store.session == session
        if is_lowest and self._elected_in != session:
            await self._publish_name()
        self._elected_in = session if is_lowest else 0
        return is_lowest

    async def withdraw(self) -> None:
        """Withdraw from the election, so that the next candidate becomes the auditor."""
        self._elected_in = 0
        for name in await self._own_votes():
            with suppress(NoSuchNode):
                await self._store.delete(paths.join(paths.AUDITOR_VOTES, name), -1)

    def watch(self, changed: Callable[[], None]) -> Watch:
        """Call `changed` soon after the candidates may have changed."""
        return self._store.watch(paths.AUDITOR_VOTES, changed)

    async def _vote_once(self) -> str:
        """Return the name of this session's lowest vote, and delete its other votes. A session has two votes if the
        answer to the first create was lost."""
        own = await self._own_votes()
        if not own:
            await until_known(self._vote)
            own = await self._own_votes()
        for name in own[1:]:
            with suppress(NoSuchNode):
                await self._store.delete(paths.join(paths.AUDITOR_VOTES, name), -1)
        return own[0] if own else ""

    async def _own_votes(self) -> list[str]:
        return [name for name in await until_known(self._votes) if await self._is_own(name)]

    async def _vote(self) -> None:
        vote = paths.join(paths.AUDITOR_VOTES, "V_")
        data = marks.encode_vote(self._candidate)
        try:
            await self._store.create(vote, data, ephemeral=True, sequential=True)
        except NoSuchNode:
            await ensure_path(self._store, paths.AUDITOR_VOTES)
            await self._store.create(vote, data, ephemeral=True, sequential=True)

    async def _votes(self) -> list[str]:
        return await votes_of(self._store)

    async def _is_own(self, name: str) -> bool:
        try:
            _, stat = await get_unless_closed(self._store, paths.join(paths.AUDITOR_VOTES, name))
        except (NoSuchNode, UndecodableNode):
            return False
        return stat.owner == self._store.session

    async def _publish_name(self) -> None:
        """Also write this candidate's name into the parent node, because tools read the auditor's name there."""
        with suppress(NoSuchNode, VersionConflict):
            data, stat = await self._store.get(paths.AUDITOR_VOTES)
            if data != marks.encode_vote(self._candidate):
                await self._store.set(paths.AUDITOR_VOTES, marks.encode_vote(self._candidate), stat.version)


async def votes_of(store: MetadataStore) -> list[str]:
    """Return the names of all votes, lowest first."""
    await store.sync(paths.AUDITOR_VOTES)
    try:
        names = await store.children(paths.AUDITOR_VOTES)
    except NoSuchNode:
        return []
    return sorted((name for name in names if _VOTE.fullmatch(name)), key=lambda name: int(name.removeprefix("V_")))


async def auditor_or_none(store: MetadataStore) -> str | None:
    """Return the name of the auditor, or None if there is no candidate."""
    for name in await votes_of(store):
        path = paths.join(paths.AUDITOR_VOTES, name)
        with suppress(NoSuchNode):
            try:
                data, _ = await get_unless_closed(store, path)
                return marks.decode_vote(data, what=path)
            except Corrupted:
                return name
    return None
