"""Ways to break what keeps a stored entry its payload (docs/protocol.md, B36); tests/bookie/mutants.py runs all."""

from __future__ import annotations

from kvstore.bookie import adds, digests, index_rebuild, inventory, stored_copies
from kvstore.bookie.journal import segment
from kvstore.bookie.stored_copies import Copy
from tests.bookie.breakages.registry import hide, mutant, replace


@mutant("stores another payload over a stored entry")
def _overwrites() -> None:
    replace(stored_copies.StoredCopies, "compare", lambda _original: lambda *_: Copy.NONE)


@mutant("answers that another payload of a stored entry is stored")
def _takes_other_for_same() -> None:
    replace(
        stored_copies.StoredCopies,
        "compare",
        lambda original: lambda *of: _changed(original(*of), Copy.OTHER, Copy.IDENTICAL),
    )


@mutant("compares an add with synced entries only")
def _forgets_what_waits() -> None:
    replace(stored_copies.StoredCopies, "waiting", lambda _original: lambda *_: None)


@mutant("compares no add with the group that is being shown")
def _forgets_what_is_shown() -> None:
    hide(stored_copies.StoredCopies, "shown", property(lambda _: None, lambda _, __: None))


@mutant("takes a packet with another last-add-confirmed for another entry")
def _compares_bytes() -> None:
    for module in (stored_copies, inventory, index_rebuild):
        replace(module, "is_same_entry", lambda _original: lambda one, other, *_: one == other)


@mutant("takes all digests to be of the largest size")
def _digests_of_one_size() -> None:
    replace(digests.Digests, "size_of", lambda _original: lambda *_: digests.DIGEST_MAX)


@mutant("lets an ordinary add replace a damaged copy")
def _ordinary_repair() -> None:
    replace(
        stored_copies.StoredCopies,
        "compare",
        lambda original: lambda *of: _changed(original(*of), Copy.DAMAGED, Copy.NONE),
    )


@mutant("takes every error of a read for damage")
def _all_is_damage() -> None:
    replace(segment, "is_medium_error", lambda _original: lambda _error: True)


@mutant("lets a start write a later payload of an entry again")
def _start_overwrites() -> None:
    replace(adds.Adds, "store_again", lambda _original: adds.Adds._write)


@mutant("lets a start read a later payload of an entry for its first")
def _replay_overwrites() -> None:
    replace(inventory.Inventory, "_may_replace", lambda _original: lambda *_, **__: True)


@mutant("lets a rebuilt index file name a later payload of an entry")
def _rebuild_overwrites() -> None:
    replace(index_rebuild, "_may_replace", lambda _original: lambda *_: True)


@mutant("lets reclaim write an older copy over one that waits for a sync")
def _reclaim_overwrites() -> None:
    replace(adds.Adds, "store_copy", lambda _original: adds.Adds._write)


def _changed(found: Copy, what: Copy, by: Copy) -> Copy:
    return by if found is what else found
