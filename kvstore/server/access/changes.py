"""Administrative changes. Every change at every endpoint passes through this one class.

A change is recorded in the audit log before it is attempted and after it has ended. It runs in its own task, so
that a caller that cancels its call or disconnects neither stops the change halfway nor hides its outcome.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from kvstore.env import Env
from kvstore.env.nursery import shielded
from kvstore.errors import OutcomeUnknown, Overloaded, Refused, StoreError, Unavailable
from kvstore.rpc.status import listed, reason_of
from kvstore.server.access.audit import AuditLog, CallAuthor

log = logging.getLogger(__name__)
T = TypeVar("T")

CHANGES_MAX = 64
"""Maximum number of changes of one node in flight, whether their callers still wait or not. Further changes are
refused."""
CHANGE_S = 600.0
"""Maximum time in seconds that a change may take; after that its outcome is unknown."""
DONE, UNKNOWN = "OK", reason_of(OutcomeUnknown)


class AdminChanges:
    """Makes and records the administrative changes of one node."""

    def __init__(self, env: Env, audit: AuditLog) -> None:
        self._nursery, self._now, self._audit = env.nursery, env.clock.now, audit
        self._in_flight = 0
        self._last = 0

    async def make(self, by: CallAuthor, call: str, work: Callable[[], Awaitable[T]], arguments: str = "") -> T:
        """Record a change, make it by calling `work`, and record its outcome. The change continues if the caller is
        cancelled.

        Raises Overloaded if too many changes are in flight, Unavailable if the audit log cannot be written,
        OutcomeUnknown, and the errors of `work`.
        """
        if self._in_flight >= CHANGES_MAX:
            overloaded = Overloaded(f"expected at most {CHANGES_MAX} changes in flight, got one more; try again later")
            self._audit.refused(*by, call, overloaded)
            raise overloaded
        ended: list[T | BaseException] = []
        self._last += 1
        self._in_flight += 1
        task = self._nursery.spawn(self._made(by, call, work, arguments, self._last, ended), name=f"change {call}")
        await shielded(cast("Awaitable[None]", task))
        (found,) = ended
        if isinstance(found, BaseException):
            raise found
        return found

    async def _made(
        self,
        by: CallAuthor,
        call: str,
        work: Callable[[], Awaitable[T]],
        arguments: str,
        number: int,
        ended: list[T | BaseException],
    ) -> None:
        began, outcome, why = self._now(), UNKNOWN, ""
        try:
            await self._begin(by, call, arguments, number)
            async with asyncio.timeout(CHANGE_S):
                ended.append(await work())
            outcome = DONE
        except StoreError as error:
            ended.append(error)
            outcome, why = (reason_of(listed(type(error))) if isinstance(error, Refused) else UNKNOWN), str(error)
        except TimeoutError:
            why = f"the change did not end within {CHANGE_S:g} s"
            ended.append(OutcomeUnknown(why))
        except asyncio.CancelledError:
            why = "the node stopped"
            raise
        # the root of a task: the endpoint reports the error, as if it had called `work` itself
        except Exception as error:
            log.exception("change=%d call=%s failed", number, call)
            why = repr(error)
            ended.append(error)
        finally:
            self._in_flight -= 1
            took_ms = (self._now() - began) * 1000
            self._audit.note(*by, call, outcome, arguments=arguments, why=why, took_ms=took_ms, change=number)

    async def _begin(self, by: CallAuthor, call: str, arguments: str, number: int) -> None:
        try:
            await self._audit.begin(by, call, arguments, number)
        except OSError as error:
            raise Unavailable(
                f"expected to record the change in the audit log before it begins, but {error}; free space on the disk "
                "of the node's log_dir, or restart the node with another log_dir"
            ) from None
