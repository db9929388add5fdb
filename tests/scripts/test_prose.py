"""The prose checker finds what it is to find, and nothing in good text."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import prose

HERE = Path("kvstore/example.py")
PAGE = Path("docs/how-to/example.md")


def rules(path: Path, tmp_path: Path, text: str) -> list[str]:
    (tmp_path / path.name).write_text(text)
    return [each.rule for each in prose.findings(tmp_path / path.name)]


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ('"""Whether a client is known."""', "begins with Whether"),
        ('def f():\n    """Return x. Who waits is asked."""', "begins with Who"),
        ("# It is made anew.", "'anew' (write: again)"),
        ('raise ValueError(f"want a key, got {key}")', "'want a key, got' (write: expected X, got Y)"),
        ('log.info("the node goes on")', "'goes on' (write: continue)"),
        (f'"""{"word " * 36}."""', "37 words in a sentence"),
        (f"def test_{'x' * 70}(): ...", "75 characters in a test's name"),
        ("def test_a_lock_is_kept(): ...", "an article at the beginning of a test's name"),
        ("# The clock stands still.", "'stands still' (write: pause, hang, stop)"),
        ("# It has a thread of its own.", "'a thread of its own' (write: its own X, a separate X)"),
        ("# Ledgers, as the leader last saw.", "'as the leader last saw' (write: when X last checked)"),
    ],
)
def test_prose_of_a_module_that_breaks_a_rule_is_found(source: str, rule: str, tmp_path: Path) -> None:
    found = rules(HERE, tmp_path, source)
    assert len(found) == 1
    assert found[0].startswith(rule.partition(" words")[0])


@pytest.mark.parametrize(
    ("page", "count"),
    [
        ("What is a ledger?\n", 0),
        ("# What a bookie stores\n\nA bookie stores entries.\n", 0),
        ("```\nWho waits\n```\n", 0),
        ("| `What` | Whose key it is |\n", 1),
        ("- Whoever asks gets an answer.\n", 1),
        ("word " * 1501, 1),
    ],
)
def test_prose_of_a_page_is_checked_outside_of_code_and_headings(page: str, count: int, tmp_path: Path) -> None:
    assert len([each for each in rules(PAGE, tmp_path, page) if "in a sentence" not in each]) == count


@pytest.mark.parametrize(
    ("folder", "is_bounded"),
    [
        ("how-to", True),
        ("explanation", True),
        ("tutorials", True),
        ("design", True),
        ("reference", False),
        ("reference/protocol", False),
        ("design/figures", False),
    ],
)
def test_length_of_a_page_is_bounded_except_in_the_reference(
    folder: str, is_bounded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = Path("docs", folder, "example.md")
    page.parent.mkdir(parents=True)
    page.write_text("word. " * 1501)
    assert [each.rule for each in prose.findings(page)] == (["1501 words on a page"] if is_bounded else [])


def test_each_release_in_the_changelog_is_bounded(tmp_path: Path) -> None:
    page = tmp_path / "CHANGELOG.md"
    page.write_text("# Changelog\n\n## 0.3.0\n\n" + "word. " * 1499 + "\n\n## 0.2.0\n\n" + "word. " * 1500)
    assert [(each.line, each.rule) for each in prose.findings(page)] == [(7, "1501 words about 0.2.0")]


@pytest.mark.parametrize(
    ("message", "count"),
    [
        ("Stop candidates that cannot write\n\nBecause they win.\n", 0),
        ("stopped the candidates.\nBecause they win.\n", 2),
        (f"Stop {'x' * 72}\n", 1),
    ],
)
def test_commit_message_has_an_imperative_subject(message: str, count: int, tmp_path: Path) -> None:
    file = tmp_path / "message"
    file.write_text(message)
    assert len(list(prose.commit(file))) == count
