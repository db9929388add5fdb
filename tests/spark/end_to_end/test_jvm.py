"""A test that waits in vain leaves a usable JVM to the tests after it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.spark

CONFTEST = """
from tests.conftest import pytest_addoption, pytest_configure
from tests.spark.conftest import context, spark
"""
STUCK = """
import pytest

@pytest.mark.spark
@pytest.mark.timeout(5, func_only=True)
def test_one_that_waits_in_vain(spark):
    spark._jvm.java.lang.Thread.sleep(600_000)

@pytest.mark.spark
def test_another_of_its_file(spark):
    assert spark.range(3).count() == 3
"""
NEXT = """
import pytest

@pytest.mark.spark
def test_next_file(spark):
    assert spark.range(3).count() == 3
"""


def test_call_that_is_not_answered_keeps_the_next_file_from_nothing(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_1.py").write_text(STUCK)
    (tmp_path / "test_2.py").write_text(NEXT)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    spark\n")
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "200", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE_S,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        check=False,
    )
    assert "1 failed, 1 passed, 1 error" in answer.stdout, answer.stdout
    assert "what the JVM's threads did" in answer.stdout
    assert "java.lang.Thread.sleep" in answer.stdout
