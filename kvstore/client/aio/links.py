"""The client's connections: which there are, which may be used, and which one an operation takes."""

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
    """At most one link per address. A broken one is replaced when somebody needs it, after a rest."""

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
        self._rests = AddressBackoff()
        self._refusals = LoginRefusals()
        self.direct: dict[str, AsyncLink] = {}
        """Partition → the link to its leader, while that is up: the fast way."""
        self._favourite = env.random.randrange(1 << 16)
        self.breaks = 0
        self._frames_gone = 0
        self._closed = False

    def forget_routes(self) -> None:
        """Look the routes up again, because other leaders are known now."""
        self.direct.clear()

    def choose(self, operation: ClientOperation) -> AsyncLink | None:
        """A link for an operation: to whom it should go if that link is up, else to anybody, who forwards it.

        A link that is not up is connected meanwhile. None: nobody can be reached now.
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
        """The link to an address, connecting or up; None while the address is left alone."""
        link = self._links.get(address)
        if link is not None:
            return link
        if self._closed or self._rests.is_left_alone(address, self._env.clock.now()):
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
                raise  # whoever opens the client is told
            logger.warning("no connection can be made address=%s why=%s", address, error)  # files that are replaced now
            self._rests.broke(address, self._env.clock.now())
            return None
        self._links[address] = link
        return link

    def login_error_or_none(self, *, is_late: bool) -> NotAuthenticated | None:
        """Why nobody answers, if no server is connected and all do not know who asks; once it is late, if one of them
        does not."""
        if any(link.state is LinkState.UP for link in self._links.values()):
            return None
        why = self._refusals.error_or_none(self.addresses(), is_late=is_late)
        # Another object for each caller: one that is raised again and again keeps the frames of all who caught it.
        return None if why is None else type(why)(*why.args)

    def all(self) -> list[AsyncLink]:
        return [link for _, link in sorted(self._links.items())]

    def addresses(self) -> list[str]:
        """Everybody known, the configured ones first."""
        return self._routing.everybody(self._config.endpoints)

    @property
    def frames(self) -> int:
        """How many were sent, those on links that are gone among them."""
        return self._frames_gone + sum(link.frames for link in self._links.values())

    def close(self) -> None:
        self._closed = True
        for link in self.all():
            link.disconnect("the client is closed")

    def after_fork_in_child(self) -> None:
        """In the child of a fork: no link is used or ended here. They are kept: to end one would end the parent's."""
        self._closed = True
        forks.keep(*self._links.values())
        self._links = {}
        self.direct.clear()

    def _candidates(self, operation: ClientOperation) -> Iterator[str]:
        may_follow = operation.is_read and operation.level in (Level.SESSION, Level.STALE)
        return self._routing.candidates(
            operation.partition, self._config.endpoints, follow=may_follow, turn=self._favourite
        )

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
            self._rests.broke(link.address, self._env.clock.now())
        else:
            self._rests.held(link.address)
        self._refusals.record(link.address, None)  # what it said last counts, since this may go on for days
        self._refusals.record(link.address, link.login_error)
        self._changed()
