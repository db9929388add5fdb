"""A Spark session on this machine, or what the environment needs for any: the right Java, the right Python."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from kvstore.env.java import find_java
from kvstore.errors import ConfigError
from kvstore.extras import install_hint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VECTOR = "jdk.incubator.vector"
"""A module that Spark's launcher asks for by name, only to compute faster. Small Java runtimes lack it, and do not
start then."""
SETTINGS = {
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(8 << 20),  # 10,000 rows may be 10 GB
}


def open_session(
    name: str, *, master: str = "local[*]", settings: Mapping[str, str] | None = None, niceness: int = 0
) -> SparkSession:
    """The Spark session of this process, begun if there is none. With `niceness` (nice(1) says how much) this process
    and what it begins give way to others on the machine. Raises ConfigError without pyspark or a Java."""
    try:
        from pyspark import SparkConf, SparkContext
        from pyspark.sql import SparkSession
    except ImportError:
        raise ConfigError(f"Spark is not installed: {install_hint('spark')}") from None
    os.environ |= environment(os.environ)
    chosen = {"spark.app.name": name, "spark.master": master, **SETTINGS, **(settings or {})}
    conf = SparkConf().setAll(list(chosen.items()))
    if SparkContext._gateway is None:
        atexit.register(end_jvm)
        _launch(conf, niceness)
    session: SparkSession = SparkSession.builder.config(conf=conf).getOrCreate()
    return session


class _NoPreexec(dict[str, Any]):
    """Arguments of Popen that take no `preexec_fn`. PySpark sets one, to keep Ctrl-C from the JVM; Python then runs in
    a fork of this process, and where gRPC has been used, its handlers of forks end one in fifty. A session of its own
    keeps Ctrl-C away as well."""

    def __setitem__(self, name: str, value: object) -> None:
        if name != "preexec_fn":
            super().__setitem__(name, value)


def _launch(conf: Any, niceness: int) -> None:
    """Begin a JVM, one that gives way with `niceness`. Linux may share out its processors among sessions, and niceness
    then counts within one session only (autogroup, sched(7)): so the JVM's own is, as a whole, as nice."""
    from pyspark import SparkContext
    from pyspark.java_gateway import launch_gateway

    launched = threading.Event()
    if niceness:
        os.nice(niceness)
        threading.Thread(target=_give_way, args=(niceness, launched), daemon=True).start()
    try:
        gateway = launch_gateway(conf, _NoPreexec(start_new_session=True))  # type: ignore[no-untyped-call]
        SparkContext._ensure_initialized(gateway=gateway)
    finally:
        launched.set()


def _give_way(niceness: int, launched: threading.Event) -> None:
    """The sessions that this process' children have begun; a JVM is busy from its first moment."""
    while not launched.wait(0.02):
        for child in psutil.Process().children():
            with suppress(OSError):  # no such shares on this machine, or the child has ended
                if os.getsid(child.pid) == child.pid:
                    Path(f"/proc/{child.pid}/autogroup").write_text(str(niceness))
                    return


def end_jvm() -> None:
    """A JVM that is being started when this process is interrupted would wait for it for ever."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if any(word.startswith("org.apache.spark.") for word in child.cmdline()):
                child.terminate()


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Make the environment that Spark's launcher needs. Spark would take `java` from JAVA_HOME or PATH whatever its
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
    """Return the modules that the Java says it has; one that does not say is taken to have all."""
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
