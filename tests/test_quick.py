"""`make quick` chooses the tests that are nearest to a change."""

from __future__ import annotations

from scripts.quick import import_graph, nearest
from tests import source


def test_import_graph_has_every_import_that_the_parser_finds() -> None:
    """Quick reads imports by a pattern, because parsing all files takes ten seconds."""
    files = source.sources("kvstore/wal", "kvstore/rpc", "tests/wal")
    paths = {each.module: each.path for each in files}
    found = import_graph({each.path: each.text for each in files})
    assert sum(map(len, found.values())) > 100
    for module, imported in source.import_graph(files, also_for_types=True).items():
        assert {paths[each] for each in imported} <= found[paths[module]]


def test_nearest_test_files_come_first_and_others_not_at_all() -> None:
    graph = {
        "kvstore/a.py": set(),
        "kvstore/b.py": {"kvstore/a.py"},
        "tests/test_other.py": {"kvstore/other.py"},
        "tests/test_b.py": {"kvstore/b.py"},
        "tests/test_a.py": {"kvstore/a.py"},
        "tests/helper.py": {"kvstore/a.py"},
        "tests/test_with_helper.py": {"tests/helper.py"},
        "tests/test_changed.py": {"kvstore/b.py"},
    }
    assert nearest(graph, {"kvstore/a.py", "tests/test_changed.py", "README.md"}) == [
        "tests/test_changed.py",
        "tests/test_a.py",
        "tests/test_b.py",
        "tests/test_with_helper.py",
    ]
    assert nearest(graph, {"README.md"}) == []
