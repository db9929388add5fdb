"""Two servers prove to each other that they belong to one cluster (docs/protocol.md H8)."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from kvstore.server.peer.frames import FrameError
from kvstore.server.peer.proof import NONCE_BYTES, PROOF_BYTES, CalledSide, CallingSide, Credentials, HandshakeRefused
from kvstore.types import ServerId
from kvstore.versions import LINK_FIRST, LINK_LATEST

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
N1, N2, N3 = ServerId("n1"), ServerId("n2"), ServerId("n3")
_nonces = count(1)


def nonce() -> bytes:
    return next(_nonces).to_bytes(NONCE_BYTES, "big")


def of(server: ServerId, *keys: bytes, cluster: str = "c1") -> Credentials:
    return Credentials(server, cluster, keys or (KEY,), nonce)


def words(hello: bytes) -> list[bytes]:
    """Return the words of the greeting after the first, as the Redis interface passes them."""
    lines, found = hello.split(b"\r\n", 1)[1], []
    while lines:
        size, _, lines = lines.partition(b"\r\n")
        found.append(lines[: int(size[1:])])
        lines = lines[int(size[1:]) + 2 :]
    return found[1:]


def meet(caller: Credentials, called: Credentials, to: ServerId = N2) -> tuple[CallingSide, CalledSide]:
    """Return both sides after the complete exchange. Raises the error that one of them raises."""
    calling = CallingSide(caller, to)
    answering = CalledSide(called, words(calling.hello()))
    proof, _ = calling.take(answering.nonce())
    calling.take(answering.take(proof))
    return calling, answering


def test_servers_of_one_cluster_trust_each_other() -> None:
    calling, answering = meet(of(N1), of(N2))
    assert calling.is_proven
    assert answering.caller == N1


def test_proof_has_golden_bytes() -> None:
    """The bytes are fixed. They may also arrive in pieces of one byte each."""
    caller = CallingSide(replace(of(N1), nonce=lambda: b"a" * NONCE_BYTES), N2)
    hello = b"*6\r\n$12\r\nKVSTORE.PEER\r\n$1\r\n2\r\n$2\r\nn1\r\n$2\r\nn2\r\n$2\r\nc1\r\n$32\r\n" + b"a" * 32 + b"\r\n"
    assert caller.hello() == hello
    called = CalledSide(replace(of(N2), nonce=lambda: b"b" * NONCE_BYTES), words(hello))
    assert called.nonce() == b"+" + b"62" * 32 + b"\r\n"
    proof = b"".join(caller.take(bytes([byte]))[0] for byte in called.nonce())
    assert proof.hex() == "89db24aaf7172118145782cfec75d18eee24348c64fe742bce60dae0f46b2027"
    answer = b"".join(called.take(bytes([byte])) for byte in proof)
    assert answer == b"+a3b548b24dfd0f36ddd666ff5927ede0ca2df9ce0985daf9d5c01d8b71d5054c\r\n"
    for byte in answer[:-1]:
        assert caller.take(bytes([byte])) == (b"", b"")
        assert not caller.is_proven
    assert caller.take(b"\n" + b"rest") == (b"", b"rest")
    assert caller.is_proven


@pytest.mark.parametrize(
    ("caller", "called", "answer"),
    [
        (of(N1, cluster="c2"), of(N2), "this server is of another cluster"),
        (of(N1), of(N3), "this is server n3, not 'n2'"),
        (of(N2), of(N2), "expected another server, got 'n2'"),
        (of(N1, OTHER_KEY), of(N2), "not proven: the cluster's secret is another one"),
        (of(N1), of(N2, OTHER_KEY), "not proven: the cluster's secret is another one"),
    ],
    ids=["cluster", "server", "itself", "caller's secret", "called one's secret"],
)
def test_invalid_greetings_are_refused_with_reason(caller: Credentials, called: Credentials, answer: str) -> None:
    with pytest.raises(HandshakeRefused) as refused:
        meet(caller, called)
    assert answer in refused.value.answer


def test_refusal_reveals_nothing_about_the_cluster() -> None:
    with pytest.raises(HandshakeRefused) as refused:
        meet(of(N1, cluster="theirs"), of(N2, cluster="ours"))
    assert "ours" not in refused.value.answer + str(refused.value)


def test_old_and_new_secret_are_accepted_during_rotation() -> None:
    for caller, called in (
        ((KEY,), (KEY, OTHER_KEY)),
        ((KEY, OTHER_KEY), (KEY,)),
        ((OTHER_KEY, KEY), (KEY, OTHER_KEY)),
        ((KEY, OTHER_KEY), (OTHER_KEY, KEY)),
        ((OTHER_KEY,), (OTHER_KEY, KEY)),
    ):
        assert meet(of(N1, *caller), of(N2, *called))[0].is_proven


def test_other_version_is_refused_by_number_before_anything_else() -> None:
    below, above = b"%d" % (LINK_FIRST - 1), b"%d" % (LINK_LATEST + 1)
    for said in ([below, b"n1", b"n2"], [above, b"n1", b"n2", b"c1", bytes(32), b"more"]):
        with pytest.raises(HandshakeRefused, match=f"peer version: expected {LINK_FIRST} to {LINK_LATEST}, got"):
            CalledSide(of(N2), said)


@pytest.mark.parametrize("said", [[b"2", b"n1", b"n2"], [b"2", b"n1", b"n2", b"c1", bytes(31)]])
def test_truncated_greeting_is_refused(said: list[bytes]) -> None:
    with pytest.raises(HandshakeRefused, match="a nonce of 32 bytes"):
        CalledSide(of(N2), said)


def test_recorded_proof_cannot_be_replayed() -> None:
    calling = CallingSide(of(N1), N2)
    first = CalledSide(of(N2), words(calling.hello()))
    proof, _ = calling.take(first.nonce())
    assert first.take(proof)
    again = CalledSide(of(N2), words(calling.hello()))
    with pytest.raises(HandshakeRefused, match="not proven"):
        again.take(proof)


def test_recorded_answer_cannot_be_replayed() -> None:
    calling = CallingSide(of(N1), N2)
    called = CalledSide(of(N2), words(calling.hello()))
    answer = called.take(calling.take(called.nonce())[0])
    again = CallingSide(of(N1), N2)
    again.take(called.nonce())
    with pytest.raises(FrameError, match="the process at the address of n2 does not know the cluster's secret"):
        again.take(answer)


def test_server_cannot_be_used_to_prove_for_another() -> None:
    """Reflection: an attacker without the secret calls back, and forwards the other side's messages."""
    calling = CallingSide(of(N1), N2)
    target = CalledSide(of(N2), words(calling.hello()))
    proof, _ = calling.take(target.nonce())
    with pytest.raises(FrameError, match="does not know"):
        calling.take(b"+" + proof.hex().encode() + b"\r\n")  # its own proof, as if it were the other side's
    towards_n1 = CalledSide(of(N1), [b"2", b"n2", b"n1", b"c1", words(calling.hello())[4]])
    with pytest.raises(HandshakeRefused, match="not proven"):
        towards_n1.take(proof)
    as_another = CalledSide(of(N2), [b"2", b"n3", b"n2", b"c1", words(calling.hello())[4]])
    with pytest.raises(HandshakeRefused, match="not proven"):
        as_another.take(proof)


@pytest.mark.parametrize("size", [PROOF_BYTES + 1, 1 << 20])
def test_bytes_after_unanswered_proof_are_refused(size: int) -> None:
    called = CalledSide(of(N2), words(CallingSide(of(N1), N2).hello()))
    assert called.take(bytes(PROOF_BYTES - 1)) == b""
    with pytest.raises(HandshakeRefused, match="a proof of 32 bytes and nothing more"):
        called.take(bytes(size))


@pytest.mark.parametrize(
    "said", [b"-ERR no\r\n", b"+OK\r\n", b"+" + b"zz" * 32 + b"\r\n", b"x" * 2000, b"+" + b"00" * 32 + b"\r\nmore"]
)
def test_foreign_server_ends_the_call(said: bytes) -> None:
    with pytest.raises(FrameError):
        CallingSide(of(N1), N2).take(said)


def test_credentials_do_not_show_their_keys() -> None:
    assert repr(KEY) not in repr(of(N1))


# docs/protocol.md V3
@pytest.mark.parametrize("version", [2, 3])
def test_caller_chooses_a_common_version(version: int) -> None:
    calling = CallingSide(of(N1), N2, version)
    answering = CalledSide(of(N2), words(calling.hello()), least=2, most=3)
    proof, _ = calling.take(answering.nonce())
    calling.take(answering.take(proof))
    assert calling.is_proven


def test_attacker_cannot_lower_the_version() -> None:
    calling = CallingSide(of(N1), N2, 3)
    lowered = [b"2", *words(calling.hello())[1:]]
    answering = CalledSide(of(N2), lowered, least=2, most=3)
    proof, _ = calling.take(answering.nonce())
    with pytest.raises(HandshakeRefused, match="not proven"):
        answering.take(proof)


# docs/protocol.md V2
def test_server_below_cluster_version_is_refused() -> None:
    with pytest.raises(HandshakeRefused, match="peer version: expected 3, got '2'"):
        CalledSide(of(N2), words(CallingSide(of(N1), N2, 2).hello()), least=3, most=3)
