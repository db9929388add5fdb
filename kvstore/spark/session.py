"""Opens a local Spark session, and finds the Java and the Python with which any session must run."""

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
"""An optional Java module for faster arithmetic. Spark's launcher requests it by name, and small Java runtimes that
lack the module then fail to start."""
SETTINGS = {
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(8 << 20),  # the default of 10,000 rows may be 10 GB
}


def open_session(
    name: str, *, master: str = "local[*]", settings: Mapping[str, str] | None = None, niceness: int = 0
) -> SparkSession:
    """Return the Spark session of this process, and open one if there is none. `niceness` (see nice(1)) lowers the
    priority of this process and of the processes that it starts. Raises ConfigError without pyspark or Java."""
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
    """Keyword arguments of Popen that ignore `preexec_fn`.

    PySpark sets `preexec_fn` to protect the JVM from Ctrl-C. Python then runs code in a fork of this process, and if
    gRPC was used before, gRPC's fork handlers kill one fork in fifty. A new session protects the JVM from Ctrl-C as
    well.
    """

    def __setitem__(self, name: str, value: object) -> None:
        if name != "preexec_fn":
            super().__setitem__(name, value)


def _launch(conf: Any, niceness: int) -> None:
    """Start a JVM with this niceness. Linux may divide processors among sessions (autogroup, sched(7)), and a
    process's niceness then counts only within its session. So this function also gives the niceness to the JVM's
    session as a whole."""
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
    """Set the niceness of the session that a child of this process has created. Polls until the session exists,
    because a JVM is busy from its first moment."""
    while not launched.wait(0.02):
        for child in psutil.Process().children():
            with suppress(OSError):  # no autogroups on this machine, or the child has ended
                if os.getsid(child.pid) == child.pid:
                    Path(f"/proc/{child.pid}/autogroup").write_text(str(niceness))
                    return


def end_jvm() -> None:
    """Terminate the JVM. Without this, a JVM that is starting when this process is interrupted waits for this
    process forever."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if any(word.startswith("org.apache.spark.") for word in child.cmdline()):
                child.terminate()


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that Spark's launcher needs.

    Spark would use any `java` in JAVA_HOME or PATH, whatever its version. For its workers, Spark would use `python3`
    from PATH, which is not the Python of a virtual environment. Raises ConfigError if there is no Java of the right
    version.
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
    """Return the line with the modules of a Java runtime. A runtime without such a list is assumed to have all
    modules."""
    try:
        lines = (home / "release").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return VECTOR
    return next((line for line in lines if line.startswith("MODULES=")), VECTOR)


def _without_vector(program: Path) -> Path:
    """Return a Java home whose `java` removes the request for VECTOR from its arguments. The folder is deleted when
    this process exits."""
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
