"""Turns changes of the tree into reads of etcd, and the results of the reads into a transaction. Decides only.

A transaction of etcd compares, then puts and deletes. It has no parents, no versions like ours, and no order among its
changes. So everything that the changes touch is read at one revision. The changes are applied to it as in the tree in
memory. The result is put on condition that nothing that decided it has changed since. If something has changed, all of
it is repeated.

Conditions: each named node is as it was read; a new child's parent still exists and is persistent; a deleted node has
had no child since its children were read; and the session lives, on the connection that makes the request. The last
condition makes a late request of an abandoned connection do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import MetadataError
from kvstore.meta import paths
from kvstore.meta.etcd import values
from kvstore.meta.etcd.keys import EtcdKeys
from kvstore.meta.memory_tree import Transaction, TreeNode
from kvstore.meta.store import Change, Create, Delete
from kvstore.proto.etcd_pb2 import (
    Compare,
    DeleteRangeRequest,
    KeyValue,
    PutRequest,
    RangeRequest,
    RangeResponse,
    RequestOp,
    TxnRequest,
)

OPERATIONS_MAX = 128
"""Maximum number of operations in one transaction, which is etcd's default limit."""


class TransactionPlan:
    """The changes of one call. `also`: more conditions, for what the caller has read."""

    def __init__(self, keys: EtcdKeys, changes: Sequence[Change], also: Sequence[Compare] = ()) -> None:
        self.outcome: dict[str, TreeNode | None] = {}
        """Nodes that `commit` changes, as they are afterwards."""
        self._keys, self._changes, self._also = keys, changes, also
        named = dict.fromkeys(change.path for change in changes)
        parents = dict.fromkeys(paths.parent(each.path) for each in changes if isinstance(each, Create | Delete))
        self._paths = list(named | parents)
        self._deleted = list(dict.fromkeys(each.path for each in changes if isinstance(each, Delete)))

    def reads(self) -> list[RangeRequest]:
        """Return the reads, to be answered in this order at one revision. Raises MetadataError if there are
        too many."""
        wanted = [RangeRequest(key=self._keys.key(path)) for path in self._paths]
        for path in self._deleted:
            wanted.append(RangeRequest(key=self._keys.births(path), keys_only=True))
            # Each change removes at most one node. With more nodes than changes below it, the deleted node is not
            # empty.
            limit = len(self._changes) + 1
            wanted += [
                RangeRequest(key=span.start, range_end=span.end, limit=limit, keys_only=True)
                for span in self._keys.spans(path)
            ]
        self._check_count(len(wanted))
        return wanted

    def commit(self, answers: Sequence[RangeResponse], *, session: int, guard: Compare, now_ms: int) -> TxnRequest:
        """Return the transaction. Raises the error of the first change that failed."""
        found = {path: first_or_none(answer) for path, answer in zip(self._paths, answers, strict=False)}
        nodes = {path: values.decode(each) for path, each in found.items() if each is not None}
        born = self._read_children(nodes, list(answers[len(self._paths) :]))
        transaction = Transaction(nodes, values.OWN_REVISION, session=session, now_ms=now_ms)
        for change in self._changes:
            transaction.apply(change)
        self.outcome = transaction.touched
        request = TxnRequest(compare=[guard, *self._also, *self._conditions(found), *born])
        for path, node in self.outcome.items():
            request.success.extend(self._operations(path, nodes.get(path), node))
        self._check_count(max(len(request.compare), len(request.success)))
        request.failure.append(RequestOp(request_range=RangeRequest(key=guard.key, keys_only=True)))
        return request

    def _read_children(self, nodes: dict[str, TreeNode], answers: list[RangeResponse]) -> list[Compare]:
        """Add the children's names to the nodes, and return the conditions that no other child has been created."""
        conditions = []
        for path in self._deleted:
            conditions.append(unchanged(self._keys.births(path), first_or_none(answers.pop(0))))
            for _ in self._keys.spans(path):
                below = (self._name_below(path, each.key) for each in answers.pop(0).kvs)
                if path in nodes:
                    nodes[path].children.update(name for name in below if name)
        for path in self._paths:
            if path in nodes and path != "/" and (parent := nodes.get(paths.parent(path))):
                parent.children.add(path.rpartition("/")[2])
        return conditions

    def _name_below(self, path: str, key: bytes) -> str:
        """Return the child to which the key belongs, directly or below it; empty if there is none."""
        found = self._keys.path_or_none(key)
        base = path.rstrip("/") + "/"
        return found.removeprefix(base).partition("/")[0] if found and found.startswith(base) else ""

    def _conditions(self, found: dict[str, KeyValue | None]) -> list[Compare]:
        named = {change.path for change in self._changes}
        conditions = [unchanged(self._keys.key(path), found[path]) for path in found if path in named]
        for path in dict.fromkeys(paths.parent(each.path) for each in self._changes if isinstance(each, Create)):
            parent = found[path]
            if path not in named and parent is not None:
                key = self._keys.key(path)
                conditions.append(Compare(key=key, target=Compare.CREATE, create_revision=parent.create_revision))
                conditions.append(Compare(key=key, target=Compare.LEASE, lease=0))
        return conditions

    def _operations(self, path: str, before: TreeNode | None, after: TreeNode | None) -> list[RequestOp]:
        key, births = self._keys.key(path), self._keys.births(path)
        operations = []
        if after is None:
            if before is not None:
                operations.append(RequestOp(request_delete_range=DeleteRangeRequest(key=key)))
                operations.append(RequestOp(request_delete_range=DeleteRangeRequest(key=births)))
            return operations
        if before is None or _value(before) != _value(after):
            put = PutRequest(key=key, value=values.encode(after), lease=after.owner)
            operations.append(RequestOp(request_put=put))
        if after.births:
            operations.append(RequestOp(request_put=PutRequest(key=births)))
        return operations

    def _check_count(self, count: int) -> None:
        if count > OPERATIONS_MAX:
            raise MetadataError(
                f"{self._changes[0].path}: expected at most {OPERATIONS_MAX} etcd operations in one call, "
                f"got {count} for {len(self._changes)} changes"
            )


def unchanged(key: bytes, found: KeyValue | None) -> Compare:
    """Return the condition that a key is as it was read: put by the same transaction, or absent."""
    return Compare(key=key, target=Compare.MOD, mod_revision=0 if found is None else found.mod_revision)


def first_or_none(answer: RangeResponse) -> KeyValue | None:
    """Return the result of a read of one key."""
    return answer.kvs[0] if answer.kvs else None


def _value(node: TreeNode) -> tuple[int, int, int, int, bytes]:
    return node.created, node.version, node.owner, node.modified_ms, node.data
