"""A node as the value of its key. Decides only.

    value := format (1 byte, 1) version (4) created (8) modified (8) data          numbers big-endian

etcd counts a key's versions itself, but differently from the tree: a node that is replaced within one transaction is
one put of one key, and nevertheless starts at version 0. etcd also keeps no times.
"""

from __future__ import annotations

import struct

from kvstore.errors import UndecodableNode
from kvstore.meta.memory_tree import TreeNode
from kvstore.proto.etcd_pb2 import KeyValue

FORMAT = 1
_HEADER = struct.Struct(">BIQQ")
OWN_REVISION = 0
"""Value of `created` for a node that was created by the transaction that put this value, whose revision is not known
before."""


def encode(node: TreeNode) -> bytes:
    return _HEADER.pack(FORMAT, node.version, node.created, node.modified_ms) + node.data


def decode(found: KeyValue) -> TreeNode:
    """Return the node of a key and its value. Raises UndecodableNode."""
    try:
        form, version, created, modified_ms = _HEADER.unpack_from(found.value)
    except struct.error:
        raise UndecodableNode(
            f"{found.key!r}: expected a header of {_HEADER.size} bytes, got {len(found.value)}"
        ) from None
    if form != FORMAT:
        raise UndecodableNode(f"{found.key!r} has format {form}; this build reads {FORMAT}")
    created = created or found.mod_revision
    return TreeNode(found.value[_HEADER.size :], created, found.lease, modified_ms, version)
