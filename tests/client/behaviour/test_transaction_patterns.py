"""The patterns of the how-to guides on transactions, with many callers at once. Their functions come from the pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from textwrap import dedent
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.errors import ConditionFailed
from tests.client.model import ModelCluster
from tests.client.serving import Servers, serving_in_a_thread
from tests.pages import blocks

WORKERS = 8


@pytest.fixture
def servers() -> Iterator[Servers]:
    with serving_in_a_thread(ModelCluster()) as running:
        yield running


@pytest.fixture
def store(servers: Servers) -> Iterator[Client]:
    with Client(servers.patient_url) as client:
        yield client


def functions_of(page: str) -> dict[str, Any]:
    """Return the functions of a page's blocks, without the programs that call them."""
    names: dict[str, Any] = {}
    for each in blocks(f"docs/how-to/{page}.md"):
        if each.language == "python":
            code = re.split(r"^with Client", dedent(each.code), flags=re.MULTILINE)[0]
            exec(compile(code, each.name, "exec"), names)
    return names


def owners_of(store: Client, *keys: bytes) -> int:
    return len({store.cluster.partition_of(key) for key in keys})


def test_one_of_many_users_gets_an_email_address(store: Client) -> None:
    page = functions_of("keep-a-unique-secondary-key")
    users = [b"%d" % number for number in range(WORKERS)]
    assert owners_of(store, b"email/same", *(b"user/" + each for each in users)) > 1
    with ThreadPoolExecutor(WORKERS) as pool:
        done = list(pool.map(lambda user: page["register"](store, user, b"same", "Ann"), users))
    (winner,) = [user for user, is_done in zip(users, done, strict=True) if is_done]
    assert list(store.keys(prefix=b"user/")) == [b"user/" + winner]
    assert page["find"](store, b"same") == store.get(b"user/" + winner)
    assert page["find"](store, b"other") is None


def test_address_changes_leave_one_index_for_each_user(store: Client) -> None:
    page = functions_of("keep-a-unique-secondary-key")
    for number in range(WORKERS):
        page["register"](store, b"%d" % number, b"%d@example.com" % number, "Ann")

    def wander(number: int) -> int:
        refused = 0
        for step in range(5):
            try:
                page["change_email"](store, b"%d" % number, b"%d@example.com" % ((number + step) % (WORKERS + 2)))
            except ConditionFailed:
                refused += 1
        return refused

    with ThreadPoolExecutor(WORKERS) as pool:
        assert sum(pool.map(wander, range(WORKERS))) > 0, "nobody wanted the address of another user"
    indexes = {key.removeprefix(b"email/"): item.value for key, item in store.scan(prefix=b"email/")}
    assert sorted(indexes.values()) == [b"%d" % number for number in range(WORKERS)]
    for email, user in indexes.items():
        assert email in store.get(b"user/" + user).value  # type: ignore[union-attr]


def test_each_item_moves_once_and_is_always_in_one_queue(store: Client) -> None:
    page = functions_of("move-an-item-between-queues")
    items = [b"%03d" % number for number in range(40)]
    assert owners_of(store, *(b"inbox/" + each for each in items), *(b"done/" + each for each in items)) > 1
    store.put_many({b"inbox/" + each: b"of " + each for each in items})
    seen = list[int]()

    def work(number: int) -> list[bytes]:
        moved = list[bytes]()
        if number == 0:
            for item in items:
                seen.append(len(page["places"](store, item, b"inbox/", b"done/")))
            return moved
        while (item := page["move_first"](store, b"inbox/", b"done/")) is not None:
            moved.append(item)
        return moved

    with ThreadPoolExecutor(WORKERS) as pool:
        moved = [item for each in pool.map(work, range(WORKERS)) for item in each]
    assert sorted(moved) == items
    assert set(seen) == {1}
    assert {key: item.value for key, item in store.scan(prefix=b"")} == {
        b"done/" + each: b"of " + each for each in items
    }
