"""Golden vectors of keys and tokens: they may never change."""

import pytest

from kvstore.errors import InvalidRequest
from kvstore.ring import HASHES, MURMUR3, SLOTS_HASH, KeyHash, hash_named, hash_tag
from kvstore.ring.hashing import slot_of, slot_of_token


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


# docs/protocol.md H14
@pytest.mark.parametrize(
    ("key", "slot", "token"),
    [
        (b"", 0, 0),
        (b"123456789", 12739, 3339637755),
        (b"foo", 12182, 3193690775),
        (b"{user1000}.following", 3443, 902702709),
        (b"{user1000}.followers", 3443, 902702709),
        (b"foo{}{bar}", 8363, 2192364761),
        (b"foo{{bar}}zap", 4015, 1052624411),
    ],
)
def test_tokens_begin_with_the_slot_of_redis_cluster(key: bytes, slot: int, token: int) -> None:
    """The slots are those that redis-server answers to CLUSTER KEYSLOT."""
    assert slot_of(key) == slot
    assert SLOTS_HASH.token_of(key) == token
    assert slot_of_token(token) == slot
    assert token % SLOTS_HASH.unit == MURMUR3.token_of(key) >> 14


def test_tokens_of_many_keys_are_those_of_each(key_hash: KeyHash) -> None:
    plain = [b"k%d" % number for number in range(100)]
    for keys in (plain, [*plain, b"{tag}a", b"{tag}b", b"{}", b"}{", b""]):
        assert key_hash.tokens_of(keys) == [key_hash.token_of(key) for key in keys]


def test_sequential_keys_spread_evenly_over_ranges(key_hash: KeyHash) -> None:
    counts = [0] * 48
    for number in range(100_000):
        counts[key_hash.token_of(b"user:%d" % number) * 48 >> 32] += 1
    assert max(counts) * 48 <= 1.1 * 100_000


def test_key_hashes_have_names() -> None:
    assert [hash_named(each) for each in ("", "murmur3", "slots")] == [MURMUR3, MURMUR3, SLOTS_HASH]
    assert set(HASHES) == {"murmur3", "slots"}
    with pytest.raises(InvalidRequest, match="expected one of the key hashes murmur3, slots, got 'md5'"):
        hash_named("md5")
