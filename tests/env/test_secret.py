"""The cluster's secret: a file that only nodes read, and a key for each purpose."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvstore.env.secret import ClusterSecret, make_secret, read_secret
from kvstore.errors import ConfigError

LINE = "0123456789abcdef" * 4


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_secret_is_created_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "cluster.secret"
    made = make_secret(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text()) == 65
    assert make_secret(path) == made == read_secret(path)
    assert os.listdir(tmp_path) == ["cluster.secret"]
    assert make_secret(tmp_path / "another") != made


def test_each_purpose_has_its_own_key(tmp_path: Path) -> None:
    secret = read_secret(written(tmp_path / "s", f"{LINE}\n"))
    assert secret.derive("a").hex() == "46d98d16dc3e6dc3fd3efe29d36a070baffdd31460672334ac3e4ac0e273d56b"
    assert secret.derive("a") != secret.derive("b")
    assert len(secret.derive("b")) == 32


def test_second_line_is_accepted_beside_the_first(tmp_path: Path) -> None:
    both = read_secret(written(tmp_path / "s", f"{LINE}\n{LINE[::-1]}\n"))
    former = read_secret(written(tmp_path / "t", LINE[::-1]))
    assert both.derive_all("a")[1] == former.derive("a") != both.derive("a")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o666])
def test_secret_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=f"other accounts can use this secret: expected mode 0600, got {mode:04o}"):
        read_secret(written(tmp_path / "s", LINE, mode))


def test_secret_that_only_its_owner_reads_is_accepted(tmp_path: Path) -> None:
    assert read_secret(written(tmp_path / "s", LINE, 0o400)).keys == (bytes.fromhex(LINE),)


@pytest.mark.parametrize(
    "text",
    ["", "\n", LINE[:-1], f"{LINE}0", LINE.upper(), f"{LINE}\nword", "\n".join([LINE] * 5), f"{LINE}{' ' * 1000}"],
)
def test_malformed_secret_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        ConfigError, match="expected a cluster secret of 1 to 4 lines of 64 hexadecimal digits"
    ) as found:
        read_secret(written(tmp_path / "s", text))
    assert LINE[:8] not in str(found.value)


def test_missing_secret_error_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is missing: copy it here from another node"):
        read_secret(tmp_path / "s")
    with pytest.raises(ConfigError, match="is missing"):
        make_secret(tmp_path / "no directory" / "s")
    with pytest.raises(ConfigError, match="cannot be used: Is a directory"):
        read_secret(tmp_path)


def test_secret_is_not_shown_by_accident() -> None:
    secret = ClusterSecret((bytes(range(32)),))
    assert repr(secret) == "ClusterSecret()"
    with pytest.raises(ValueError, match="of 32 bytes"):
        ClusterSecret((b"short",))
