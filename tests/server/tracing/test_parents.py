"""The parent span of a call: how it is read, and that malformed ones are ignored."""

import pytest

from kvstore.server.tracing.parents import Parent, parent_of, parse, spell

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
FOUND = Parent(int(TRACE, 16), int(SPAN, 16), True)


def test_parent_is_read_as_written() -> None:
    assert parse(f"00-{TRACE}-{SPAN}-01") == FOUND
    assert parse(spell(FOUND.trace, FOUND.span)) == FOUND
    assert parse(spell(1, 2)) == Parent(1, 2, True)


@pytest.mark.parametrize(("flags", "is_sampled"), [("00", False), ("01", True), ("02", False), ("03", True)])
def test_lowest_flag_bit_is_the_sampling_decision(flags: str, is_sampled: bool) -> None:
    assert parse(f"00-{TRACE}-{SPAN}-{flags}") == FOUND._replace(is_sampled=is_sampled)


def test_later_traceparent_version_may_have_more_fields() -> None:
    assert parse(f"01-{TRACE}-{SPAN}-01-more") == FOUND


@pytest.mark.parametrize(
    "text",
    [
        "",
        TRACE,
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f" 00-{TRACE}-{SPAN}-01",
    ],
)
def test_malformed_parent_is_ignored(text: str) -> None:
    assert parse(text) is None


def test_parent_is_found_among_headers_unless_there_are_two() -> None:
    header = ("traceparent", f"00-{TRACE}-{SPAN}-01")
    assert parent_of([("other", "x"), header]) == FOUND
    assert parent_of([header, header]) is None
    assert parent_of([("traceparent", header[1].encode())]) is None
    assert parent_of([]) is None
