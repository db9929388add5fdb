from dataclasses import replace

import pytest

from kvstore.errors import Corrupted
from kvstore.meta.cookies import Cookie, decode_cookie, encode_cookie
from kvstore.types import BookieId

COOKIE = Cookie(
    bookie=BookieId("b1-3f2a9c"), journal_dirs=("/a", "/b"), ledger_dirs=("/data/bk",), instance_id="0e3c7b1c"
)
GOLDEN = b'5\nbookieHost: "b1-3f2a9c"\njournalDir: "/a,/b"\nledgerDirs: "1\\t/data/bk"\ninstanceId: "0e3c7b1c"\n'


def test_cookie_bytes_are_apaches() -> None:
    assert encode_cookie(COOKIE) == GOLDEN
    assert decode_cookie(GOLDEN, what="/c") == COOKIE


def test_index_directories_are_kept_if_there_are_any() -> None:
    with_index = replace(COOKIE, ledger_dirs=("/x", "/y"), index_dirs=("/i",))
    assert encode_cookie(with_index).endswith(b'indexDirs: "1\\t/i"\n')
    assert decode_cookie(encode_cookie(with_index), what="/c") == with_index


def test_previous_layout_is_read() -> None:
    assert decode_cookie(b"4" + GOLDEN[1:], what="/c") == COOKIE


def test_unknown_layout_is_refused_by_number() -> None:
    with pytest.raises(Corrupted, match="/c has cookie layout version '6'"):
        decode_cookie(b"6" + GOLDEN[1:], what="/c")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"5",
        b"5\n",
        b"5" * 5_000 + b"\n",
        b"5\n" + b"a {" * 50_000,
        b"5\nbookieHost: x",
        GOLDEN.replace(b'"1\\t', b'"2\\t'),
        GOLDEN.replace(b'"1\\t/data', b'"x'),
    ],
)
def test_malformed_cookie_is_reported_with_its_place(data: bytes) -> None:
    with pytest.raises(Corrupted, match="/c"):
        decode_cookie(data, what="/c")
