"""The operations that a guard lets through, for every operation and every method of a backend. Each way to break the
guard is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from kvstore.access import AddRole, AddUser, GrantRight, GrantRole, Right
from kvstore.errors import NotAuthenticated, PermissionDenied
from kvstore.partition.state import commands
from kvstore.partition.state.commands import NOT_NOW, Code, Flag, Op
from kvstore.server.access import identities
from kvstore.server.access.guard import Guard
from kvstore.server.access.identities import Access, UserIdentity
from tests.server.access.tables import HASH, table

MINE, OTHERS = b"t/a", b"x"


def ops_on(key: bytes, start: bytes, end: bytes) -> list[Op]:
    """Return one operation of each code, and operations with the flags that matter."""
    put = commands.Put(key, b"v")
    return [
        commands.Get(key),
        commands.Meta(key),
        put,
        commands.Put(key, b"v", flags=Flag.RETURN_OLD),
        commands.Delete(key),
        commands.Delete(key, flags=Flag.RETURN_OLD),
        commands.Put(key, b"v", flags=Flag.IF_VERSION, version=9),
        commands.Delete(key, flags=Flag.IF_VERSION, version=9),
        commands.Increment(key, 1),
        commands.Append(key, b"v"),
        commands.Expire(key, 1),
        commands.Batch(MINE, (commands.Put(MINE, b"v"), put)),
        commands.Transact(MINE, (commands.Put(MINE, b"v"), put)),
        commands.Transact(MINE, (commands.Get(MINE), commands.Check(key, Flag.IF_ABSENT))),
        commands.DeleteRange(start, end),
        commands.Scan(start, end, 10),
    ]


BEYOND = [*ops_on(OTHERS, b"t/", b""), commands.ScanTokens(0, 10), commands.Count(), commands.Scan(b"s", b"t/b", 1)]
WITHIN = ops_on(MINE, b"t/", b"t0")


class Backend:
    """A backend that records the operations that reach it."""

    def __init__(self) -> None:
        self.reached: list[Op] = []

    def submit(
        self, ops: Sequence[Op], sink: Any, tokens: Sequence[int], ring_version: int = 0, partition: Any = None
    ) -> None:
        self.reached += ops

    def read_now(self, keys: list[bytes]) -> list[bytes]:
        self.reached += map(commands.Get, keys)
        return [b""] * len(keys)


class Sink:
    def __init__(self) -> None:
        self.results: dict[int, Any] = {}

    def complete(self, token: int, result: Any) -> None:
        self.results[token] = result

    def flush(self) -> None:
        """Do nothing, because nothing is sent."""


async def let_through(identity: UserIdentity, access: Access, ops: Sequence[Op]) -> tuple[list[Op], dict[int, Any]]:
    """Return the operations that reach the backend by every method, and the results of the others."""
    backend: Any = Backend()
    guard, sink = Guard(access, identity, backend), Sink()
    for token, op in enumerate(ops):
        guard.submit((op,), sink, (token,))  # type: ignore[arg-type]
    more = commands.Put(b"t/more", b"v")
    puts = [more, *(op for op in ops if op.code == Code.PUT)]
    guard.submit(puts, sink, range(100, 100 + len(puts)))  # type: ignore[arg-type]
    if more in backend.reached:
        backend.reached.remove(more)  # whether allowed or not, it does not affect the other operations
    for op in ops:
        if op.code == Code.GET and guard.read_now([op.key]) is NOT_NOW:
            sink.results[200] = PermissionDenied("not now")
    keys = [op.key for op in ops if op.code == Code.GET]
    for some in ([*keys, b"t/more"], [b"t/more", *keys]) if keys else ():
        if guard.read_now(some) is NOT_NOW:
            sink.results[201] = PermissionDenied("not now")
    await asyncio.sleep(0)
    return backend.reached, sink.results


async def leaks() -> list[Op]:
    """Return the operations that reach the backend without permission."""
    access = Access(
        table(AddUser("writer", HASH), AddRole("w"), GrantRight("w", Right.WRITE), GrantRole("writer", "w"))
    )
    found = []
    for name, ops in (("tenant", BEYOND), ("nothing", WITHIN), ("root", WITHIN), ("reader", WITHIN[2:13])):
        identity = access.identity_or_none(name)
        assert identity is not None
        found += (await let_through(identity, access, ops))[0]
    found += (await let_through(access.nobody, access, WITHIN))[0]
    writer = access.identity_or_none("writer")
    assert writer is not None
    tells = [
        op
        for op in WITHIN
        if op.code == Code.INCREMENT or {Flag.RETURN_OLD, Flag.IF_VERSION} & {getattr(op, "flags", 0)}
    ]
    found += (await let_through(writer, access, tells))[0]
    access.take(table())
    found += (await let_through(writer, access, WITHIN))[0]
    return found


async def test_operations_beyond_the_rights_never_reach_the_backend() -> None:
    assert await leaks() == []


async def test_refused_operations_are_answered_and_allowed_ones_are_submitted() -> None:
    access = Access(table())
    tenant = access.identity_or_none("tenant")
    assert tenant is not None
    reached, answers = await let_through(tenant, access, WITHIN)
    assert [op for op in WITHIN if op not in reached] == []
    assert answers == {}
    _, answers = await let_through(tenant, access, BEYOND)
    assert len(answers) == len(BEYOND) + 5
    assert all(isinstance(each, PermissionDenied) for each in answers.values())
    _, answers = await let_through(access.nobody, access, WITHIN[:3])
    assert all(isinstance(each, NotAuthenticated | PermissionDenied) for each in answers.values())


def _first_key_only(identity: UserIdentity, op: Op) -> Any:
    return _whole(identity, replace(op, ops=op.ops[:1]) if isinstance(op, commands.Batch) else op)


def _submit_by_the_first(guard: Guard, ops: Sequence[Op], sink: Any, tokens: Sequence[int]) -> None:
    if guard._identity.refusal_or_none(ops[0]) is None:
        guard._backend.submit(ops, sink, tokens)
    else:
        _submit(guard, ops, sink, tokens)


def _keep(identity: UserIdentity, permissions: Any) -> None:
    """Add permissions once and never remove any."""
    if not hasattr(identity, "permissions"):
        _allow(identity, permissions)


_allow = UserIdentity.allow
_submit = Guard.submit
_whole = UserIdentity.refusal_or_none
_may = UserIdentity._may
BREAKAGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a batch is judged by its first key": lambda patch: patch.setattr(UserIdentity, "refusal_or_none", _first_key_only),
    "a range is judged by its start": lambda patch: patch.setattr(
        UserIdentity,
        "_may",
        lambda self, right, op: (
            self.permissions.may(right, op.key) if isinstance(op.key, bytes) else _may(self, right, op)
        ),
    ),
    "old values are shown without the right to read": lambda patch: patch.setattr(identities, "REVEALING", 0),
    "counts need no right": lambda patch: patch.setitem(identities.NEEDS, int(Code.COUNT), ()),
    "a sum is shown without the right to read": lambda patch: patch.setitem(
        identities.NEEDS, int(Code.INCREMENT), (Right.WRITE,)
    ),
    "operations are not checked": lambda patch: patch.setattr(
        Guard, "submit", lambda self, ops, sink, tokens: self._backend.submit(ops, sink, tokens)
    ),
    "of many operations the first is checked": lambda patch: patch.setattr(Guard, "submit", _submit_by_the_first),
    "reads at once are not checked": lambda patch: patch.setattr(
        Guard, "read_now", lambda self, keys: self._backend.read_now(keys)
    ),
    "of many reads at once the first is checked": lambda patch: patch.setattr(
        Guard,
        "read_now",
        lambda self, keys: self._backend.read_now(keys) if keys[0].startswith(self._identity.read) else NOT_NOW,
    ),
    "a removed user goes on": lambda patch: patch.setattr(UserIdentity, "allow", _keep),
}


@pytest.mark.parametrize("name", sorted(BREAKAGES))
async def test_broken_guard_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BREAKAGES[name](monkeypatch)
    assert await leaks() != [], name
