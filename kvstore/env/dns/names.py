"""Looks up the addresses of hosts: the only way in which this process resolves names.

The system's lookup (getaddrinfo) blocks for as long as the name server lets it, ten seconds and more, and asks for IPv4
and IPv6 addresses as one question. A server that answers only one of them delays both. So each family is looked up in a
thread of its own, and the addresses of one family are used soon after they are known.

Waits, threads, names and the validity of answers are bounded. An old answer is used while no new one comes: a name
server that hangs or fails keeps nobody from a known host.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec import Struct

LOOKUP_S = 2.0
"""Maximum wait for the first answer about a name, in seconds."""
GRACE_S = 0.05
"""How long to wait for the other family after the addresses of one are known, in seconds."""
STALE_AFTER_S = 0.2
"""How long to wait for a new answer if there is an old one, in seconds."""
FOUND_S, ABSENT_S, STALE_S = 5.0, 1.0, 600.0
"""Validity without another lookup of addresses, and of the answer that there are none; validity of old addresses. In
seconds."""
THREADS_MAX = 16
"""Maximum number of concurrent lookups. The system abandons a name server after 10 s or so. Names whose last lookup was
that slow get half of them, so that they do not keep other names from an answer."""
NAMES_MAX, ADDRESSES_MAX = 1_024, 16
"""Maximum number of names that are remembered, and of addresses of each."""
FAMILIES = (socket.AF_INET6, socket.AF_INET)
_ABSENT = frozenset(
    getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA", "EAI_ADDRFAMILY") if hasattr(socket, name)
)
"""Errors of the system that mean that there definitely are no addresses."""

Lookup = Callable[[str, socket.AddressFamily], Sequence[str]]
Wake = Callable[[], object]


class NoAnswer(OSError):
    """The name service has failed, or did not answer in time."""


class _FamilyState(Struct, eq=False):
    """The addresses of a name in one family, as far as they are known."""

    addresses: tuple[str, ...] = ()
    found_at: float = -1e9
    """Time at which the addresses were found."""
    failure: OSError | None = None
    """Error of the last lookup, if it failed or found nothing."""
    ended_at: float = -1e9
    """Time at which the last lookup ended."""
    is_running: bool = False
    began_at: float = -1e9
    is_slow: bool = False
    """True if the last lookup took LOOKUP_S or more."""

    def is_settled(self, now: float) -> bool:
        """True if the last lookup is recent."""
        return now - self.ended_at < (FOUND_S if self.failure is None else ABSENT_S)

    @property
    def is_absent(self) -> bool:
        """True if there definitely are no addresses in this family."""
        return isinstance(self.failure, socket.gaierror) and self.failure.args[0] in _ABSENT


class _Name(Struct, eq=False):
    """One name, with the callers that wait for its addresses."""

    host: str
    families: dict[socket.AddressFamily, _FamilyState]
    waiting: set[Wake]


class Names:
    """The addresses of hosts by name. Calls may come from any thread."""

    def __init__(self, lookup: Lookup | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._lookup: Lookup = lookup or system_lookup
        self._now = now
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Start over in the child of a fork, where the lookups' threads do not exist."""
        self._lock = threading.Lock()
        self._names: dict[str, _Name] = {}
        self._running = 0

    def find(self, host: str, timeout_s: float = LOOKUP_S) -> tuple[str, ...]:
        """Return the addresses of a host, those that this machine can reach first. Blocks for up to `timeout_s`. Raises
        NoAnswer, and socket.gaierror if there are none."""
        if is_address(host):
            return (host,)
        begun, woken = self._now(), threading.Event()
        try:
            while True:
                woken.clear()
                found, left_s = self._check(host, begun, timeout_s, woken.set)
                if found:
                    return found
                woken.wait(left_s)
        finally:
            self._forget(host, woken.set)

    async def find_soon(self, host: str, timeout_s: float = LOOKUP_S) -> tuple[str, ...]:
        """Do what `find` does without blocking the event loop."""
        if is_address(host):
            return (host,)
        begun, loop, woken = self._now(), asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(woken.set)

        try:
            while True:
                woken.clear()
                found, left_s = self._check(host, begun, timeout_s, wake)
                if found:
                    return found
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await woken.wait()
        finally:
            self._forget(host, wake)

    # ── deciding ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check(self, host: str, begun: float, timeout_s: float, wake: Wake) -> tuple[tuple[str, ...], float]:
        """Return the addresses, or none and how long to wait before the next check. Raises what `find` raises."""
        with self._lock:
            now, name = self._now(), self._name(host)
            families = [self._asked(name, family, now) for family in FAMILIES]
            pending = [each for each in families if each.is_running]
            fresh = [each for each in families if each.addresses and each.failure is None and each.is_settled(now)]
            stale = [each for each in families if each.addresses and now - each.found_at < STALE_S]
            until = begun + timeout_s
            if fresh:
                until = min(until, min(each.ended_at for each in fresh) + GRACE_S)
            elif stale:
                until = min(until, begun + STALE_AFTER_S)
            if not pending or now >= until:
                if usable := fresh or stale:
                    return _merged(usable), 0.0
                raise self._failure(host, families, timeout_s)
            name.waiting.add(wake)
            return (), until - now

    def _name(self, host: str) -> _Name:
        found = self._names.pop(host, None)
        if found is None:
            found = _Name(host, {family: _FamilyState() for family in FAMILIES}, set())
        self._names[host] = found  # to the end of the order
        while len(self._names) > NAMES_MAX:
            del self._names[next(iter(self._names))]
        return found

    def _asked(self, name: _Name, family: socket.AddressFamily, now: float) -> _FamilyState:
        """Return the state of one family, and start its lookup if it is due."""
        asked = name.families[family]
        if asked.is_running or asked.is_settled(now):
            return asked
        most = THREADS_MAX // 2 if asked.is_slow else THREADS_MAX
        if self._running >= most:
            asked.failure, asked.ended_at = NoAnswer(f"{most} lookups of other names do not end"), now
            return asked
        work = (name, family, asked, self._lock)
        thread = threading.Thread(target=self._run, args=work, name=f"look up {name.host}", daemon=True)
        try:
            thread.start()  # it ends under the lock, so not before it is counted
        except RuntimeError as error:  # there are no more threads
            asked.failure, asked.ended_at = NoAnswer(str(error)), now
            return asked
        self._running += 1
        asked.is_running, asked.began_at = True, now
        return asked

    @staticmethod
    def _failure(host: str, families: Sequence[_FamilyState], timeout_s: float) -> OSError:
        if all(each.is_absent for each in families):
            number = families[0].failure.errno if families[0].failure is not None else socket.EAI_NONAME
            return socket.gaierror(number, f"{host}: no such host, or it has no address")
        failure = next((each.failure for each in families if each.failure is not None and not each.is_absent), None)
        if failure is None:
            return NoAnswer(f"{host}: expected its addresses from the name service within {timeout_s:g} s, got none")
        return NoAnswer(f"{host}: expected its addresses from the name service, got: {failure}")

    # ── asking ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self, name: _Name, family: socket.AddressFamily, asked: _FamilyState, lock: threading.Lock) -> None:
        addresses: Sequence[str] = ()
        failure: OSError | None = None
        try:
            addresses = self._lookup(name.host, family)
            if not addresses:
                failure = socket.gaierror(socket.EAI_NONAME, "no address")
        except OSError as error:
            failure = error
        except (UnicodeError, ValueError) as error:  # of the name, for example a label that is too long
            failure = socket.gaierror(socket.EAI_NONAME, str(error))
        with lock:
            asked.is_running, asked.failure, asked.ended_at = False, failure, self._now()
            asked.is_slow = asked.ended_at - asked.began_at >= LOOKUP_S
            if failure is None:
                asked.addresses, asked.found_at = tuple(addresses[:ADDRESSES_MAX]), asked.ended_at
            elif asked.is_absent:
                asked.addresses = ()
            if lock is self._lock:
                self._running -= 1
            waiting, name.waiting = name.waiting, set()
        for wake in waiting:
            wake()

    def _forget(self, host: str, wake: Wake) -> None:
        with self._lock:
            name = self._names.get(host)
            if name is not None:
                name.waiting.discard(wake)


def is_address(host: str) -> bool:
    """Return True if a host is given by its address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def system_lookup(host: str, family: socket.AddressFamily) -> list[str]:
    """Return the addresses that the system knows, in its order, those that this machine has a route to first. Blocks.
    Raises OSError, UnicodeError."""
    found = [str(each[4][0]) for each in socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)]
    return sorted(dict.fromkeys(found), key=lambda address: not _has_route(address, family))


def _has_route(address: str, family: socket.AddressFamily) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 9))  # sends nothing
    except OSError:
        return False
    return True


def _merged(usable: Sequence[_FamilyState]) -> tuple[str, ...]:
    """Return the addresses of all families, those with a route first."""
    found = [address for asked in usable for address in asked.addresses]
    reachable = [each for each in found if _has_route(each, family_of(each))] if len(usable) > 1 else found
    return tuple(reachable or found)


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


NAMES = Names()
"""The names of this process."""

if hasattr(os, "register_at_fork"):  # on systems that fork
    os.register_at_fork(after_in_child=NAMES.after_fork_in_child)
