"""What documents and comments point at is there: files, rules of the protocol, packages."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from tests.source import ROOT, tracked_texts

TEXTS = {path: text for path, text in tracked_texts().items() if path.endswith((".py", ".md", ".proto"))}
FILES = set(tracked_texts())
FILE = re.compile(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.(?:py|md|proto))`")
RULE = re.compile(r"[A-Z]\d+")
CITED = re.compile(r"docs/protocol\.md[\s,:(]+([A-Z]\d+(?:[\s,–-]+(?:and\s+)?[A-Z]\d+)*)")


def is_there(named: str, reader: str) -> bool:
    """A file may be named by its path, or by the end of it where the reader is."""
    here = PurePosixPath(reader).parent
    return any(path in FILES for path in (named, f"{here}/{named}")) or any(
        path.endswith(f"/{named}") for path in FILES if path.startswith(("kvstore/", "tests/", "docs/", "loadtest/"))
    )


def test_files_that_documents_name_are_there() -> None:
    missing = [
        f"{path}: {match.group(1)}"
        for path, text in TEXTS.items()
        if path.endswith(".md")
        for match in FILE.finditer(text)
        if not is_there(match.group(1), path)
    ]
    assert missing == []


def test_rules_that_are_cited_are_in_the_protocol() -> None:
    rules = set(re.findall(r"\*\*([A-Z]\d+)\*\*", TEXTS["docs/protocol.md"]))
    assert len(rules) > 100
    missing = [
        f"{path}: {rule}"
        for path, text in TEXTS.items()
        for cited in CITED.finditer(text)
        for rule in RULE.findall(cited.group(1))
        if rule not in rules
    ]
    assert missing == []


def test_the_architecture_names_every_package() -> None:
    packages = {face.parent.name for face in (ROOT / "kvstore").glob("*/__init__.py")}
    named = set(re.findall(r"\| `kvstore/(\w+)` \|", TEXTS["ARCHITECTURE.md"]))
    assert named == packages
