"""`--help` of every command, as it is printed."""

import json
import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from kvstore.cli.main import BRANCHES, branches_of, build
from kvstore.cli.watching import for_people, line_of
from kvstore.client import Change, Item
from scripts.commands import commands

TREE = dict(commands(typer.main.get_command(build())))


def answer_of(*words: str, columns: int) -> tuple[int, str]:
    """Return the exit code and all output. One shared tree: building it takes longer than asking it."""
    with CliRunner().isolation(env={"COLUMNS": str(columns)}) as (_, _, said):
        with pytest.raises(SystemExit) as end:
            TREE[()].main([*words], prog_name="kvstore")
        sys.stdout.flush()
        sys.stderr.flush()
        return end.value.code, said.getvalue().decode()  # type: ignore[return-value]


@pytest.mark.parametrize("path", TREE, ids=lambda path: " ".join(path) or "kvstore")
def test_help_is_printed_and_explains_each_option(path: tuple[str, ...]) -> None:
    code, said = answer_of(*path, "--help", columns=200)
    assert code == 0, said
    shown = re.sub(r"\s+", " ", said)
    for parameter in TREE[path].params:
        text = getattr(parameter, "help", None)
        if text and not getattr(parameter, "hidden", False):
            assert re.sub(r"\s+", " ", text) in shown, f"{parameter.name}: {text!r} is not shown as it is written"


@pytest.mark.parametrize("path", TREE, ids=lambda path: " ".join(path) or "kvstore")
def test_every_command_and_option_has_a_help_text(path: tuple[str, ...]) -> None:
    command = TREE[path]
    assert command.help or path == ()
    unexplained = [each.name for each in command.params if not getattr(each, "help", None)]
    assert unexplained == []


@pytest.mark.parametrize("word", sorted({word for words in BRANCHES.values() for word in words}))
def test_branch_of_the_command_line_contains_all_its_commands(word: str) -> None:
    alone = dict(commands(typer.main.get_command(build(branches_of([word])))))
    assert {path for path in alone if path[:1] == (word,)} == {path for path in TREE if path[:1] == (word,)} != set()


def test_wrong_command_shows_the_complete_tree() -> None:
    assert branches_of(["gett"]) == branches_of(["--help"]) == branches_of([]) == list(BRANCHES)
    assert branches_of(["--version"]) == []
    assert {path[0] for path in TREE if path} == {word for words in BRANCHES.values() for word in words}


def test_command_on_keys_loads_nothing_of_a_server() -> None:
    script = (
        "import sys; from kvstore.cli.main import branches_of, build; build(branches_of(['get']));"
        "print([name for name in sys.modules if name.startswith(('kvstore.bookie', 'kvstore.server', 'kvstore.wal'))])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


ANY_NUMBER = {"seed"}
CHECKED_LATER = {"nodes", "partitions", "replicas", "port_offset"}
"""Options that `up` also checks against each other."""


@pytest.mark.parametrize("path", TREE, ids=lambda path: " ".join(path) or "kvstore")
def test_number_without_sense_is_wrong_usage_and_no_traceback(path: tuple[str, ...]) -> None:
    described = {each.name: each.type_descriptor for each in TREE[path].params if hasattr(each, "type_descriptor")}
    numbers = {name: each for name, each in described.items() if each.annotation in (int, float)}
    boundless = [name for name, each in numbers.items() if each.parameter_info.min is None]
    assert set(boundless) <= (ANY_NUMBER | CHECKED_LATER if path == ("up",) else ANY_NUMBER)
    endless = {name for name, each in numbers.items() if each.parameter_info.max is None}
    assert endless & {"timeout", "interval", "count"} == set()


def test_every_command_with_output_can_print_json() -> None:
    leaves = {" ".join(path): command for path, command in TREE.items() if not hasattr(command, "commands")}
    without = {name for name, each in leaves.items() if not any("--json" in one.opts for one in each.params)}
    assert without == {"node run", "bench suite"}, "a node logs; the suite writes its figures to --out"


LOCAL = {"up", "down", "node run", "node check", "cluster init", "access found", "bench suite"} | {
    *(f"cluster metadata {name}" for name in ("export", "import", "secure", "open")),
    *(f"snapshot {name}" for name in ("list", "prune", "legal-hold", "diff", "delta")),
}
"""These commands are about the processes of this machine, or create a cluster or its first administrator."""


def test_every_cluster_command_accepts_directory_zookeeper_or_server() -> None:
    leaves = {" ".join(path): command for path, command in TREE.items() if not hasattr(command, "commands")}
    for name in sorted(leaves.keys() - LOCAL):
        there = {option for each in leaves[name].params for option in each.opts}
        assert {"--data-dir", "--zookeeper", "--server"} - there == set(), name


def test_change_is_one_line_of_json() -> None:
    written = Change(b"key", Item(b"two\nlines", 7, 5, 1_000, 0), 7, 1_000, "p1", False)
    assert json.loads(line_of(written)) == {
        "partition": "p1",
        "version": 7,
        "key": "key",
        "value": "two\nlines",
        "created": 5,
        "time_ms": 1_000,
    }
    assert "\n" not in line_of(written)
    part = json.loads(line_of(written._replace(transaction="p1/7/2", transaction_keys=3)))
    assert (part["transaction"], part["transaction_keys"]) == ("p1/7/2", 3)
    gone = json.loads(line_of(Change(b"\xff", None, 8, 1_001, "p1", True)))
    assert (gone["deleted"], gone["expired"], gone["key_base64"]) == (True, True, "/w==")
    assert for_people(written) == "p1/7 key = two\\nlines"
    assert for_people(Change(b"key", None, 8, 1_001, "p1", False)) == "p1/8 key deleted"


def test_promises_of_the_design_hold() -> None:
    promised = {
        *("up", "down", "status", "node run", "node drain", "get", "put", "del", "scan", "watch", "load-tree"),
        *("verify-tree", "ring show", "ring locate", "ledger list", "ledger show", "ledger read", "ledger recover"),
        *(
            "ledger delete",
            "ledger give-up",
            "bookie list",
            "bookie cookie",
            "bookie scrub",
            "bookie decommission",
            "bookie recover",
            "autorecovery status",
        ),
        *("autorecovery list", "autorecovery enable", "autorecovery disable", "autorecovery lost-bookie-delay"),
        *("autorecovery run", "partition list", "partition show", "cluster init", "fsck", "bench run", "bench suite"),
    }
    assert promised - {" ".join(path) for path in TREE} == set()
