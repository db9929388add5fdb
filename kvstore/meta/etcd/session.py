"""A session with etcd, kept alive forever: a lease, renewed over one connection after another.

    LOST ── a lease, a watch ──► CONNECTED ── no answer, or a broken connection ──► SUSPENDED ──► CONNECTED
      ▲                              │                                                  │
      └────── the lease has gone ────┴──────────────────────────────────────────────────┘

A key on its lease identifies the session in etcd. Each connection puts that key again before it is used, and each write
has the condition that the put of its connection is the latest. So a write of an earlier connection with an unknown
outcome is done by then or never. ZooKeeper does the same: it accepts nothing from a connection once its session has
moved to another one.
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
from kvstore.meta.etcd.keys import EtcdKeys
from kvstore.meta.etcd.link import EtcdLink, Outdated
from kvstore.meta.etcd.plan import unchanged
from kvstore.meta.etcd.watches import EtcdWatches
from kvstore.meta.login import MetadataLogin
from kvstore.meta.memory_tree import ROOT
from kvstore.meta.store import SessionState
from kvstore.proto.etcd_pb2 import Compare, Event, PutRequest, RangeRequest, RequestOp, TxnRequest, WatchResponse
from kvstore.rpc.targets import places_of

log = logging.getLogger(__name__)

ATTACH_FIRST_S, ATTACH_MAX_S = 2.0, 16.0
"""Time for all first requests of a new connection, in seconds. Then the next endpoint is tried, with twice the time,
because etcd may be slow rather than away."""
OPEN_MAX_S = 4.0
"""Time for an endpoint to accept a connection, in seconds. A slow endpoint accepts at once."""
RENEWALS = 3
"""Renewals of the lease within its time."""
RETRY_FIRST_S, RETRY_MAX_S = 0.05, 0.7
CLOSE_TIMEOUT_S = 1.0


class EtcdSession:
    """One session after another, until closed. Everything runs on the event loop, also `changed`."""

    def __init__(
        self,
        endpoints: Sequence[str],
        timeout_s: int,
        *,
        tls: Tls | None,
        login: MetadataLogin | None,
        liveness: Liveness = UNWATCHED,
        keys: EtcdKeys,
        watches: EtcdWatches,
        changed: Callable[[SessionState], None],
    ) -> None:
        self.state = SessionState.LOST
        self.id = 0
        """Id of the session, which is the id of its lease; 0 while LOST."""
        self.generation = 0
        """Number of connections so far."""
        self.link: EtcdLink | None = None
        """The connection to use; None unless CONNECTED."""
        self._endpoints, self._timeout_s, self._tls, self._login = endpoints, timeout_s, tls, login
        self._keys, self._watches, self._changed = keys, watches, changed
        self._is_closing = self._has_root = False
        self._patience_s = ATTACH_FIRST_S
        self._cluster = self._revision = 0
        """Id of the etcd cluster that was seen first, and the highest revision that earlier connections have seen; 0 at
        first."""
        self._seen_revision, self._is_trusted = 0, True
        """Revision that the present connection has seen, and whether it counts for later connections."""
        self.refused = asyncio.Event()
        """Set once etcd has refused the login or its user."""
        self.trouble = ""
        """Reason why the last connection ended or could not be opened; logged when it changes, not at each attempt."""
        self._liveness = liveness
        self._given_up = 0
        """The last lease that the watchdog has revoked. Set on its thread."""
        self._forget = liveness.add_session(self.give_up)
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(), name="metadata session")

    def break_connection(self, link: EtcdLink, why: str) -> None:
        """Abandon a connection. The next one follows by itself."""
        if not link.broken.is_set():
            log.warning("metadata connection broken session=%x: %s", link.session, why)
            link.give_up()

    def trust(self, is_trusted: bool) -> None:
        """Record whether the present connection's revisions count for later connections."""
        self._is_trusted = is_trusted

    # docs/protocol.md P45
    def give_up(self) -> bool:
        """Revoke the lease because the process does not work. Runs on the watchdog's thread, while the event loop may
        be blocked. Returns True: no renewal begins while the evidence fails, so the lease expires in any case."""
        lease, link = self.id, self.link
        if lease and link is not None and lease != self._given_up:
            self._given_up = lease
            threading.Thread(target=link.revoke_at_once, args=(lease,), name="give up session", daemon=True).start()
        return True

    async def close(self) -> None:
        """End the session. Waits at most CLOSE_TIMEOUT_S for etcd, because the lease expires in any case."""
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
            except Exception:  # the root of a task without which the store would be away forever
                log.exception("metadata session failed unexpectedly, connecting again")
            place = (place + 1) % len(self._endpoints)
            await asyncio.sleep(next(pauses))

    async def _connected(self, endpoint: str) -> bool:
        """Run one connection from its beginning to its end. Returns False if it was never connected."""
        places = await places_of(endpoint)
        link, was_connected = EtcdLink(endpoint, self._tls, self._login, places), False
        self._seen_revision, self._is_trusted = 0, True
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
                self._revision = max(self._revision, self._seen_revision)
            if self.state is SessionState.CONNECTED:
                self._become(SessionState.SUSPENDED, self.id)
            await link.close()
            self._patience_s = ATTACH_FIRST_S if was_connected else min(2 * self._patience_s, ATTACH_MAX_S)
        return was_connected

    def _note(self, trouble: str) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            log.warning("no metadata connection %s", trouble)

    async def _attach(self, link: EtcdLink) -> int:
        """Bind the session to this connection, and return the revision at which that happened."""
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
        self._seen_revision = revision
        return revision

    # docs/protocol.md B29
    async def _refuse_older(self, link: EtcdLink) -> None:
        """Raise MetadataUnavailable if this is another etcd cluster than before, or an older copy of it, before
        anything is written to it and before the session counts as expired."""
        found = (await link.range(RangeRequest(key=self._keys.key("/"), keys_only=True))).header
        if self._cluster not in (0, found.cluster_id):
            raise MetadataUnavailable(
                f"expected etcd cluster id {self._cluster:x}, got {found.cluster_id:x}: these "
                "endpoints are another etcd"
            )
        if found.revision < self._revision:
            raise MetadataUnavailable(
                f"this etcd is an older copy of itself: expected revision {self._revision} or later, got "
                f"{found.revision} (docs/how-to/back-up-and-restore-metadata.md)"
            )
        self._cluster = found.cluster_id

    async def _hold(self, link: EtcdLink, revision: int) -> None:
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

    async def _follow(self, link: EtcdLink, revision: int) -> None:
        """Pass every change from that revision on to the watches. A stream that etcd ends is restarted where it was. If
        etcd has compacted that revision, any node may have changed."""
        try:
            while not link.broken.is_set():
                async with aclosing(link.watch(self._keys.everything(), revision)) as answers:
                    async for answer in answers:
                        revision = self._on_watch_response(link, answer, revision)
                        if answer.canceled:
                            break
                await asyncio.sleep(RETRY_FIRST_S)
        except (MetadataError, Outdated) as error:
            self._note(f"endpoint={link.endpoint}, its watch: {error}")
        finally:
            link.give_up()

    def _on_watch_response(self, link: EtcdLink, answer: WatchResponse, revision: int) -> int:
        """Handle a message of the watch, and return the revision from which to continue."""
        if answer.compact_revision:
            log.info("metadata watch revision=%d was compacted, all watches are called", revision)
            self._watches.call_all()
            return max(revision, answer.compact_revision)
        if answer.canceled:
            raise MetadataUnavailable(f"etcd has ended the watch: {answer.cancel_reason}")
        for event in answer.events:
            if event.type == Event.DELETE and event.kv.key == link.guard.key:
                self._become(SessionState.LOST)
                link.give_up()
            self._watches.on_event(event)
            revision = event.kv.mod_revision  # not the next one: this revision may have more events, in another message
            self._seen_revision = max(self._seen_revision, revision)
        return revision

    def _become(self, state: SessionState, session: int = 0) -> None:
        if self._is_closing or (state, session) == (self.state, self.id):
            return
        log.info("metadata session state=%s session=%x", state.name, session or self.id)
        self.state, self.id = state, session
        self._changed(state)
