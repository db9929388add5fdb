"""The comparison of code without its text sees every change of code and no change of text."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.textonly import differing, textless

BEFORE = '''
"""A module."""
from tests.a import test_old_name

def test_old_name(key):
    """Return the key."""
    # a comment
    assert key, f"no key {key} of {len(key)}"
    return [test_old_name, "text", 1]
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A module."""', '"""Another module."""'),
        ('"""A module."""', ""),
        ("# a comment", "# another"),
        ("test_old_name", "test_new_name"),
        ("no key {key} of {len(key)}", "of {len(key)}, {key}"),
        ('"text"', "'other text'"),
        ('[test_old_name, "text", 1]', '[test_old_name,\n "te" "xt", 1]'),
    ],
)
def test_change_of_text_is_no_difference(old: str, new: str) -> None:
    assert old in BEFORE
    assert textless(BEFORE.replace(old, new)) == textless(BEFORE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(key)", "(name)"),
        ("{len(key)}", "{key}"),
        (", 1]", ", 2]"),
        (', "text", 1]', ", 1]"),
        ('"text"', 'b"text"'),
        ("assert key, ", "assert not key, "),
    ],
)
def test_change_of_code_is_a_difference(old: str, new: str) -> None:
    assert old in BEFORE
    assert textless(BEFORE.replace(old, new, 1)) != textless(BEFORE)


def test_files_are_compared_between_revisions_and_with_the_working_tree(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "--quiet")
    for name in ("text.py", "code.py", "deleted.py", "same.py"):
        (tmp_path / name).write_text(BEFORE)
    git("add", ".")
    git("commit", "--quiet", "--message=one")
    (tmp_path / "text.py").write_text(BEFORE.replace("a comment", "another"))
    (tmp_path / "code.py").write_text(BEFORE.replace("1]", "2]"))
    (tmp_path / "deleted.py").unlink()
    assert differing("HEAD", None, tmp_path) == ["code.py", "deleted.py"]
    (tmp_path / "added.py").write_text(BEFORE)
    git("add", "--all")
    git("commit", "--quiet", "--message=two")
    assert differing("HEAD", None, tmp_path) == []
    assert differing("HEAD~", "HEAD", tmp_path) == ["added.py", "code.py", "deleted.py"]
