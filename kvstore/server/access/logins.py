"""Logins by password: hashed beside the event loop, by one thread, few at once, and counted where they fail.

A hash is meant to be slow, so none is made for each connection, nor for whoever likes. What was verified once is known
by a keyed hash with a key of this process alone; the same login asked for by many is verified once; an address that has
failed too often is refused for a while without any hash. Of those that wait the one comes next whose address has failed
the fewest times, and where too many wait that of the address with the most gives way: whoever guesses, from many
addresses too, waits behind those who do not. A login that was wrong before is wrong again without a hash, and counts
once: a client that goes on with a password that was changed, or of a user who was removed, guesses nothing, and does
not have the others of its address refused.

A token (kvstore/access/tokens.py) is taken in a password's place, at every door, with its user's name, with `default`
or with none. It costs one fast hash each time, cannot be guessed, and whoever comes with one is never refused for what
others of his address have done.
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
"""Logins that wait for the thread, or are with it; more are refused."""
NICENESS = 5
"""Of the thread: where processors are short operations come first, and logins still come."""
FAILURES_MAX, FAILURES_S = 10, 60.0
"""Of one address within that time; after that its logins are refused unless the server knows them already."""
ADDRESSES_MAX = 1_000
"""Addresses that are remembered; the one that failed longest ago is forgotten first."""
WRONG_MAX = 1_000
"""Wrong logins that are remembered; the oldest is forgotten first."""
WRONG = "invalid username-password pair or user is disabled."
WRONG_TOKEN = "the token is not one of this cluster's, not this user's, has expired or was revoked"
ANY_USER = ("", "default")
"""As whom a token's bearer may come beside his own name: with nothing, or as Redis clients name nobody."""
_DUMMY_PASSWORD = Password(N, P, bytes(SALT_BYTES), bytes(HASH_BYTES))
"""Hashed in vain for a user who is not there, so that time does not tell who is."""


_Mark = tuple[str, str, bytes]
"""A login that is asked for: the user, his hash, and a digest of both words."""


class _Failures(NamedTuple):
    times: int
    since: float


class _Verified(NamedTuple):
    """A login that was right."""

    hash: str
    """The user's, then."""
    mark: bytes


class _Wait(NamedTuple):
    """A login that waits for the thread."""

    mark: _Mark
    password: bytes
    address: str
    found: asyncio.Future[bool]


class Logins:
    """The logins of one server, at all of its doors."""

    def __init__(self, env: Env, access: Access, audit: AuditLog) -> None:
        self._clock, self._access, self._known = env.clock, access, env.known
        self._audit = audit
        self._key = env.random.randbytes(32)
        self._verified: dict[str, _Verified] = {}
        self._wrong: dict[tuple[str, bytes], None] = {}
        """By the user's hash and the login's, in which the name is: a stranger may say one as long as he likes."""
        self._under_way: dict[_Mark, asyncio.Future[bool]] = {}
        self._waiting: list[_Wait] = []
        """As they came; the others under way are with the thread."""
        self._is_busy = False
        self._failures: dict[str, _Failures] = {}
        self._thread: ThreadPoolExecutor | None = None
        self.failed = self.limited = self.hashes = 0

    def close(self) -> None:
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
            "logins_pending": len(self._under_way),
        }

    def known_or_none(self, user: str, password: bytes) -> UserIdentity | None:
        """The user, if this server has verified this login before and it still holds, or if it is by a token. Takes
        microseconds."""
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
        """Return the user. `address` is that of the client as `network_of` names it, which is known from then on.
        Raises NotAuthenticated, also if too many of this address have failed, and Overloaded if too many wait."""
        identity = await self._login(user, password, address)
        self.note_authenticated(address)
        return identity

    def note_authenticated(self, address: str) -> None:
        """Note that a client at an address has authenticated: peers elsewhere do not displace its connections."""
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
            raise self._noted(user, address, f"too many failed logins of this address; try again in {FAILURES_S:.0f} s")
        has_length = 1 <= len(password) <= PASSWORD_BYTES_MAX
        if not has_length:
            self._note_failure(address)
        if is_known_wrong or not has_length or not await self._verify(mark, password, address):
            self.failed += 1
            raise self._noted(user, address, WRONG)
        identity = self._access.identity_or_none(user)
        if identity is None or identity.password != text:  # changed while the hash was made
            raise NotAuthenticated(WRONG)
        return identity

    async def _verify(self, mark: _Mark, password: bytes, address: str) -> bool:
        under_way = self._under_way.get(mark) or self._begin(mark, password, address)
        return await shielded(under_way) and bool(mark[1])

    def _begin(self, mark: _Mark, password: bytes, address: str) -> asyncio.Future[bool]:
        """Have it hashed when it is its turn. Raises Overloaded."""
        if len(self._under_way) >= PENDING_MAX and not self._displace_waiting(address):
            self.limited += 1
            raise Overloaded(f"{PENDING_MAX} logins wait to be checked; try again")
        self._note_failure(address)  # counts until it turns out right, so that many at once are no way around
        under_way: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._under_way[mark] = under_way
        under_way.add_done_callback(lambda done: self._end(mark, address, done))
        self._waiting.append(_Wait(mark, password, address, under_way))
        self._hash_next()
        return under_way

    def _displace_waiting(self, address: str) -> bool:
        """Refuse one that waits and whose address has failed more often than this one has with the login that comes."""
        worst = max(reversed(self._waiting), key=lambda each: self._times(each.address), default=None)
        if worst is None or self._times(worst.address) <= self._times(address) + 1:
            return False
        self._waiting.remove(worst)
        self._refuse(worst, "logins of addresses that have failed less often come first; try again")
        return True

    def _refuse(self, login: _Wait, why: str) -> None:
        """Tell a login that it was not checked: it has not failed."""
        self._forgive(login.address)
        self.limited += 1
        login.found.set_exception(Overloaded(why))
        login.found.exception()  # seen, also if whoever asked has gone
        self._under_way.pop(login.mark, None)

    def _hash_next(self) -> None:
        """Give the thread the next one, unless it has one."""
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
        except RuntimeError as error:  # no thread can be started now; the next login tries it with a new pool
            return self._refuse_all((following, *self._waiting), error)
        return hashing.add_done_callback(lambda done: self._hashed(following, done))

    def _refuse_all(self, logins: Sequence[_Wait], error: RuntimeError) -> None:
        log.warning("logins=%d cannot be checked, no thread can be started: %s", len(logins), error)
        self._is_busy, self._thread = False, None
        self._waiting.clear()
        for each in logins:
            self._refuse(each, f"logins cannot be checked now: {error}; try again")

    def _hashed(self, login: _Wait, done: asyncio.Future[bool]) -> None:
        self._is_busy = False
        if not login.found.done():
            if done.cancelled():
                login.found.cancel()
            elif (error := done.exception()) is not None:  # want of memory
                log.warning("login of=%s could not be checked: %r", login.address, error)
                self._refuse(login, f"the login could not be checked: {error!r}; try again")
            else:
                login.found.set_result(done.result())
        self._hash_next()

    def _end(self, mark: _Mark, address: str, done: asyncio.Future[bool]) -> None:
        """Remember the result, also if the client has gone meanwhile: it would ask for the same hash again, and in the
        end be refused for failures that were none."""
        user, text, digest = mark
        self._under_way.pop(mark, None)
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
        """How often it has failed lately, those under way included."""
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
    """Let what else this machine does come before this thread's work, where that is allowed."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def credentials_or_none(header: str) -> tuple[str, bytes] | None:
    """User and password of an `authorization` header, Basic or Bearer, of which the latter has a token and no user;
    None if it is none."""
    kind, _, text = header.partition(" ")
    if kind.lower() != "bearer":
        return basic_or_none(header)
    word = text.strip().encode("utf-8", "replace")
    return ("", word) if id_or_none(word) is not None else None


def basic_or_none(header: str) -> tuple[str, bytes] | None:
    """User and password of an `authorization` header of the kind Basic; None if it is none."""
    kind, _, text = header.partition(" ")
    if kind.lower() != "basic" or len(text) > 2 * PASSWORD_BYTES_MAX:
        return None
    try:
        user, colon, password = base64.b64decode(text.strip(), validate=True).partition(b":")
        return (user.decode(), password) if colon else None
    except ValueError:  # no base64, no ASCII, or a name that is no UTF-8
        return None
