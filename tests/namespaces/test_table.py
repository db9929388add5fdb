"""Namespace tables cannot be built with faults, and rejected changes state what they expect."""

import pytest

from kvstore.errors import InvalidRequest, NotThere
from kvstore.namespaces import Add, Namespace, NamespaceTable, Remove, Set, applied
from kvstore.namespaces.table import NAMESPACES_MAX, Prefixes

SHOP = Namespace(name="shop", prefix=b"shop/", keys_max=10, bytes_max=1000)
BLOG = Namespace(name="blog", prefix=b"blog/")


@pytest.mark.parametrize(("one", "other"), [(b"a", b"a"), (b"a", b"ab"), (b"a/", b"a/b/c"), (b"\xff", b"\xff\xff")])
def test_overlapping_prefix_is_refused(one: bytes, other: bytes) -> None:
    table = applied(NamespaceTable(), Add(Namespace(name="one", prefix=one)))
    with pytest.raises(InvalidRequest, match="overlap"):
        applied(table, Add(Namespace(name="other", prefix=other)))


def test_key_belongs_to_namespace_of_its_prefix_or_none() -> None:
    spaces = [
        Namespace(name=f"n{number}", prefix=prefix) for number, prefix in enumerate([b"a/", b"a0", b"b", b"\xff"])
    ]
    prefixes = Prefixes(tuple(spaces))
    for key in (b"", b"a", b"a/", b"a/x", b"a0", b"a1", b"b", b"bz", b"c", b"\xff", b"\xff\xff\x00"):
        wanted = next((each for each in spaces if key.startswith(each.prefix)), None)
        assert prefixes.find(key) == wanted, key
        assert key.startswith(prefixes.all) == (wanted is not None), key


def test_key_has_no_namespace_when_table_is_empty() -> None:
    assert Prefixes(()).find(b"k") is None
    assert not b"k".startswith(Prefixes(()).all)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "a b"},
        {"name": "x" * 64},
        {"prefix": b""},
        {"prefix": b"p" * 1025},
        {"keys_max": -1},
        {"bytes_max": 1 << 54},
        {"burst": 5},
        {"ttl_ms": -5},
    ],
)
def test_invalid_namespace_is_refused(wrong: dict[str, object]) -> None:
    given = {"name": "a", "prefix": b"a", **wrong}
    with pytest.raises(ValueError, match="expected"):
        Namespace(**given)  # type: ignore[arg-type]


def test_number_of_namespaces_is_limited_for_metrics() -> None:
    many = tuple(Namespace(name=f"n{number:04}", prefix=b"%04d" % number) for number in range(NAMESPACES_MAX + 1))
    assert len(NamespaceTable(namespaces=many[:-1]).namespaces) == NAMESPACES_MAX
    with pytest.raises(ValueError, match="at most 256"):
        NamespaceTable(namespaces=many)


def test_repeated_change_changes_nothing() -> None:
    table = applied(NamespaceTable(), Add(SHOP))
    assert applied(table, Add(SHOP)) == table
    assert (
        applied(applied(table, Set(name="shop", keys_max=5)), Set(name="shop", keys_max=5)).namespaces[0].keys_max == 5
    )


def test_unset_limits_are_kept() -> None:
    table = applied(applied(NamespaceTable(), Add(SHOP)), Add(BLOG))
    table = applied(table, Set(name="shop", ops_per_s=100, burst=7))
    found = table.find_or_none("shop")
    assert found is not None
    assert (found.keys_max, found.bytes_max, found.ops_per_s, found.burst) == (10, 1000, 100, 7)
    found = applied(table, Set(name="shop", ops_per_s=0)).find_or_none("shop")
    assert found is not None
    assert (found.ops_per_s, found.burst) == (0, 0)
    assert table.find_or_none("blog") == BLOG


def test_existing_name_with_another_prefix_is_refused() -> None:
    table = applied(NamespaceTable(), Add(SHOP))
    with pytest.raises(InvalidRequest, match="already exists"):
        applied(table, Add(Namespace(name="shop", prefix=b"other/")))
    with pytest.raises(InvalidRequest, match="at least one limit"):
        applied(table, Set(name="shop"))
    for change in (Set(name="nobody", keys_max=1), Remove("nobody")):
        with pytest.raises(NotThere, match="nobody"):
            applied(table, change)
    assert applied(table, Remove("shop")) == NamespaceTable()
