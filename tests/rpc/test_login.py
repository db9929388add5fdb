"""Credentials of the environment: what names them, and what is wrong with them."""

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


def test_without_a_user_there_is_no_login() -> None:
    assert login_of_environment({"KVSTORE_PASSWORD": "x"}) is None


def test_a_file_or_a_variable_holds_the_password(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_bytes(b"from a file\n")
    assert login_of_environment({"KVSTORE_USER": "anna", "KVSTORE_PASSWORD": "said"}) == Login("anna", b"said")
    environ = {"KVSTORE_USER": "anna", "KVSTORE_PASSWORD": "said", "KVSTORE_PASSWORD_FILE": str(file)}
    assert login_of_environment(environ) == Login("anna", b"from a file")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="KVSTORE_PASSWORD_FILE"):
        login_of_environment({"KVSTORE_USER": "anna"})
    with pytest.raises(ConfigError, match="cannot be read"):
        login_of_environment({"KVSTORE_USER": "anna", "KVSTORE_PASSWORD_FILE": str(tmp_path / "none")})


def test_a_token_needs_no_user_and_shows_itself_in_no_error(tmp_path: Path) -> None:
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


def test_a_header_is_read_as_it_was_made() -> None:
    assert basic_or_none(Login("anna", b"a:b\xff").header) == ("anna", b"a:b\xff")
    assert "a:b" not in repr(Login("anna", b"a:b"))


@pytest.mark.parametrize(
    "header", ["", "Basic", "Basic !", "Bearer YTpi", "Basic YQ==", "Basic /w==", "Basic " + "A" * 9000]
)
def test_a_header_that_is_none_is_nobody(header: str) -> None:
    assert basic_or_none(header) is None


def test_a_process_that_is_no_client_is_given_no_login() -> None:
    environ = {"PATH": "/bin", USER: "anna", PASSWORD: "secret", PASSWORD_FILE: "/x", TOKEN: "x", TOKEN_FILE: "/x"}
    environ |= {f"KVSTORE_METADATA_{name}": "x" for name in ("USER", "PASSWORD", "PASSWORD_FILE")}
    assert without_login(environ) == {"PATH": "/bin"}
