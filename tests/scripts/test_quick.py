"""`make quick` selects the tests that are nearest to a change."""

from __future__ import annotations

from scripts.quick import nearest


def test_quick_selects_the_nearest_test_files_first() -> None:
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
