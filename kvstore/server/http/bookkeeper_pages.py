"""Serves the admin pages of Apache BookKeeper that probes and operators' tools read, with Apache's paths and JSON. For
example, Helm charts of Apache Pulsar probe them.

The four probes need no user, like /healthz and /readyz. `info` and `cluster_info` need a user, like /metrics. All pages
are read-only: a bookie becomes read-only by itself when its disk is full, and no page changes that.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from kvstore.bookie import BookieState
from kvstore.errors import StoreError
from kvstore.meta.bookie_summary import BookieSummary
from kvstore.rpc.http.messages import HttpResponse, text_response

HEARTBEAT = "/heartbeat"
_BOOKIE = "/api/v1/bookie"
PROBES = frozenset((HEARTBEAT, *(f"{_BOOKIE}/{each}" for each in ("is_ready", "state", "state/readonly"))))
"""Pages that need no user and no certificate."""
CLUSTER_INFO_KEPT_S = 1.0
"""Seconds for which a summary of the cluster is reused, because it costs requests to the metadata store."""
CLUSTER_INFO_S = 5.0
"""Seconds for which a request waits for the metadata store. After that the response is 503."""


class ShownBookie(Protocol):
    """A starting or running node, as these pages use it."""

    def not_live(self) -> list[str]:
        """Return the reasons why the process should be restarted, or nothing if it is healthy."""
        ...

    def bookie_state(self) -> BookieState | None:
        """Return the state of the node's bookie, or None if the node has no bookie."""
        ...

    def bookie_space(self) -> tuple[int, int]:
        """Return the bookie's total and free bytes. Raises OSError, and Unavailable while the bookie starts."""
        ...

    async def cluster_info(self) -> BookieSummary:
        """Read a summary of all bookies. Raises MetadataUnavailable, MetadataUnknown, and Unavailable while the node
        starts."""
        ...


NO_BOOKIE = text_response("404: this node has no bookie\n", 404)


class BookkeeperPages:
    """Serves the admin pages of Apache's bookie on behalf of one node."""

    def __init__(self, shown: ShownBookie, now: Callable[[], float]) -> None:
        self._shown, self._now = shown, now
        self._turn = asyncio.Lock()
        self._kept, self._kept_until = text_response("", 503), -math.inf
        self._pages: Mapping[str, Callable[[], Awaitable[HttpResponse]]] = {
            HEARTBEAT: self._heartbeat,
            f"{_BOOKIE}/is_ready": self._is_ready,
            f"{_BOOKIE}/state": self._state,
            f"{_BOOKIE}/state/readonly": self._state_readonly,
            f"{_BOOKIE}/info": self._info,
            f"{_BOOKIE}/cluster_info": self._cluster_info,
        }

    def paths(self) -> frozenset[str]:
        """Return the paths that this object serves."""
        return frozenset(self._pages)

    async def answer(self, path: str) -> HttpResponse:
        """Answer a request for one of `paths()`."""
        return await self._pages[path]()

    async def _heartbeat(self) -> HttpResponse:
        faults = self._shown.not_live()
        return text_response("\n".join(faults) + "\n", 503) if faults else text_response("OK\n")

    async def _is_ready(self) -> HttpResponse:
        state = self._shown.bookie_state()
        if state is None:
            return NO_BOOKIE
        if state.is_running and not state.is_stopping:
            return text_response("OK")
        return text_response("Bookie is not fully started yet", 503)

    async def _state(self) -> HttpResponse:
        state = self._shown.bookie_state()
        if state is None:
            return NO_BOOKIE
        return _json(
            running=state.is_running,
            readOnly=state.is_readonly,
            shuttingDown=state.is_stopping,
            availableForHighPriorityWrites=state.takes_copies,
        )

    async def _state_readonly(self) -> HttpResponse:
        state = self._shown.bookie_state()
        return NO_BOOKIE if state is None else _json(readOnly=state.is_readonly)

    async def _info(self) -> HttpResponse:
        if self._shown.bookie_state() is None:
            return NO_BOOKIE
        try:
            total, free = self._shown.bookie_space()
        except (StoreError, OSError) as error:
            return text_response(f"{error}\n", 503)
        return _json(freeSpace=free, totalSpace=total)

    async def _cluster_info(self) -> HttpResponse:
        """Return the summary of the cluster. It is read at most once per CLUSTER_INFO_KEPT_S seconds for all
        requests. A failure is reused as well."""
        async with self._turn:
            if self._now() >= self._kept_until:
                self._kept = await self._read_cluster_info()
                self._kept_until = self._now() + CLUSTER_INFO_KEPT_S
            return self._kept

    async def _read_cluster_info(self) -> HttpResponse:
        try:
            async with asyncio.timeout(CLUSTER_INFO_S):
                found = await self._shown.cluster_info()
        except TimeoutError:
            return text_response(f"the metadata store did not answer within {CLUSTER_INFO_S:g} s\n", 503)
        except StoreError as error:
            return text_response(f"{error}\n", 503)
        return _json(
            auditorElected=found.auditor is not None,
            auditorId=found.auditor or "",
            clusterUnderReplicated=found.is_under_replicated,
            ledgerReplicationEnabled=found.is_replication_enabled,
            totalBookiesCount=found.bookies,
            writableBookiesCount=found.writable,
            readonlyBookiesCount=found.readonly,
            unavailableBookiesCount=found.bookies - found.writable - found.readonly,
        )


def _json(**fields: bool | int | str) -> HttpResponse:
    """Return the fields formatted as Apache's JSON printer does, because scripts search the text."""
    return HttpResponse(
        200, json.dumps(fields, indent=2, separators=(",", " : ")).encode(), content_type="application/json"
    )
