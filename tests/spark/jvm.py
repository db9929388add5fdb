"""Ends a JVM that a test has waited for in vain."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DUMP_S = 60.0
SAID_MAX = 60_000
"""Characters."""


def give_up_jvm() -> str:
    """End the JVM of this process, if there is one, and return the stacks of its threads; the next session starts
    another.

    A test that ends during a call leaves the call's connection without its answer. PySpark has one connection for each
    thread, so the next call waits behind the old one, also in the next file, or reads its answer as its own.
    """
    if "pyspark" not in sys.modules:
        return ""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    gateway = SparkContext._gateway
    process: subprocess.Popen[bytes] | None = getattr(gateway, "proc", None)
    said = "" if process is None else _threads_of(process.pid)
    if process is not None:
        process.kill()
        process.wait()
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None
    return said


def _threads_of(pid: int) -> str:
    program = Path(os.environ.get("JAVA_HOME", "/")) / "bin" / "jstack"
    try:
        found = subprocess.run([program, str(pid)], capture_output=True, text=True, timeout=DUMP_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:  # a small Java has none; a JVM that hangs gives no output
        return f"no stacks of the JVM's threads: {error}"
    return (found.stdout or found.stderr)[:SAID_MAX]
