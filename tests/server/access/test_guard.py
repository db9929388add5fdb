"""The guard's check of many keys at once."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.server.access.guard import all_begin_with

_byte = st.sampled_from((b"a", b"b", b"\xff"))
_some = st.lists(_byte, max_size=3).map(b"".join)


@given(st.lists(_some, max_size=3).map(tuple), st.lists(_some, min_size=1, max_size=5))
@example((), [b"a"])
@example((b"a", b"c"), [b"a", b"b", b"c"])
def test_all_begin_with_agrees_with_a_check_of_each_key(prefixes: tuple[bytes, ...], keys: list[bytes]) -> None:
    assert all_begin_with(prefixes, keys) == all(key.startswith(prefixes) for key in keys)
