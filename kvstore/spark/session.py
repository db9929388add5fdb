"""A Spark session on this machine, or what the environment needs for any: the right Java, the right Python."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.server.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VECTOR = "jdk.incubator.vector"
"""A module that Spark's launcher asks for by name, only to compute faster. Small Java runtimes lack it, and do not
start then."""
SETTINGS = {
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(8 << 20),  # 10,000 rows may be 10 GB
}


def open_session(name: str, *, master: str = "local[*]", settings: Mapping[str, str] | None = None) -> SparkSession:
    """The Spark session of this process, begun if there is none. Raises ConfigError without pyspark or a Java."""
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise ConfigError("Spark is not installed: install kvstore[spark]") from None
    os.environ |= environment(os.environ)
    builder = SparkSession.builder.appName(name).master(master)
    for key, value in (SETTINGS | dict(settings or {})).items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    return session


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What Spark's launcher needs in its environment. Spark would take `java` from JAVA_HOME or PATH whatever its
    version, and for its workers `python3` from PATH, which is another Python than that of a virtual environment.

    Raises ConfigError if there is no Java of the right version.
    """
    program = find_java(environ).resolve()
    home = program.parent.parent
    if VECTOR not in _modules_or_all(home):
        home = _without_vector(program)
    return {
        "JAVA_HOME": str(home),
        "PYSPARK_PYTHON": environ.get("PYSPARK_PYTHON", sys.executable),
        "PYSPARK_DRIVER_PYTHON": environ.get("PYSPARK_DRIVER_PYTHON", sys.executable),
    }


def _modules_or_all(home: Path) -> str:
    """What the Java says it holds; what one that does not say holds is taken to be enough."""
    try:
        lines = (home / "release").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return VECTOR
    return next((line for line in lines if line.startswith("MODULES=")), VECTOR)


def _without_vector(program: Path) -> Path:
    """A Java home whose `java` leaves the module out; it lasts as long as this process."""
    home = Path(tempfile.mkdtemp(prefix="kvstore-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    script = home / "bin" / "java"
    script.parent.mkdir()
    script.write_text(
        "#!/usr/bin/env bash\n"
        "arguments=()\n"
        f'for each in "$@"; do [ "$each" = --add-modules={VECTOR} ] || arguments+=("$each"); done\n'
        f'exec {shlex.quote(str(program))} "${{arguments[@]}}"\n'
    )
    script.chmod(0o755)
    return home
