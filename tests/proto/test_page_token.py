"""Page tokens: valid ones, which applications keep, and invalid ones."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.core.scanning import Bounds
from kvstore.errors import InvalidRequest
from kvstore.limits import KEY_BYTES_MAX
from kvstore.proto.page_token import TOKEN_CHARS_MAX, PageToken, decode

BOUND = st.binary(max_size=40)


def sealed(data: bytes) -> str:
    return urlsafe_b64encode(data + crc32(data).to_bytes(4, "big")).rstrip(b"=").decode()


@pytest.mark.parametrize(
    ("token", "text"),
    [
        (PageToken(b"user/17\0", b"user0"), "AQAIdXNlci8xNwAFdXNlcjCbIM70"),
        (PageToken(b"", b"", True), "AQEAAJg60k4"),
    ],
)
def test_page_tokens_have_golden_bytes(token: PageToken, text: str) -> None:
    """DO NOT CHANGE: applications keep tokens and exchange them."""
    assert (token.encode(), decode(text)) == (text, token)


# docs/protocol.md P37
@given(start=BOUND, end=BOUND, reverse=st.booleans())
def test_page_token_round_trips(start: bytes, end: bytes, reverse: bool) -> None:
    assert decode(PageToken(start, end, reverse).encode()) == PageToken(start, end, reverse)


def test_page_token_fits_the_longest_keys() -> None:
    token = PageToken(b"k" * KEY_BYTES_MAX + b"\0", b"l" * KEY_BYTES_MAX)
    assert len(token.encode()) <= TOKEN_CHARS_MAX
    assert decode(token.encode()) == token


def test_page_token_detects_flipped_bits_and_cuts() -> None:
    text = PageToken(b"user/17\0", b"user0").encode()
    data = urlsafe_b64decode(text + "=" * (-len(text) % 4))
    for bit in range(8 * len(data)):
        other = bytearray(data)
        other[bit // 8] ^= 1 << bit % 8
        with pytest.raises(InvalidRequest):
            decode(urlsafe_b64encode(other).rstrip(b"=").decode())
    for end in range(len(text)):
        with pytest.raises(InvalidRequest):
            decode(text[:end])


@pytest.mark.parametrize(
    "text", ["", "x", "nonsense", "AQEAAJg60k4=", " AQEAADBjcwE", "AQEAAFndZy\n", "ключ", "A" * (TOKEN_CHARS_MAX + 1)]
)
def test_malformed_page_token_is_refused_with_the_expected_form(text: str) -> None:
    with pytest.raises(InvalidRequest, match="expected a page token of an earlier page"):
        decode(text)


def test_future_page_token_version_is_refused_by_number() -> None:
    with pytest.raises(InvalidRequest, match="expected a page token of version 1, got version 2"):
        decode(sealed(b"\x02\0\0\0"))


@pytest.mark.parametrize(
    "data",
    [
        b"\x01\x02\0\0",
        b"\x01\0\x05a",
        b"\x01\0\0\0left",
        b"\x01\0\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x01\0\x82\x20",
    ],
)
def test_page_token_with_a_valid_checksum_and_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="expected a page token of an earlier page"):
        decode(sealed(data))


@pytest.mark.parametrize(
    ("bounds", "token"),
    [
        (Bounds(b"a", b"b"), PageToken(b"a5", b"b")),
        (Bounds(b"a", b"b"), PageToken(b"a", b"a5", True)),
        (Bounds(b"a", b""), PageToken(b"zz", b"")),
        (Bounds(b"", b"b"), PageToken(b"", b"a", True)),
        (Bounds(b"", b""), PageToken(b"a5", b"b")),  # no range beside it
        (Bounds(b"", b""), PageToken(b"a", b"a5", True)),
    ],
)
def test_page_token_next_to_a_range_reports_what_remains(bounds: Bounds, token: PageToken) -> None:
    assert bounds.rest(token.encode()) == token


@pytest.mark.parametrize(
    ("bounds", "token"),
    [
        (Bounds(b"a", b"b"), PageToken(b"b5", b"c")),
        (Bounds(b"a", b"z"), PageToken(b"b5", b"c")),  # of a part: the scan would end at c
        (Bounds(b"a", b""), PageToken(b"b5", b"c")),
        (Bounds(b"a", b"z"), PageToken(b"b", b"c", True)),  # and here at b
        (Bounds(b"", b"z"), PageToken(b"b", b"c", True)),
        (Bounds(b"b", b"c"), PageToken(b"a5", b"c")),
        (Bounds(b"b", b"c"), PageToken(b"b", b"d", True)),
        (Bounds(b"b", b"c"), PageToken(b"b", b"", True)),
        (Bounds(b"b", b"c"), PageToken(b"b5", b"")),
    ],
)
def test_page_token_of_another_range_ends_no_scan(bounds: Bounds, token: PageToken) -> None:
    """docs/protocol.md P37."""
    with pytest.raises(InvalidRequest, match="expected a page token of keys from"):
        bounds.rest(token.encode())
