"""Every place in a node's code that calls the disk is listed, with the reason why it cannot block the event loop."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.source import Source, sources

PAGE = Path(__file__).parents[1] / "docs/design/0020-disk-calls-on-the-event-loop.md"
PARTS = ("access", "autorecovery", "bookie", "env", "meta", "namespaces", "partition", "ring", "rpc", "server", "wal")
OF_NODES = tuple(f"kvstore/{name}/" for name in PARTS)
SYSTEM = re.compile(
    r"open|shutil\.\w+|rocksdict\.Rdict|os\.(pread|pwrite|open|fsync|fdatasync|fstat|stat|statvfs|listdir|replace|rename"
    r"|unlink|rmdir|makedirs|ftruncate|posix_fallocate|path\.(exists|isdir|lexists))"
)
ON_DISKS = {"open", "exists", "list", "mkdir", "remove", "rename", "sync_dir", "free_bytes", "free_files"}
ON_FILES = {"pwrite", "read", "size", "allocate", "truncate", "sync"}
ON_PATHS = {"read_text", "read_bytes", "write_text", "write_bytes", "iterdir"}


def calls(file: Source) -> Iterator[int]:
    """Return the lines that call the disk."""
    spelled = {node: name for name, node in file.uses()}
    for node in file.nodes:
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if SYSTEM.fullmatch(spelled.get(called, ast.unparse(called))):
            yield node.lineno
        elif isinstance(called, ast.Attribute):
            owner = ast.unparse(called.value)
            if (
                (called.attr in ON_DISKS and owner.endswith("disk"))
                or (called.attr in ON_FILES and owner.endswith(("file", "handle")))
                or called.attr in ON_PATHS
            ):
                yield node.lineno


# docs/protocol.md P45
def test_files_that_call_the_disk_are_listed_with_their_time_limit() -> None:
    found = {file.path: list(calls(file)) for file in sources("kvstore") if file.path.startswith(OF_NODES)}
    rows = re.findall(r"^\| `(kvstore/\S+\.py)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == sorted(set(rows))
    missing = {path: lines for path, lines in found.items() if lines and path not in rows}
    assert missing == {}, f"calls the disk: move it off the event loop, or list it in {PAGE.name}"
    assert [path for path in rows if not found.get(path)] == [], "listed, and does not call the disk any more"
