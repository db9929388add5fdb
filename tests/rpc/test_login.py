"""Credentials from the environment: the variables that name them, and their faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.rpc.login import (
    PASSWORD,
    PASSWORD_FILE,
    TOKEN,
    TOKEN_FILE,
    USER,
    Login,
    login_of_environment,
    without_login,
)
from kvstore.server.access.logins import basic_or_none


def test_no_login_without_user() -> None:
    assert login_of_environment({"KVSTORE_PASSWORD": "x"}) is None


def test_password_comes_from_file_or_variable(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_bytes(b"from a file\n")
    assert login_of_environment({"KVSTORE_USER": "anna", "KVSTORE_PASSWORD": "said"}) == Login("anna", b"said")
    environ = {"KVSTORE_USER": "anna", "KVSTORE_PASSWORD": "said", "KVSTORE_PASSWORD_FILE": str(file)}
    assert login_of_environment(environ) == Login("anna", b"from a file")


def test_missing_part_of_login_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="KVSTORE_PASSWORD_FILE"):
        login_of_environment({"KVSTORE_USER": "anna"})
    with pytest.raises(ConfigError, match="cannot be read"):
        login_of_environment({"KVSTORE_USER": "anna", "KVSTORE_PASSWORD_FILE": str(tmp_path / "none")})


def test_token_needs_no_user_and_appears_in_no_error(tmp_path: Path) -> None:
    word, file = f"kvt_{12 * '0'}_{64 * '1'}", tmp_path / "token"
    file.write_text(word + "\n")
    assert (
        login_of_environment({TOKEN: word}) == login_of_environment({TOKEN_FILE: str(file)}) == Login("", word.encode())
    )
    with pytest.raises(ConfigError, match="got both"):
        login_of_environment({TOKEN: word, USER: "anna", PASSWORD: "x"})
    with pytest.raises(ConfigError, match="kvstore token add") as failed:
        login_of_environment({TOKEN: word[:-1]})
    assert "111" not in str(failed.value)
    assert login_of_environment({TOKEN: word}, "KVSTORE_METADATA") is None


def test_password_of_text_is_refused_and_appears_in_no_error() -> None:
    with pytest.raises(ValueError, match="expected the password to be bytes, got str") as refused:
        Login("anna", "secret")  # type: ignore[arg-type]
    assert "secret" not in str(refused.value)


def test_header_is_parsed_as_it_was_created() -> None:
    assert basic_or_none(Login("anna", b"a:b\xff").header) == ("anna", b"a:b\xff")
    assert "a:b" not in repr(Login("anna", b"a:b"))


@pytest.mark.parametrize(
    "header", ["", "Basic", "Basic !", "Bearer YTpi", "Basic YQ==", "Basic /w==", "Basic " + "A" * 9000]
)
def test_invalid_header_is_no_login(header: str) -> None:
    assert basic_or_none(header) is None


def test_other_processes_get_no_login() -> None:
    environ = {"PATH": "/bin", USER: "anna", PASSWORD: "secret", PASSWORD_FILE: "/x", TOKEN: "x", TOKEN_FILE: "/x"}
    environ |= {f"KVSTORE_METADATA_{name}": "x" for name in ("USER", "PASSWORD", "PASSWORD_FILE")}
    assert without_login(environ) == {"PATH": "/bin"}
