"""A session with etcd, kept alive for ever: a lease, renewed over one connection after another.

    LOST ── a lease, a watch ──► CONNECTED ── no answer, or a broken connection ──► SUSPENDED ──► CONNECTED
      ▲                              │                                                  │
      └────── the lease has gone ────┴──────────────────────────────────────────────────┘

The session is known in etcd by a key on its lease. Each connection puts that key anew before it is used, and each write
names the put that its connection has made: what an earlier connection has asked for and not learnt the outcome of is
done by then or never. So does ZooKeeper, which takes nothing from a connection once its session has moved to another.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from random import Random

from kvstore.backoff import delays
from kvstore.env.events import end_task, wait_within
from kvstore.env.liveness.port import UNWATCHED, Liveness
from kvstore.env.tls import Tls
from kvstore.errors import MetadataDenied, MetadataError, MetadataUnavailable
from kvstore.meta.etcd import values
from kvstore.meta.etcd.keys import Keys
from kvstore.meta.etcd.link import Link, Outdated
from kvstore.meta.etcd.plan import unchanged
from kvstore.meta.etcd.watches import Watches
from kvstore.meta.login import MetadataLogin
from kvstore.meta.memory_tree import ROOT
from kvstore.meta.store import SessionState
from kvstore.proto.etcd_pb2 import Compare, Event, PutRequest, RangeRequest, RequestOp, TxnRequest, WatchResponse
from kvstore.rpc.targets import places_of

log = logging.getLogger(__name__)

ATTACH_FIRST_S, ATTACH_MAX_S = 2.0, 16.0
"""For all that a new connection begins with. Then the next endpoint is tried, with twice the time: etcd may be slow
rather than away."""
OPEN_MAX_S = 4.0
"""For an endpoint to take a connection at all, which a slow one does at once."""
RENEWALS = 3
"""Of the lease, within its time."""
RETRY_FIRST_S, RETRY_MAX_S = 0.05, 0.7
CLOSE_TIMEOUT_S = 1.0


class Session:
    """One session after another, until closed. All is on the event loop, and so is `changed` called."""

    def __init__(
        self,
        endpoints: Sequence[str],
        timeout_s: int,
        *,
        tls: Tls | None,
        login: MetadataLogin | None,
        liveness: Liveness = UNWATCHED,
        keys: Keys,
        watches: Watches,
        changed: Callable[[SessionState], None],
    ) -> None:
        self.state = SessionState.LOST
        self.id = 0
        """The session's id, which is its lease's; 0 while LOST."""
        self.generation = 0
        """Number of connections so far."""
        self.link: Link | None = None
        """The connection to use; None unless CONNECTED."""
        self._endpoints, self._timeout_s, self._tls, self._login = endpoints, timeout_s, tls, login
        self._keys, self._watches, self._changed = keys, watches, changed
        self._is_closing = self._has_root = False
        self._patience_s = ATTACH_FIRST_S
        self._cluster = self._revision = 0
        """The id of the etcd that was seen first, and the latest revision that earlier connections have told of; 0 at
        first."""
        self._told_revision, self._is_trusted = 0, True
        """What the present connection has told, and whether that counts for later ones."""
        self.refused = asyncio.Event()
        """Set once etcd has refused the login or its user."""
        self.trouble = ""
        """Why the last connection ended or none came about; logged when it changes, not at each attempt."""
        self._liveness = liveness
        self._given_up = 0
        """The last lease that the watchdog has revoked. Set on its thread."""
        self._forget = liveness.add_session(self.give_up)
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(), name="metadata session")

    def break_connection(self, link: Link, why: str) -> None:
        """Give up a connection; the next one follows by itself."""
        if not link.broken.is_set():
            log.warning("metadata connection broken session=%x: %s", link.session, why)
            link.give_up()

    def trust(self, is_trusted: bool) -> None:
        """Say whether the present connection's revisions count for later connections."""
        self._is_trusted = is_trusted

    # docs/protocol.md P45
    def give_up(self) -> bool:
        """Revoke the lease because the process does not work; for the watchdog's thread, while the event loop may stand
        still. Returns True: no renewal begins while the evidence fails, so the lease expires in any case."""
        lease, link = self.id, self.link
        if lease and link is not None and lease != self._given_up:
            self._given_up = lease
            threading.Thread(target=link.revoke_at_once, args=(lease,), name="give up session", daemon=True).start()
        return True

    async def close(self) -> None:
        """End the session. Does not wait long for etcd: the lease expires in any case."""
        link, lease = self.link, self.id
        self._forget()
        self._become(SessionState.LOST)
        self._is_closing = True
        if link is not None and lease:
            with suppress(MetadataError, Outdated, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await link.revoke(lease)
        await end_task(self._task)

    async def _run(self) -> None:
        luck = Random()
        place = luck.randrange(len(self._endpoints))
        pauses = delays(luck, first_s=RETRY_FIRST_S, cap_s=RETRY_MAX_S)
        while not self._is_closing:
            if self._liveness.failure:
                self._become(SessionState.LOST)
                await asyncio.sleep(RETRY_MAX_S)
                continue
            try:
                if await self._connected(self._endpoints[place]):
                    pauses = delays(luck, first_s=RETRY_FIRST_S, cap_s=RETRY_MAX_S)
            except OSError as error:  # of the TLS files, or of the endpoint's name
                self._note(str(error))
            except Exception:  # the root of a task without which the store would be away for ever
                log.exception("metadata session: an error that nobody expected; connecting again")
            place = (place + 1) % len(self._endpoints)
            await asyncio.sleep(next(pauses))

    async def _connected(self, endpoint: str) -> bool:
        """One connection, from its beginning to its end; False if nothing became of it."""
        places = await places_of(endpoint)
        link, was_connected = Link(endpoint, self._tls, self._login, places), False
        self._told_revision, self._is_trusted = 0, True
        try:
            async with asyncio.timeout(min(self._patience_s, OPEN_MAX_S)):
                await link.opened()
            async with asyncio.timeout(self._patience_s):
                await link.log_in()
                revision = await self._attach(link)
            was_connected, self.link, self.trouble = True, link, ""
            self.generation += 1
            self._become(SessionState.CONNECTED, link.session)
            self._watches.call_all()
            await self._hold(link, revision)
        except MetadataDenied as error:
            self._note(f"endpoint={endpoint}: {error}")
            self.refused.set()
        except (MetadataError, Outdated, TimeoutError) as error:
            self._note(f"endpoint={endpoint}: {str(error) or 'no answer in time'}")
        finally:
            self.link = None
            if self._is_trusted:
                self._revision = max(self._revision, self._told_revision)
            if self.state is SessionState.CONNECTED:
                self._become(SessionState.SUSPENDED, self.id)
            await link.close()
            self._patience_s = ATTACH_FIRST_S if was_connected else min(2 * self._patience_s, ATTACH_MAX_S)
        return was_connected

    def _note(self, trouble: str) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            log.warning("no metadata connection %s", trouble)

    async def _attach(self, link: Link) -> int:
        """Make the session this connection's, and return the revision by which it is."""
        await self._refuse_older(link)
        if self.id and not await link.keep_alive(self.id):
            self._become(SessionState.LOST)
        link.session = self.id or await link.grant(self._timeout_s)
        if not self._has_root:
            root = self._keys.key("/")
            put = RequestOp(request_put=PutRequest(key=root, value=values.encode(ROOT)))
            await link.txn(TxnRequest(compare=[unchanged(root, None)], success=[put]))
            self._has_root = True
        own = self._keys.session(link.session)
        put = RequestOp(request_put=PutRequest(key=own, lease=link.session))
        revision = (await link.txn(TxnRequest(success=[put]))).header.revision
        link.guard = Compare(key=own, target=Compare.MOD, mod_revision=revision)
        self._told_revision = revision
        return revision

    # docs/protocol.md B29
    async def _refuse_older(self, link: Link) -> None:
        """Raise MetadataUnavailable if this is not the etcd that was seen before, or an older copy of it: before
        anything is written to it, or the session taken for expired."""
        found = (await link.range(RangeRequest(key=self._keys.key("/"), keys_only=True))).header
        if self._cluster not in (0, found.cluster_id):
            raise MetadataUnavailable(f"this etcd has the cluster id {found.cluster_id:x}, want {self._cluster:x}")
        if found.revision < self._revision:
            raise MetadataUnavailable(
                f"this etcd is an older copy of itself: its revision is {found.revision}, {self._revision} was seen "
                "(docs/how-to/back-up-and-restore-metadata.md)"
            )
        self._cluster = found.cluster_id

    async def _hold(self, link: Link, revision: int) -> None:
        """Renew the lease and follow the changes until the connection breaks or the session ends."""
        following = self._loop.create_task(self._follow(link, revision + 1), name="metadata watch")
        period_s = self._timeout_s / RENEWALS
        try:
            while not await wait_within(link.broken, period_s) and not self._liveness.failure:
                async with asyncio.timeout(period_s):
                    is_alive = await link.keep_alive(link.session)
                if not is_alive:
                    self._become(SessionState.LOST)
                    return
        finally:
            await end_task(following)

    async def _follow(self, link: Link, revision: int) -> None:
        """Tell the watches of every change from that revision on. A stream of etcd's that ends is begun again where it
        was; what it does not keep so far back any more may have been of any node."""
        try:
            while not link.broken.is_set():
                async with aclosing(link.watch(self._keys.everything(), revision)) as answers:
                    async for answer in answers:
                        revision = self._told(link, answer, revision)
                        if answer.canceled:
                            break
                await asyncio.sleep(RETRY_FIRST_S)
        except (MetadataError, Outdated) as error:
            self._note(f"endpoint={link.endpoint}, its watch: {error}")
        finally:
            link.give_up()

    def _told(self, link: Link, answer: WatchResponse, revision: int) -> int:
        """The revision to go on from."""
        if answer.compact_revision:
            log.info("metadata watch revision=%d: compacted, all is read anew", revision)
            self._watches.call_all()
            return max(revision, answer.compact_revision)
        if answer.canceled:
            raise MetadataUnavailable(f"etcd has ended it: {answer.cancel_reason}")
        for event in answer.events:
            if event.type == Event.DELETE and event.kv.key == link.guard.key:
                self._become(SessionState.LOST)
                link.give_up()
            self._watches.on_event(event)
            revision = event.kv.mod_revision  # and not the next: it may have more events, in another message
            self._told_revision = max(self._told_revision, revision)
        return revision

    def _become(self, state: SessionState, session: int = 0) -> None:
        if self._is_closing or (state, session) == (self.state, self.id):
            return
        log.info("metadata session state=%s session=%x", state.name, session or self.id)
        self.state, self.id = state, session
        self._changed(state)
