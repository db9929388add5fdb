"""A backend that forwards the operations that the client's user may perform and refuses all others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import repeat

from kvstore.errors import StoreError
from kvstore.partition.state.commands import NOT_NOW, Get, NotNow, Op, Put, Sink
from kvstore.server.access.identities import OPERATION_NAMES, REVEALING, Access, UserIdentity
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.routing.backend import Backend
from kvstore.types import PartitionId

_REVEALING = int(REVEALING)


class Guard:
    """A Backend that enforces the permissions of one client. It is created only if access control is on, so it costs
    nothing otherwise."""

    __slots__ = ("_access", "_address", "_backend", "_identity", "_read_now", "_submit")

    def __init__(self, access: Access, identity: UserIdentity, backend: Backend, address: str = "?") -> None:
        """`address`: the client's address, for the audit log."""
        self._address = address
        self._access, self._identity, self._backend = access, identity, backend
        self._read_now, self._submit = backend.read_now, backend.submit

    @property
    def topology(self) -> ClusterTopology:
        return self._backend.topology

    def on_topology(self, changed: Callable[[], None]) -> Callable[[], None]:
        return self._backend.on_topology(changed)

    def progress(self, partition: PartitionId) -> tuple[int, int]:
        return self._backend.progress(partition)

    def submit(
        self,
        ops: Sequence[Op],
        sink: Sink,
        tokens: Sequence[int],
        ring_version: int = 0,
        partition: PartitionId | None = None,
    ) -> None:
        """Submit the operations that the user may execute, and refuse the others. `sink.complete(token, result)` is
        called once for each operation, including refused ones."""
        identity = self._identity
        refused: dict[int, StoreError] = {}
        for place, op in enumerate(ops):
            if op.__class__ is Get:
                is_allowed = op.key.startswith(identity.read)
            else:
                is_allowed = op.__class__ is Put and not op.flags & _REVEALING and op.key.startswith(identity.write)
            if not is_allowed and (refusal := identity.refusal_or_none(op)) is not None:
                refused[place] = refusal
                self._refuse(op, sink, tokens[place], refusal)
        if refused:
            tokens = [token for place, token in enumerate(tokens) if place not in refused]
            ops = [op for place, op in enumerate(ops) if place not in refused]
        if ops:
            self._submit(ops, sink, tokens, ring_version, partition)

    def read_now(self, keys: list[bytes]) -> list[bytes | None] | NotNow:
        """Return what the backend's `read_now` returns. Return NOT_NOW if the user may not read one of the keys: the
        caller then submits the GETs, and the refusal is delivered in its turn."""
        return self._read_now(keys) if all_begin_with(self._identity.read, keys) else NOT_NOW

    def _refuse(self, op: Op, sink: Sink, token: int, refusal: StoreError) -> None:
        """Complete a refused operation in the next turn of the event loop, because a sink is never completed inside
        `submit`."""
        self._access.refused(self._identity.who, self._address, OPERATION_NAMES[op.code], refusal)

        def complete() -> None:
            sink.complete(token, refusal)
            sink.flush()

        asyncio.get_running_loop().call_soon(complete)


def all_begin_with(prefixes: tuple[bytes, ...], keys: list[bytes]) -> bool:
    """Return True if each key begins with one of the prefixes. If the smallest and the largest key have the same
    prefix, so do all keys in between. Checking only these two takes half the time."""
    first, last = min(keys), max(keys)
    if any(first.startswith(prefix) and last.startswith(prefix) for prefix in prefixes):
        return True
    return all(map(bytes.startswith, keys, repeat(prefixes)))
