"""The operations of one connection that may be in flight at the same time."""

from __future__ import annotations

import pytest

from kvstore.partition.state import commands
from kvstore.server.redis.pipeline.key_hazards import KEPT_MAX, KeyHazards

READ, WRITE = commands.Get(b"k"), commands.Put(b"k", b"v")


@pytest.mark.parametrize(
    ("first", "second", "blocks"),
    [
        (READ, READ, False),
        (WRITE, WRITE, False),
        (WRITE, READ, True),
        (READ, WRITE, True),
        (commands.Increment(b"k", 1), commands.Meta(b"k"), True),
        (commands.Meta(b"k"), commands.Delete(b"k"), True),
        (WRITE, commands.Get(b"j"), False),
        (commands.Batch(b"j", (commands.Put(b"j", b""), WRITE)), READ, True),
        (commands.Batch(b"j", (commands.Put(b"j", b""), READ)), WRITE, True),
        (READ, commands.Batch(b"j", (commands.Put(b"j", b""), WRITE)), True),
        (commands.Batch(b"j", (READ,)), commands.Get(b"j"), False),
    ],
)
def test_operation_waits_for_a_conflicting_one_on_its_key(
    first: commands.Op, second: commands.Op, blocks: bool
) -> None:
    hazards = KeyHazards()
    hazards.note([first], 5)
    assert hazards.block([commands.Get(b"other"), second], 5) is blocks
    assert hazards.block([second], 6) is False, "what has been answered is waited for no more"


def test_hazards_of_answered_commands_are_forgotten() -> None:
    hazards = KeyHazards()
    for number in range(3 * KEPT_MAX):
        hazards.note([commands.Put(b"%d" % number, b"")], number)
        hazards.answered(number + 1, number - 10)
    assert len(hazards.writes) <= KEPT_MAX + 1
    assert hazards.block([commands.Get(b"%d" % (3 * KEPT_MAX - 1))], 3 * KEPT_MAX - 11)
    hazards.answered(3 * KEPT_MAX, 3 * KEPT_MAX)
    assert hazards.writes == {}
