"""The table of traits names every operation."""

import itertools

import msgspec
import pytest
from msgspec import structs

from kvstore.errors import InvalidRequest
from kvstore.partition.state import commands, traits
from kvstore.partition.state.commands import Code, Flag
from kvstore.partition.state.operations import MUTATIONS
from kvstore.partition.state.scope import bound
from kvstore.partition.state.tokens import Tokens


def test_every_code_has_traits() -> None:
    assert list(traits.TRAITS) == list(Code)


def test_every_code_has_a_class() -> None:
    assert set(commands.TYPES) == set(Code)


def test_keyless_operations_take_the_tokens_that_are_assigned() -> None:
    for code in traits.KEYLESS:
        kind = commands.TYPES[code]
        required = [field for field in structs.fields(kind) if field.required]
        op = kind(*[b"" if field.encode_name in ("key", "end") else 0 for field in required])
        limited = bound(op, Tokens([]))
        assert (limited.assigned, op.assigned) == (Tokens([]), None)
        assert msgspec.msgpack.encode(limited) == msgspec.msgpack.encode(op), "the tokens are not sent"


def test_every_write_of_a_client_except_delete_range_has_a_rule() -> None:
    assert set(MUTATIONS) == traits.WRITES - {Code.DELETE_RANGE} - traits.INTERNAL


@pytest.mark.parametrize("code", Code)
def test_unsupported_flags_are_refused(code: Code) -> None:
    for flag in (*Flag, Flag(0)):
        if not flag or flag & traits.FLAGS[code]:
            expires_ms = 5 if flag == Flag.RELATIVE_TTL else 0
            assert traits.check_options(code, int(flag), expires_ms) == flag
        else:
            with pytest.raises(InvalidRequest, match=f"expected {code.name} with .*, got {flag.name} too"):
                traits.check_options(code, int(flag))
    with pytest.raises(InvalidRequest, match="got 0x100000"):
        traits.check_options(code, 1 << 20)


def test_contradicting_flags_are_refused() -> None:
    """Tests each pair, so that a new flag is either compatible with every other one or listed here."""
    refused = set()
    for code, (one, other) in itertools.product(Code, itertools.combinations(Flag, 2)):
        if (one | other) & traits.FLAGS[code] == one | other:
            try:
                traits.check_options(code, int(one | other), 5 if Flag.RELATIVE_TTL in one | other else 0)
            except InvalidRequest:
                refused.add((one, other))
    assert refused == {
        (Flag.IF_ABSENT, Flag.IF_PRESENT),
        (Flag.IF_ABSENT, Flag.IF_VERSION),
        (Flag.IF_PRESENT, Flag.IF_VERSION),
        (Flag.KEEP_TTL, Flag.RELATIVE_TTL),
        (Flag.IF_NO_TTL, Flag.IF_TTL),
        (Flag.IF_NO_TTL, Flag.IF_LONGER),
        (Flag.IF_NO_TTL, Flag.IF_SHORTER),
        (Flag.IF_LONGER, Flag.IF_SHORTER),
    }
    with pytest.raises(InvalidRequest, match="expected KEEP_TTL or an expiry"):
        traits.check_options(Code.PUT, int(Flag.KEEP_TTL), 5)


@pytest.mark.parametrize("code", Code)
def test_unsupported_options_are_refused(code: Code) -> None:
    """Regression: a time to live of 0 was stored as unlimited, and a version without its flag as no condition."""
    with pytest.raises(InvalidRequest, match="expected"):
        traits.check_options(code, int(Flag.RELATIVE_TTL), 0)
    with pytest.raises(InvalidRequest, match="expected IF_VERSION beside a version"):
        traits.check_options(code, 0, version=1)
    if traits.FLAGS[code] & Flag.RELATIVE_TTL:
        assert traits.check_options(code, 0, 5) == 0
    else:
        with pytest.raises(InvalidRequest, match="expected no expiry"):
            traits.check_options(code, 0, 5)
    if traits.FLAGS[code] & Flag.IF_VERSION:
        assert traits.check_options(code, int(Flag.IF_VERSION), version=1) == Flag.IF_VERSION
