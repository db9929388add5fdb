"""Tutorials, how-to guides and README.md: commands, settings and imports that they show exist, and every block that
people type is run by a test or says why it is not."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import config as toml
from kvstore.server.config import NodeConfig
from tests.cli.test_main_help import TREE
from tests.pages import Block, all_blocks, blocks, pages
from tests.source import ROOT, tracked_texts

BLOCKS = all_blocks()
SHELL = [block for block in BLOCKS if block.language == "sh"]
PYTHON = [block for block in BLOCKS if block.language == "python"]
TOML = [block for page in pages() for block in blocks(page) if block.language == "toml"]
MINIMAL = """\
id = "n1"
zookeeper = "zk1:2181"
data_dir = "/var/lib/kvstore"
secret_file = "/etc/kvstore/cluster.secret"
"""
"""Settings without which no file is complete."""
OTHERS = ("etcdctl ", "kubectl create")
"""Lines that begin so name `kvstore` and do not run it."""
ENDS = {"&&", "||", "|", ";", "(", ")", "<", ">", ">>", "&", "1>", "2>"}


def by_name(block: Block) -> str:
    return block.name


def test_blocks_are_run_or_say_why_not() -> None:
    assert len(BLOCKS) > 100
    unmarked = [each.name for each in BLOCKS if not each.mark and (each.language != "python")]
    assert unmarked == [], "write <!-- test: … --> or <!-- not tested: … --> above them"
    assert [each.name for each in BLOCKS if each.mark == "not tested" and len(each.how) < 20] == []


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.mark == "test" and each.how != "local"], ids=by_name)
def test_named_tests_read_the_page(block: Block) -> None:
    test = ROOT / block.how
    assert test.exists()
    assert Path(block.page).name in test.read_text(encoding="utf-8")


def test_reasons_name_tests_that_exist() -> None:
    named = [(each.name, path) for each in BLOCKS for path in re.findall(r"tests/[\w/]+(?:\.py)?", each.how)]
    assert [(name, path) for name, path in named if not (ROOT / path).exists()] == []


def test_files_are_run_by_a_later_block() -> None:
    for page in {each.page for each in PYTHON if each.title}:
        text = "\n".join(each.code for each in SHELL if each.page == page)
        for each in PYTHON:
            if each.page == page and each.title and not each.mark:
                assert each.title in text, each.name


@pytest.mark.parametrize("page", sorted({each.page for each in SHELL}))
def test_shell_blocks_parse(page: str) -> None:
    for block in SHELL:
        if block.page == page and "<this repository>" not in block.code and "ID " not in block.code:
            done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{block.name}: {done.stderr}"


def commands_of(code: str) -> Iterator[list[str]]:
    """Yield the words behind each `kvstore` of a shell block."""
    for line in re.sub(r"\\\n", " ", code).splitlines():
        if line.strip().startswith(OTHERS):
            continue
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            continue
        for at, word in enumerate(words):
            if word in ("kvstore", ".venv/bin/kvstore"):
                end = next((end for end in range(at + 1, len(words)) if words[end] in ENDS), len(words))
                if words[at + 1 : at + 2] != ["kvstore"]:  # as after `sudo -u`
                    yield words[at + 1 : end]


def fault_or_none(words: list[str]) -> str | None:
    """Return what is wrong with a command of `kvstore`, if anything."""
    length = max((n for n in range(1, 4) if tuple(words[:n]) in TREE), default=0)
    if not length:
        return f"no such command: {' '.join(words[:3])}"
    options = {option for each in TREE[tuple(words[:length])].params for option in each.opts}
    unknown = {word.partition("=")[0] for word in words if re.match(r"--\w", word)} - options - {"--help"}
    return f"{' '.join(words[:length])}: no such option: {', '.join(sorted(unknown))}" if unknown else None


@pytest.mark.parametrize("page", sorted({each.page for each in SHELL}))
def test_commands_and_options_exist(page: str) -> None:
    faults = [
        f"{block.name}: {fault}"
        for block in SHELL
        if block.page == page
        for words in commands_of(block.code)
        if words and re.match(r"[a-z]", words[0]) and (fault := fault_or_none(words))
    ]
    assert faults == []


def test_commands_in_the_text_exist() -> None:
    """Those in backticks that begin with `kvstore`, and are not cut short."""
    faults = []
    for page in pages():
        for words in re.findall(r"`kvstore ([a-z][^`…]*)`", (ROOT / page).read_text(encoding="utf-8")):
            fault = fault_or_none(re.sub(r"[,;]", " ", words).split())
            faults += [f"{page}: {words}: {fault}"] if fault else []
    assert faults == []


@pytest.mark.parametrize("block", TOML, ids=by_name)
def test_settings_are_accepted(block: Block) -> None:
    table: dict[str, Any] = tomllib.loads(block.code)
    whole = {**tomllib.loads(MINIMAL), **table}
    if "uri" in table.get("metadata", {}):
        del whole["zookeeper"]
    assert toml.build_or_faults(whole, NodeConfig)[1] == []


@pytest.mark.parametrize("block", PYTHON, ids=by_name)
def test_python_compiles_and_its_imports_exist(block: Block) -> None:
    compile(block.code, block.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(ast.parse(re.sub(r"^(\s*)async (for|with)", r"\1\2", block.code, flags=re.MULTILINE))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvstore"):
            if "locust" in str(node.module):  # to import it patches the standard library
                continue
            module = importlib.import_module(node.module or "")
            assert [name.name for name in node.names if name.name != "*" and not hasattr(module, name.name)] == []


def test_verdicts_and_messages_are_those_of_the_code() -> None:
    """The strings that a reader compares with what the programs print."""
    code = "".join(
        text for path, text in tracked_texts().items() if path.startswith("kvstore/") and path.endswith(".py")
    )
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    shown = {
        "docs/how-to/check-data-with-fsck.md": r"^\| `([A-Z][^`]*)` \|",
        "docs/how-to/upgrade.md": r"^\| (?:a replica says )?`([^`]*)`",
        "docs/how-to/use-several-disks.md": r"^You see: `([^`]*)`",
    }
    for page, pattern in shown.items():
        found = re.findall(pattern, (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert found, page
        parts = {part.strip(" ,.:") for text in found for part in re.split(r"…|\bn3\b|\d+|'", text)}
        assert sorted(part for part in parts if len(part) > 5 and part not in code) == [], page
