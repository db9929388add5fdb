"""The client's connections: which ones exist, which may be used, and which one an operation takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from kvstore.client.aio.connections import AnyAnswers
from kvstore.client.aio.link import AsyncLink, LinkState
from kvstore.client.core import forks
from kvstore.client.core.address_backoff import AddressBackoff
from kvstore.client.core.config import ClientConfig
from kvstore.client.core.login_refusals import LoginRefusals
from kvstore.client.core.operation import ClientOperation
from kvstore.client.core.routing import Routing
from kvstore.client.core.stream_endpoints import StreamEndpoints
from kvstore.client.core.values import Level
from kvstore.env.library_env import LibraryEnv
from kvstore.env.ports import Transport
from kvstore.errors import ConfigError, NotAuthenticated

logger = logging.getLogger(__name__)


class AsyncLinks:
    """At most one link per address. A broken link is replaced when it is needed again, after a backoff."""

    def __init__(
        self,
        env: LibraryEnv,
        config: ClientConfig,
        routing: Routing,
        transport: Transport,
        *,
        changed: Callable[[], None],
        on_answers: Callable[[AnyAnswers], None],
        tokens: dict[str, int],
    ) -> None:
        self._env, self._config, self._routing = env, config, routing
        self._changed, self._on_answers_received, self._tokens = changed, on_answers, tokens
        self._transport, self._stream_endpoints = transport, StreamEndpoints(routing)
        self._links: dict[str, AsyncLink] = {}
        self._backoff = AddressBackoff()
        self._refusals = LoginRefusals()
        self.direct: dict[str, AsyncLink] = {}
        """Links to leaders by partition, while they are up: the fast path."""
        self._favourite = env.random.randrange(1 << 16)
        self.breaks = 0
        self._frames_gone = 0
        self._closed = False

    def forget_routes(self) -> None:
        """Forget which link leads to which leader, because the leaders may have changed."""
        self.direct.clear()

    def choose(self, operation: ClientOperation) -> AsyncLink | None:
        """Return a link for an operation: the link to its best server if that is up, else to any server, which forwards
        it.

        A link that is not up is connected meanwhile. None: no server can be reached now.
        """
        connecting = None
        for address in self._candidates(operation):
            link = self.open(address)
            if link is None:
                continue
            if link.state is LinkState.UP:
                self._remember(operation, address, link)
                return link
            connecting = connecting or link
        return connecting

    def open(self, address: str) -> AsyncLink | None:
        """Return the link to an address, connecting or up; None during the address's backoff."""
        link = self._links.get(address)
        if link is not None:
            return link
        if self._closed or self._backoff.is_backing_off(address, self._env.clock.now()):
            return None
        try:
            link = AsyncLink(
                address,
                self._env,
                self._config,
                self._routing,
                self._tokens,
                self._transport,
                self._stream_endpoints,
                changed=self._on_change,
                on_answers=self._on_answers_received,
            )
        except (OSError, ConfigError) as error:
            if not self._routing.is_known:
                raise  # the caller that opens the client gets the error
            logger.warning("cannot connect address=%s reason=%s", address, error)  # files that are being replaced
            self._backoff.note_failure(address, self._env.clock.now())
            return None
        self._links[address] = link
        return link

    def login_error_or_none(self, *, is_late: bool) -> NotAuthenticated | None:
        """Return the login error if no server is connected and all have rejected the login; when late, if one of them
        has."""
        if any(link.state is LinkState.UP for link in self._links.values()):
            return None
        why = self._refusals.error_or_none(self.addresses(), is_late=is_late)
        # A new object for each caller: an exception that is raised repeatedly keeps the frames of all its callers.
        return None if why is None else type(why)(*why.args)

    def all(self) -> list[AsyncLink]:
        return [link for _, link in sorted(self._links.items())]

    def addresses(self) -> list[str]:
        """Return all known addresses, the configured ones first."""
        return self._routing.everybody(self._config.endpoints)

    @property
    def frames(self) -> int:
        """Number of frames that were sent, including those on former links."""
        return self._frames_gone + sum(link.frames for link in self._links.values())

    def close(self) -> None:
        self._closed = True
        for link in self.all():
            link.disconnect("the client is closed")

    def after_fork_in_child(self) -> None:
        """In the child of a fork, use and end no link, because ending one would end the parent's. The links are kept
        referenced."""
        self._closed = True
        forks.keep(*self._links.values())
        self._links = {}
        self.direct.clear()

    def _candidates(self, operation: ClientOperation) -> Iterator[str]:
        may_follow = operation.is_read and operation.level in (Level.SESSION, Level.STALE)
        turn = self._favourite + operation.retries
        return self._routing.candidates(operation.partition, self._config.endpoints, follow=may_follow, turn=turn)

    def _remember(self, operation: ClientOperation, address: str, link: AsyncLink) -> None:
        if address == self._routing.leader_of(operation.partition):
            self.direct[operation.partition] = link

    def _on_change(self, link: AsyncLink) -> None:
        self.direct.clear()
        if link.state is LinkState.DOWN:
            self.breaks += 1
            if self._links.get(link.address) is link:
                del self._links[link.address]
                self._frames_gone += link.frames
            self._backoff.note_failure(link.address, self._env.clock.now())
        else:
            self._backoff.reset(link.address)
        self._refusals.record(link.address, None)  # the last answer counts, because the client may live for days
        self._refusals.record(link.address, link.login_error)
        self._changed()
