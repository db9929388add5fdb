"""Spark gets the intended Java and Python, whatever is on PATH."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.spark.session import environment


def java_home(directory: Path, *, modules: str) -> Path:
    """A Java 21 that prints its arguments."""
    (directory / "bin").mkdir(parents=True)
    (directory / "release").write_text(f'JAVA_VERSION="21.0.1"\nMODULES="{modules}"\n')
    program = directory / "bin" / "java"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    return directory


def test_spark_runs_with_our_java_and_our_python(tmp_path: Path) -> None:
    home = java_home(tmp_path / "java", modules="java.base jdk.incubator.vector")
    found = environment({"KVSTORE_JAVA": str(home), "JAVA_HOME": "/elsewhere"})
    assert found == {"JAVA_HOME": str(home), "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}


def test_requested_python_is_kept(tmp_path: Path) -> None:
    home = java_home(tmp_path / "java", modules="java.base jdk.incubator.vector")
    assert environment({"KVSTORE_JAVA": str(home), "PYSPARK_PYTHON": "/p"})["PYSPARK_PYTHON"] == "/p"


def test_small_java_is_not_asked_for_a_module_that_it_lacks(tmp_path: Path) -> None:
    home = java_home(tmp_path / "a java", modules="java.base")
    program = Path(environment({"KVSTORE_JAVA": str(home)})["JAVA_HOME"]) / "bin" / "java"
    arguments = ["--add-modules=jdk.incubator.vector", "-Dx=a b", "Main"]
    answer = subprocess.run([program, *arguments], capture_output=True, text=True, check=True, timeout=20)
    assert answer.stdout.splitlines() == ["-Dx=a b", "Main"]
    assert os.access(program, os.X_OK)


def test_old_java_is_refused(tmp_path: Path) -> None:
    home = java_home(tmp_path / "java", modules="java.base")
    (home / "release").write_text('JAVA_VERSION="11.0.2"\n')
    with pytest.raises(ConfigError, match="expected Java 17"):
        environment({"KVSTORE_JAVA": str(home)})


FORKS = """
import os, sys
from pathlib import Path
from kvstore.spark.session import open_session

forked = []
os.register_at_fork(before=lambda: forked.append(1))
try:
    open_session("forks", master="local[1]", niceness=int(sys.argv[1]))
except Exception as error:
    print("JAVA_GATEWAY_EXITED" in str(error), int(Path(sys.argv[2]).read_text()) != os.getsid(0), len(forked))
"""


@pytest.mark.parametrize("niceness", ["0", "5"])
def test_jvm_is_no_fork_of_this_process_and_hears_no_ctrl_c(niceness: str, tmp_path: Path) -> None:
    """Code in a fork of a process that has used gRPC may be ended by its handlers. A Java that tells its session and
    ends shows this as well as one that continues."""
    home, note = java_home(tmp_path / "java", modules="java.base jdk.incubator.vector"), tmp_path / "session"
    (home / "bin" / "java").write_text(f"#!/bin/sh\ncut -d ' ' -f 6 /proc/$$/stat > {note}\nexit 1\n")
    command = [sys.executable, "-c", FORKS, niceness, str(note)]
    environ = {**os.environ, "KVSTORE_JAVA": str(home)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=400, start_new_session=True)
    assert done.stdout.split() == ["True", "True", "0"], done.stderr
