"""The table of traits names every operation, and places what the constructors place."""

from kvstore.partition.state import commands, traits
from kvstore.partition.state.commands import Code, Level, Op
from kvstore.partition.state.operations import MUTATIONS


def test_every_code_has_its_traits() -> None:
    assert list(traits.TRAITS) == list(Code)


def test_levels_and_sequences_stand_where_the_constructors_put_them() -> None:
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


def test_every_write_but_the_delete_of_a_range_has_its_rule() -> None:
    assert set(MUTATIONS) == traits.WRITES - {Code.DELETE_RANGE}


# docs/protocol.md V3
def test_no_write_of_a_later_release_is_without_a_rule_for_its_leader() -> None:
    """A leader does what it knows. A read concerns no other server; a write of a later release is to be refused until
    its state's `log_version` allows it (V4). There is none: whoever adds one adds that, and the case to this test."""
    assert set(traits.SINCE) <= traits.READS
