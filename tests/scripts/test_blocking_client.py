"""The blocking client is the asyncio client without `await`, as scripts/blocking_client.py writes it."""

from __future__ import annotations

import re
from difflib import unified_diff

import pytest

from scripts import blocking_client
from scripts.blocking_client import CLIENT, ROOT, SOURCES, WORDS, blocking, target_of


@pytest.mark.parametrize("source", SOURCES)
def test_blocking_module_is_current(source: str) -> None:
    path = f"{CLIENT}/{target_of(source)}"
    found = (ROOT / path).read_text(encoding="utf-8").splitlines(keepends=True)
    wanted = blocking(source).splitlines(keepends=True)
    difference = "".join(unified_diff(found, wanted, path, f"{path} from {source}"))
    assert not difference, f"run `make generate`\n{difference}"


def test_each_word_occurs_in_a_source() -> None:
    texts = [(ROOT / CLIENT / source).read_text(encoding="utf-8") for source in SOURCES]
    assert [word for word in WORDS if not any(re.search(word, text) for text in texts)] == []


def test_sentence_that_is_not_in_the_source_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "aio/closing.py", {"Things that are open": "Things"})
    with pytest.raises(ValueError, match="found 0 times: 'Things that are open'"):
        blocking("aio/closing.py")


def test_word_of_asyncio_in_a_blocking_module_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {word: other for word, other in WORDS.items() if "enter" not in word and "await" not in word}
    monkeypatch.setattr(blocking_client, "WORDS", kept)
    with pytest.raises(ValueError, match=r"expected no 'await' in kvstore/client/blocking/closing.py, line 23"):
        blocking("aio/closing.py")
