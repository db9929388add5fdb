"""The certificates and the node.toml of docs/tutorials/secure-cluster.md are such that a node starts with them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands import kvstore
from tests.pages import blocks

PAGE = "docs/tutorials/secure-cluster.md"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here to make certificates")
def test_node_check_accepts_certificates_and_file_of_tutorial(tmp_path: Path) -> None:
    found = list(blocks(PAGE))
    (making,) = [each for each in found if each.how == "tests/cli/node/test_check_tutorial.py"]
    (file,) = [each for each in found if each.language == "toml"]
    done = subprocess.run(["bash", "-eu"], cwd=tmp_path, input=making.code, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (tmp_path / "data").mkdir()
    secret = tmp_path / "cluster.secret"
    secret.write_text("0" * 63 + "1\n")
    secret.chmod(0o600)
    config = tmp_path / "node.toml"
    config.write_text(
        file.code.replace("/etc/kvstore", str(tmp_path)).replace("/var/lib/kvstore", str(tmp_path / "data"))
    )
    checked = kvstore("node", "check", "--config", str(config), "--strict")
    assert checked.returncode == 0, checked.stdout + checked.stderr
