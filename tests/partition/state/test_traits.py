"""The table of traits names every operation, and places what the constructors place."""

import itertools

import pytest

from kvstore.errors import InvalidRequest
from kvstore.partition.state import commands, traits
from kvstore.partition.state.commands import Code, Flag, Level, Op
from kvstore.partition.state.operations import MUTATIONS


def test_every_code_has_traits() -> None:
    assert list(traits.TRAITS) == list(Code)


def test_levels_and_sequences_match_the_constructors() -> None:
    level, seq = Level.SESSION, 77
    reads: list[Op] = [
        commands.get(b"k", level, seq),
        commands.meta(b"k", level, seq),
        commands.scan(b"a", b"z", 5, 0, level, seq),
        commands.scan_tokens(1, 5, level),
        commands.count(level),
        commands.range_(b"a", b"z", 5, 0, level, seq),
    ]
    assert {op[0] for op in reads} == traits.READS
    assert [op[traits.LEVEL_AT[op[0]]] for op in reads] == [level] * len(reads)
    assert [op[traits.SEQ_AT[op[0]]] for op in reads if op[0] in traits.SEQ_AT] == [seq] * 4


def test_every_write_except_delete_range_has_a_rule() -> None:
    assert set(MUTATIONS) == traits.WRITES - {Code.DELETE_RANGE}


# docs/protocol.md V3
def test_write_of_a_later_release_has_a_rule_for_its_leader() -> None:
    """A leader does what it knows. A read concerns no other server; a write of a later release is to be refused until
    its state's `log_version` allows it (V4). There is none: whoever adds one adds that, and the case to this test."""
    assert set(traits.SINCE) <= traits.READS


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
    """Each pair, so that a new flag is either compatible with every other one or listed here."""
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
    """A time to live of 0 was stored as one without an end, and a version without its flag as no condition."""
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
