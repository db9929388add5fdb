"""The names of metrics about namespaces, as metric_names.py has the others."""

from __future__ import annotations

_SENTENCES = {
    "keys": "Keys of the namespace in the partitions that are led here: the sum over all nodes is the cluster's.",
    "bytes": "Bytes of these keys and their values.",
    "keys_max": "Quota of keys, of the whole cluster; 0: none.",
    "bytes_max": "Quota of bytes, of the whole cluster; 0: none.",
    "rate_max": "Operations per second that the namespace may have in the whole cluster; 0: any number.",
    "operations_total": "Operations that clients of this node asked for and that were let through, where the namespace "
    "has a rate.",
    "refused_keys_total": "Writes refused here for the quota of keys.",
    "refused_bytes_total": "Writes refused here for the quota of bytes.",
    "refused_operations_total": "Operations refused here for the rate.",
}
NAMESPACES = {f"namespace_{name}": (f"namespace_{name}", text) for name, text in _SENTENCES.items()}
