"""Tokens in the access table: issued, listed without their secrets, and removed with their owners."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.access import AccessTable, AddToken, RemoveToken, RemoveUser, SetPassword, Token, applied, encoded
from kvstore.access.table import TOKENS_OF_USER_MAX
from kvstore.access.tokens import TTL_MAX_MS, TTL_MIN_MS, hash_of, id_or_none, made
from kvstore.errors import InvalidRequest, NotThere
from kvstore.meta import codec
from kvstore.meta.tables.access import KIND
from tests.access.test_table import OTHER, TENANT, table_of

WORD = made(b"\x01" * 6, b"\x02" * 32)
ID = "010101010101"
ADD = AddToken(ID, "anna", hash_of(WORD), 60_000, 1_000_000, 1_000_000)


def numbered(number: int, **changes: object) -> AddToken:
    return replace(ADD, id=f"{number:012x}", **changes)  # type: ignore[arg-type]


def test_token_is_recognized_by_form_and_stored_as_hash() -> None:
    assert id_or_none(WORD) == ID
    table = table_of(*TENANT, ADD)
    assert table.tokens == (Token(ID, "anna", hash_of(WORD), 1_060_000),)
    assert table.tokens[0].is_right(WORD)
    assert not table.tokens[0].is_right(WORD[:-1] + b"3")
    assert hash_of(WORD) not in repr(table) + repr(ADD)
    assert WORD.decode()[-64:] not in codec.encode(table).decode()


@pytest.mark.parametrize("word", [b"", b"secret", WORD + b"0", WORD[:-1], WORD.upper(), b"kvt_", WORD + b"\n"])
def test_word_of_another_form_may_be_a_password(word: bytes) -> None:
    assert id_or_none(word) is None


def test_password_cannot_have_the_form_of_a_token() -> None:
    with pytest.raises(ValueError, match="form of a token"):
        encoded(WORD, bytes(16))


def test_table_without_tokens_of_earlier_release_is_read() -> None:
    table = table_of(*TENANT, ADD)
    assert KIND.decoded(codec.encode(table)) == table
    old = codec.encode(table_of(*TENANT)).decode()
    assert KIND.decoded(old.replace(',"tokens":[]', "").encode()) == table_of(*TENANT)


@pytest.mark.parametrize("change", [RemoveToken(ID), RemoveUser("anna"), SetPassword("anna", OTHER)])
def test_token_ends_with_revocation_user_or_password(change: object) -> None:
    others = table_of(*TENANT, AddToken("0" * 12, "root", hash_of(WORD), 60_000, ADD.now_ms, ADD.now_ms), ADD)
    assert [each.id for each in applied(others, change).tokens] == ["0" * 12]  # type: ignore[arg-type]


def test_revoking_unknown_token_is_refused() -> None:
    with pytest.raises(NotThere, match="no token"):
        applied(table_of(*TENANT), RemoveToken(ID))


def test_expired_tokens_free_slots_within_the_limit() -> None:
    table: AccessTable = table_of(*TENANT)
    for number in range(TOKENS_OF_USER_MAX):
        table = applied(table, numbered(number))
    with pytest.raises(InvalidRequest, match="revoke one first"):
        applied(table, numbered(99))
    expired_ms = ADD.now_ms + ADD.ttl_ms
    later = applied(table, numbered(99, now_ms=expired_ms, passed_ms=expired_ms))
    assert [each.id for each in later.tokens] == [f"{99:012x}"]


# docs/protocol.md P31
def test_server_unsure_of_its_date_removes_no_expired_tokens() -> None:
    """A server that had just started with a wrong wall clock used to remove tokens that were valid for hours."""
    table = applied(table_of(*TENANT), numbered(1))
    later = applied(table, numbered(2, now_ms=ADD.now_ms + ADD.ttl_ms, passed_ms=0))
    assert [each.id for each in later.tokens] == [f"{number:012x}" for number in (1, 2)]
    assert later.tokens[1].expires_ms == ADD.now_ms + 2 * ADD.ttl_ms


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (replace(ADD, user="nobody"), "no user"),
        (replace(ADD, ttl_ms=TTL_MIN_MS - 1), "1 second to 1 year"),
        (replace(ADD, ttl_ms=TTL_MAX_MS + 1), "1 second to 1 year"),
        (replace(ADD, id="x"), "12 hexadecimal digits"),
        (replace(ADD, hash="secret"), "SHA-256"),
        (RemoveToken(WORD.decode()), "12 hexadecimal digits"),
    ],
)
def test_invalid_token_is_refused_with_expected_form(change: AddToken | RemoveToken, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as failed:
        applied(table_of(*TENANT), change)
    assert WORD.decode()[-64:] not in str(failed.value)


def test_token_id_is_used_once() -> None:
    with pytest.raises(InvalidRequest, match="already exists"):
        applied(table_of(*TENANT, ADD), replace(ADD, hash=hash_of(b"another")))
