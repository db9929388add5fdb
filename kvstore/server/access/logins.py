"""Logins by password: hashed by one thread beside the event loop, few at a time, with a limit on failures.

A hash is slow by design, so it is not computed for each connection, nor for any peer that asks. A verified login is
remembered by a keyed hash, whose key only this process has. Concurrent identical logins are verified once. An address
with too many failures is refused for a while without a hash.

The login of the address with the fewest failures is hashed next. If too many logins wait, that of the address with the
most failures is refused. So a peer that guesses, from many addresses too, waits behind those that do not. A login that
was wrong before is wrong again without a hash, and counts once: a client that keeps using a changed password, or a
removed user, guesses nothing, and must not block the other clients of its address.

A token (kvstore/access/tokens.py) is accepted in place of a password, at every endpoint, with its user's name, with
`default` or with none. It costs one fast hash each time and cannot be guessed, so its bearer is never refused because
of failures of its address.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from kvstore.access import PASSWORD_BYTES_MAX, Password, parsed
from kvstore.access.passwords import HASH_BYTES, SALT_BYTES, N, P
from kvstore.access.tokens import id_or_none
from kvstore.env import Env
from kvstore.env.nursery import shielded
from kvstore.errors import NotAuthenticated, Overloaded
from kvstore.server.access.audit import AuditLog
from kvstore.server.access.identities import Access, UserIdentity

log = logging.getLogger(__name__)

PENDING_MAX = 64
"""Maximum number of logins that wait for the thread or are being hashed. Further logins are refused."""
NICENESS = 5
"""Niceness of the thread: if processors are scarce, operations take precedence, and logins still proceed."""
FAILURES_MAX, FAILURES_S = 10, 60.0
"""Maximum number of failures of one address within this many seconds. After that its logins are refused, unless the
server has verified them before."""
ADDRESSES_MAX = 1_000
"""Maximum number of addresses remembered. The one with the oldest failure is forgotten first."""
WRONG_MAX = 1_000
"""Maximum number of wrong logins remembered. The oldest is forgotten first."""
WRONG = "invalid username-password pair or user is disabled."
WRONG_TOKEN = "the token is unknown, belongs to another user, has expired or was revoked"
ANY_USER = ("", "default")
"""User names that a token's bearer may give instead of the user's own: none, or the name that Redis clients use by
default."""
_DUMMY_PASSWORD = Password(N, P, bytes(SALT_BYTES), bytes(HASH_BYTES))
"""Hashed in vain for a user that does not exist, so that timing does not reveal which users exist."""


_Mark = tuple[str, str, bytes]
"""A requested login: the user, the user's hash, and a digest of both words."""


class _Failures(NamedTuple):
    times: int
    since: float


class _Verified(NamedTuple):
    """A login that was right."""

    hash: str
    """The user's hash at that time."""
    mark: bytes


class _Wait(NamedTuple):
    """A login that waits to be hashed."""

    mark: _Mark
    password: bytes
    address: str
    found: asyncio.Future[bool]


class Logins:
    """Verifies the logins of one server, at all endpoints."""

    def __init__(self, env: Env, access: Access, audit: AuditLog) -> None:
        self._clock, self._access, self._known = env.clock, access, env.known
        self._access_changed()
        self._forget = access.on_change(self._access_changed)
        self._audit = audit
        self._key = env.random.randbytes(32)
        self._verified: dict[str, _Verified] = {}
        self._wrong: dict[tuple[str, bytes], None] = {}
        """Logins that were wrong, by the user's hash and a digest of the login. The digest includes the name,
        because an unauthenticated peer may send a name of any length."""
        self._pending: dict[_Mark, asyncio.Future[bool]] = {}
        self._waiting: list[_Wait] = []
        """Logins that wait, in order of arrival. The other logins in `_pending` are being hashed by the thread."""
        self._is_busy = False
        self._failures: dict[str, _Failures] = {}
        self._thread: ThreadPoolExecutor | None = None
        self.failed = self.limited = self.hashes = 0

    def _access_changed(self) -> None:
        self._known.clients_authenticate = self._access.is_on

    def close(self) -> None:
        self._forget()
        for each in self._waiting:
            each.found.cancel()
        self._waiting.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def statistics(self) -> dict[str, int]:
        return {
            "logins_failed_total": self.failed,
            "logins_limited_total": self.limited,
            "login_hashes_total": self.hashes,
            "logins_pending": len(self._pending),
        }

    def known_or_none(self, user: str, password: bytes) -> UserIdentity | None:
        """Return the user if this server has verified the same login before and it is still valid, or if the login
        is a valid token. Otherwise return None. Takes microseconds."""
        token = id_or_none(password)
        if token is not None:
            named = self._access.of_token(token, password, self._clock.date_ms())
            return named if named is not None and user in (*ANY_USER, named.name) else None
        found, known = self._verified.get(user), self._access.user_or_none(user)
        if found is None or known is None or known.password != found.hash:
            return None
        if not hmac.compare_digest(found.mark, self._mark(user, password)):
            return None
        return self._access.identity_or_none(user)

    async def login(self, user: str, password: bytes, address: str) -> UserIdentity:
        """Verify a login and return its user. `address` is the client's address in the form that `network_of` takes.
        After a correct login, the client's network counts as known. Raises NotAuthenticated if the login is wrong or
        if the address has had too many failures, and Overloaded if too many logins wait."""
        identity = await self._login(user, password, address)
        self.note_authenticated(address)
        return identity

    def note_authenticated(self, address: str) -> None:
        """Record that a client at this address has authenticated. Unauthenticated peers on other networks no longer
        displace its connections."""
        self._known.note(address)

    async def _login(self, user: str, password: bytes, address: str) -> UserIdentity:
        identity = self.known_or_none(user, password)
        if identity is not None:
            return identity
        if self._access.is_unfounded:
            raise self._access.nobody.unknown()
        token = id_or_none(password)
        if token is not None:
            self.failed += 1
            raise self._noted(f"#{token}", address, WRONG_TOKEN)
        known = self._access.user_or_none(user)
        text = known.password if known is not None else ""
        mark = user, text, self._mark(user, password)
        is_known_wrong = mark[1:] in self._wrong
        if not is_known_wrong and self._is_limited(address):
            self.limited += 1
            raise self._noted(
                user, address, f"too many failed logins from this address; try again in {FAILURES_S:.0f} s"
            )
        has_length = 1 <= len(password) <= PASSWORD_BYTES_MAX
        if not has_length:
            self._note_failure(address)
        if is_known_wrong or not has_length or not await self._verify(mark, password, address):
            self.failed += 1
            raise self._noted(user, address, WRONG)
        identity = self._access.identity_or_none(user)
        if identity is None or identity.password != text:  # changed while the hash was computed
            raise NotAuthenticated(WRONG)
        return identity

    async def _verify(self, mark: _Mark, password: bytes, address: str) -> bool:
        pending = self._pending.get(mark) or self._begin(mark, password, address)
        return await shielded(pending) and bool(mark[1])

    def _begin(self, mark: _Mark, password: bytes, address: str) -> asyncio.Future[bool]:
        """Queue a login for hashing and return a future with the result. Raises Overloaded."""
        if len(self._pending) >= PENDING_MAX and not self._displace_waiting(address):
            self.limited += 1
            raise Overloaded(f"{PENDING_MAX} logins are waiting to be checked; try again")
        # counts as a failure until it turns out right, so that concurrent logins cannot evade the limit
        self._note_failure(address)
        pending: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pending[mark] = pending
        pending.add_done_callback(lambda done: self._end(mark, address, done))
        self._waiting.append(_Wait(mark, password, address, pending))
        self._hash_next()
        return pending

    def _displace_waiting(self, address: str) -> bool:
        """Refuse a waiting login of an address with more failures than `address`, whose new login counts as a
        failure here. Return True if a login was refused."""
        worst = max(reversed(self._waiting), key=lambda each: self._times(each.address), default=None)
        if worst is None or self._times(worst.address) <= self._times(address) + 1:
            return False
        self._waiting.remove(worst)
        self._refuse(worst, "logins from addresses with fewer failures take precedence; try again")
        return True

    def _refuse(self, login: _Wait, why: str) -> None:
        """Report that a login was not checked. This does not count as a failure."""
        self._forgive(login.address)
        self.limited += 1
        login.found.set_exception(Overloaded(why))
        login.found.exception()  # retrieved, also if the caller has gone
        self._pending.pop(login.mark, None)

    def _hash_next(self) -> None:
        """Give the next login to the thread unless the thread is busy."""
        if self._is_busy or not self._waiting:
            return
        self._is_busy = True
        following = min(self._waiting, key=lambda each: self._times(each.address))
        self._waiting.remove(following)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="login", initializer=_lower_priority)
        text = following.mark[1]
        hashed = parsed(text) if text else _DUMMY_PASSWORD
        self.hashes += 1
        try:
            hashing = asyncio.get_running_loop().run_in_executor(self._thread, hashed.is_right, following.password)
        except RuntimeError as error:  # no thread can be started now; the next login tries again with a new pool
            return self._refuse_all((following, *self._waiting), error)
        return hashing.add_done_callback(lambda done: self._hashed(following, done))

    def _refuse_all(self, logins: Sequence[_Wait], error: RuntimeError) -> None:
        log.warning("cannot check logins, no thread can be started logins=%d: %s", len(logins), error)
        self._is_busy, self._thread = False, None
        self._waiting.clear()
        for each in logins:
            self._refuse(each, f"logins cannot be checked now: {error}; try again")

    def _hashed(self, login: _Wait, done: asyncio.Future[bool]) -> None:
        self._is_busy = False
        if not login.found.done():
            if done.cancelled():
                login.found.cancel()
            elif (error := done.exception()) is not None:  # out of memory
                log.warning("cannot check a login of=%s: %r", login.address, error)
                self._refuse(login, f"the login could not be checked: {error!r}; try again")
            else:
                login.found.set_result(done.result())
        self._hash_next()

    def _end(self, mark: _Mark, address: str, done: asyncio.Future[bool]) -> None:
        """Remember the result of a login, even if the client has disconnected. Otherwise the client would cause the
        same hash again, and would finally be refused because of failures that were none."""
        user, text, digest = mark
        self._pending.pop(mark, None)
        if done.cancelled() or done.exception() is not None:
            return
        if done.result() and text:
            self._forgive(address)
            self._verified[user] = _Verified(text, digest)
            return
        if len(self._wrong) >= WRONG_MAX:
            del self._wrong[next(iter(self._wrong))]
        self._wrong[text, digest] = None

    def _noted(self, user: str, address: str, why: str) -> NotAuthenticated:
        error = NotAuthenticated(why)
        self._audit.refused(ascii(user[:64]), address, "login", error)
        return error

    def _mark(self, user: str, password: bytes) -> bytes:
        return hmac.digest(self._key, hashlib.sha256(user.encode()).digest() + password, hashlib.sha256)

    # ── failures ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _is_limited(self, address: str) -> bool:
        return self._times(address) >= FAILURES_MAX

    def _times(self, address: str) -> int:
        """Return the number of recent failures of an address. Logins in flight count as failures."""
        found = self._failures.get(address)
        return found.times if found is not None and self._clock.now() - found.since < FAILURES_S else 0

    def _note_failure(self, address: str) -> None:
        now, found = self._clock.now(), self._failures.pop(address, None)
        if found is None or now - found.since >= FAILURES_S:
            found = _Failures(0, now)
        if len(self._failures) >= ADDRESSES_MAX:
            del self._failures[next(iter(self._failures))]
        self._failures[address] = _Failures(found.times + 1, found.since)

    def _forgive(self, address: str) -> None:
        found = self._failures.get(address)
        if found is not None:
            self._failures[address] = _Failures(max(0, found.times - 1), found.since)


def _lower_priority() -> None:
    """Lower the priority of this thread below the other work of the machine, if the operating system allows that."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def credentials_or_none(header: str) -> tuple[str, bytes] | None:
    """Return the user and the password in an `authorization` header, or None if its scheme is neither Basic nor
    Bearer. With Bearer, the user is empty and the password is a token."""
    kind, _, text = header.partition(" ")
    if kind.lower() != "bearer":
        return basic_or_none(header)
    word = text.strip().encode("utf-8", "replace")
    return ("", word) if id_or_none(word) is not None else None


def basic_or_none(header: str) -> tuple[str, bytes] | None:
    """Return the user and the password in a Basic `authorization` header, or None if the header is not one."""
    kind, _, text = header.partition(" ")
    if kind.lower() != "basic" or len(text) > 2 * PASSWORD_BYTES_MAX:
        return None
    try:
        user, colon, password = base64.b64decode(text.strip(), validate=True).partition(b":")
        return (user.decode(), password) if colon else None
    except ValueError:  # not base64, not ASCII, or a name that is not UTF-8
        return None
