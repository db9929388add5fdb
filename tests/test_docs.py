"""References in documents and comments are valid: files, rules of the protocol, packages."""

from __future__ import annotations

import io
import re
import tokenize
from collections import Counter
from functools import cache
from pathlib import PurePosixPath

import pytest

from loadtest.drills import crowds as crowds
from loadtest.drills.nemesis import FAULTS as DRILLS
from tests.sim.strikes.faults import FAULTS
from tests.source import ROOT, tracked_texts

FILE = re.compile(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.(?:py|md|proto))`")
TEST = re.compile(r"`(tests/[a-z_0-9/]+\.py)::(test_\w+)`")
RULE = re.compile(r"[A-Z]x?\d+")
COMMAND = re.compile(r"`kvstore ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?")
CITED = re.compile(r"docs/protocol\.md[\s,:(]+([A-Z]x?\d+(?:[\s,–-]+(?:and\s+)?[A-Z]x?\d+)*)")


@cache
def texts() -> dict[str, str]:
    """Return the tracked files that may name others."""
    return {path: text for path, text in tracked_texts().items() if path.endswith((".py", ".md", ".proto"))}


@cache
def rules() -> list[str]:
    """Return the rules of the protocol, as often as they are defined."""
    pages = [text for path, text in texts().items() if path.startswith("docs/reference/protocol/")]
    return [rule for text in pages for rule in re.findall(r"^\*\*([A-Z]x?\d+)\*\*", text, re.MULTILINE)]


def is_there(named: str, reader: str) -> bool:
    """A file may be named by its full path, or by the end of the path if the reader is near it."""
    here = PurePosixPath(reader).parent
    return any(path in tracked_texts() for path in (named, f"{here}/{named}")) or any(
        path.endswith(f"/{named}")
        for path in tracked_texts()
        if path.startswith(("kvstore/", "tests/", "docs/", "loadtest/"))
    )


def test_files_named_by_documents_exist() -> None:
    missing = [
        f"{path}: {match.group(1)}"
        for path, text in texts().items()
        if path.endswith(".md")
        for match in FILE.finditer(text)
        if not is_there(match.group(1), path)
    ]
    assert missing == []


def test_commands_named_by_documents_exist() -> None:
    page = "docs/reference/commands.md"
    commands = re.findall(r"^#+ kvstore ([a-z -]+)$", texts()[page], re.MULTILINE)
    groups = {each.split()[0] for each in commands if " " in each}
    missing = [
        f"{path}: {match[0]}"
        for path, text in texts().items()
        if not path.startswith("tests/")
        for match in COMMAND.finditer(text)
        if match[1] not in commands or (match[1] in groups and match[2] and f"{match[1]} {match[2]}" not in commands)
    ]
    assert commands
    assert missing == []


def test_tests_faults_and_drills_named_by_documents_exist() -> None:
    missing = []
    for path, text in texts().items():
        if not path.endswith(".md"):
            continue
        for file, name in TEST.findall(text):
            if file not in texts() or not re.search(rf"^\s*(?:async )?def {name}\(", texts()[file], re.MULTILINE):
                missing.append(f"{path}: {file}::{name}")
        missing += [f"{path}: fault {name}" for name in re.findall(r"\bfault `(\w+)`", text) if name not in FAULTS]
        missing += [f"{path}: drill {name}" for name in re.findall(r"\bdrill `(\w+)`", text) if name not in DRILLS]
    assert missing == []


@pytest.mark.parametrize(("letter", "count"), [("K", 44), ("C", 53)])
def test_conformance_rows_name_a_test_or_gap(letter: str, count: int) -> None:
    rows = re.findall(rf"^\| {letter}(\d+) \| (.*) \|$", texts()["docs/reference/conformance.md"], re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, count + 1))
    assert [number for number, row in rows if not TEST.search(row) and "missing: " not in row] == []
    named = [name for _, row in rows for name in re.findall(r"`(tests/[^`]*)`", row)]
    assert [name for name in named if not TEST.fullmatch(f"`{name}`")] == [], "each as path::name"


def test_cited_rules_are_in_the_protocol() -> None:
    missing = [
        f"{path}: {rule}"
        for path, text in texts().items()
        for cited in CITED.finditer(text)
        for rule in RULE.findall(cited.group(1))
        if rule not in rules()
    ]
    assert missing == []


def in_words(path: str) -> str:
    """Return the comments and strings of a Python file, which may cite rules."""
    words = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))  # the last: from 3.12 on
    tokens = tokenize.generate_tokens(io.StringIO(texts()[path]).readline)
    return "\n".join(token.string for token in tokens if token.type in words)


def named_rules(text: str) -> set[str]:
    """Return the rules that `text` names, alone or as a range: B9, R1-R7, K1 to K5."""
    found = set(re.findall(r"\b[A-Z]x?\d+\b", text))
    for prefix, first, last in re.findall(r"\b([A-Z]x?)(\d+)(?:-|–| to )\1(\d+)\b", text):
        found.update(f"{prefix}{number}" for number in range(int(first), int(last) + 1))
    return found


def not_cited_below(folder: str, wanted: set[str]) -> set[str]:
    """Return the rules that no comment and no string below `folder` names. Only a file that contains a missing rule is
    split into its tokens."""
    missing = set(wanted)
    for path, text in texts().items():
        is_ours = path.startswith(folder) and path.endswith(".py") and "_pb2" not in path
        if is_ours and path != "tests/test_docs.py" and missing & named_rules(text):
            missing -= named_rules(in_words(path))
    return missing


def test_every_rule_is_defined_once_and_cited_by_code_and_test() -> None:
    assert len(rules()) > 200
    assert [rule for rule, times in Counter(rules()).items() if times > 1] == []
    assert not_cited_below("kvstore/", set(rules())) == set(), "cite each in the code that keeps it"
    assert not_cited_below("tests/", set(rules())) == set(), "cite each in a test that fails without it"


def test_architecture_page_names_every_package() -> None:
    packages = {face.parent.name for face in (ROOT / "kvstore").glob("*/__init__.py")}
    named = set(re.findall(r"\| `kvstore/(\w+)` \|", texts()["docs/explanation/architecture.md"]))
    assert named == packages


def test_design_decisions_have_all_sections_and_are_listed() -> None:
    records = {path: text for path, text in texts().items() if re.fullmatch(r"docs/design/\d{4}-[a-z0-9-]+\.md", path)}
    assert len(records) > 20
    parts = ["Context", "Decision", "Consequences"]
    assert [path for path, text in records.items() if re.findall(r"^## (.*)$", text, re.MULTILINE)[:3] != parts] == []
    index = texts()["docs/design/index.md"]
    assert [path for path in records if f"]({PurePosixPath(path).name})" not in index] == []
