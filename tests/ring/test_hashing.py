"""Golden vectors of keys and tokens: they may never change."""

import pytest

from kvstore.ring import MURMUR3, hash_tag


@pytest.mark.parametrize(
    ("key", "tag"),
    [
        (b"plain", b"plain"),
        (b"{user1}.following", b"user1"),
        (b"foo{}{bar}", b"foo{}{bar}"),
        (b"foo{{bar}}zap", b"{bar"),
        (b"foo{bar}{zap}", b"bar"),
        (b"{unclosed", b"{unclosed"),
        (b"}{", b"}{"),
        (b"}{a}", b"a"),
    ],
)
def test_hash_tag_is_between_the_first_brace_and_the_next_closing_one(key: bytes, tag: bytes) -> None:
    assert hash_tag(key) == tag
    assert MURMUR3.token_of(key) == MURMUR3.token_of(tag) or b"{" in tag


@pytest.mark.parametrize(
    ("key", "token"),
    [(b"", 0), (b"a", 1009084850), (b"hello", 613153351), (b"hello, world", 345750399), (b"{hello}x", 613153351)],
)
def test_tokens_are_murmur3_unsigned(key: bytes, token: int) -> None:
    assert MURMUR3.token_of(key) == token
