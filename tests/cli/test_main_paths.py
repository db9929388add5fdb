"""Parameters for paths refuse URLs: a backup in a folder named `s3:` is lost, though the exit code is 0."""

from __future__ import annotations

import inspect
import typing
from pathlib import Path
from typing import Any

import pytest

from kvstore import config
from kvstore.devcluster.local import LocalCluster
from kvstore.errors import ConfigError
from kvstore.places import fault_of, local_path
from kvstore.server.config import NodeConfig
from kvstore.spark.options import cluster_of
from kvstore.spark.snapshots.directory import DirectoryStore
from tests.cli.test_main_help import TREE, answer_of

URL = "s3://bucket/x"


def is_path(hint: Any) -> bool:
    return hint is Path or any(map(is_path, typing.get_args(hint)))


def path_parameters() -> list[tuple[tuple[str, ...], str, bool]]:
    """(command, parameter, whether it is an argument) of each parameter that is a path."""
    found = []
    for words, command in TREE.items():
        if hasattr(command, "commands"):
            continue
        hints = typing.get_type_hints(inspect.unwrap(command.callback))  # type: ignore[arg-type]
        for parameter in command.params:
            if is_path(hints.get(parameter.name or "")):
                found.append((words, parameter.opts[0], parameter.param_type_name == "argument"))
    return found


PARAMETERS = path_parameters()


def test_paths_of_the_commands_are_found() -> None:
    words = {(*command, word) for command, word, _ in PARAMETERS}
    assert {("snapshot", "create", "--data-dir"), ("up", "--data-dir")} <= words
    assert {
        ("load-tree", "folder"),
        ("put", "--file"),
        ("node", "run", "--config"),
        ("bench", "suite", "--out"),
    } <= words
    assert len(words) > 40


@pytest.mark.parametrize("url", [URL, "file:///tmp/x"])
@pytest.mark.parametrize(("command", "word", "is_argument"), PARAMETERS, ids=lambda value: str(value))
def test_each_path_of_each_command_refuses_a_url_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], word: str, is_argument: bool, url: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    given = [url] if is_argument else [word, url]
    code, output = answer_of(*command, *given, columns=300)
    assert code == 2, output
    said = " ".join(output.split())
    assert "expected a path on a file system" in said or "does not exist" in said, said
    assert sorted(tmp_path.rglob("*")) == [here]


@pytest.mark.parametrize("place", [URL, "s3a:/bucket", "hdfs://host/x", "file:///x", "HTTPS://x/y", Path(URL)])
def test_url_in_place_of_a_path_is_refused_with_the_expected_form(place: str | Path) -> None:
    with pytest.raises(
        ConfigError, match=r"expected a path on a file system that is mounted here, such as /backups .*, got"
    ):
        local_path(place)


@pytest.mark.parametrize("place", ["/x", "x", "./s3:/x", "x:y", "a/s3://x", ".", "", "c:/x", "12:30/x"])
def test_paths_are_paths(place: str) -> None:
    assert fault_of(place) == ""
    assert local_path(place) == Path(place)


def test_files_of_settings_data_frames_and_programs_refuse_urls_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data_dir: expected a path on a file system"):
        config.from_table({"id": "n1", "data_dir": URL}, NodeConfig)
    with pytest.raises(ConfigError, match="dataDir: expected a path on a file system"):
        cluster_of({"dataDir": URL}, {})
    with pytest.raises(ConfigError, match="tlsCa: expected a path on a file system"):
        cluster_of({"servers": "a:1", "tlsCa": URL}, {})
    for make in (LocalCluster, DirectoryStore):
        with pytest.raises(ConfigError, match="expected a path on a file system"):
            make(Path(URL))
