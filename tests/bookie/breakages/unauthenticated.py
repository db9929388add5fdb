"""Ways to break a bookie's treatment of unauthenticated peers: TLS, given ids, raw adds."""

from __future__ import annotations

from typing import Any

from kvstore.bookie import identity, raw_adds
from kvstore.bookie.connections import service as service_module
from kvstore.env import accepting, transport
from tests.bookie.breakages.registry import hide, mutant, replace


@mutant("formats a bookie with a given id that is already known")
def _takes_any_id() -> None:
    async def pass_over(*_: Any, **__: Any) -> None:
        """Ask nobody."""

    replace(identity._Identification, "_refuse_if_taken", lambda _original: pass_over)


@mutant("treats another process's start under the same given id as its own")
def _takes_it_for_its_own() -> None:
    async def take(self: Any, cookie: Any, version: int) -> None:
        identity._note_start(self._disk, self._config.journal_dir, version, version + 1)
        await self._claim(cookie, version)

    replace(identity._Identification, "_take", lambda _original: take)


@mutant("finishes a format that was begun under another id")
def _finishes_anything() -> None:
    def make(_original: Any) -> Any:
        return lambda self, unfinished: self._read_cookie(f"{unfinished[0]}/FORMATTING") if unfinished else None

    replace(identity._Identification, "_begun", make)


@mutant("serves clients of another cluster")
def _any_cluster() -> None:
    replace(service_module.BookieConnection, "_other_cluster", lambda _original: lambda self, request: "")


@mutant("serves plaintext requests although connections are TLS")
def _serves_in_the_clear() -> None:
    def make(_original: Any) -> Any:
        async def at_once(_self: Any, _sock: Any) -> dict[str, Any]:
            return {}

        return at_once

    replace(accepting.Acceptor, "_until_handshake", make)


@mutant("connects in plaintext to a bookie without TLS")
def _falls_back() -> None:
    def make(original: Any) -> Any:
        async def connect(self: Any, address: str, handler: Any, *, prelude: Any = None) -> Any:
            try:
                return await original(self, address, handler, prelude=prelude)
            except OSError:
                self._calling = None
                return await original(self, address, handler)

        return connect

    replace(transport.TcpTransport, "connect", make)


@mutant("admits a raw add from a leader whose ledger is gone")
def _raw_from_everybody() -> None:
    def make(original: Any) -> Any:
        def add(self: Any, *request: Any) -> None:
            named, self.is_named = self.is_named, False
            original(self, *request)
            self.is_named = named

        return add

    replace(service_module.BookieConnection, "_add", make)


@mutant("accepts raw adds to a ledger that has entries")
def _raw_to_all() -> None:
    replace(raw_adds, "has_no_writer", lambda _original: lambda *_: True)


@mutant("accepts raw adds to an id without a ledger")
def _raw_to_none() -> None:
    replace(
        raw_adds, "has_no_writer", lambda original: lambda metadata, key: metadata is None or original(metadata, key)
    )


@mutant("accepts an add of the ledger's writer as a raw add")
def _raw_from_the_writer() -> None:
    replace(raw_adds, "has_no_writer", lambda original: lambda metadata, _key: original(metadata, b""))


@mutant("trusts forever that a ledger accepts raw adds")
def _believes_for_ever() -> None:
    replace(raw_adds, "BELIEVED_S", lambda _original: 1e9)


@mutant("accepts connections after it has closed")
def _lets_in_late() -> None:
    hide(service_module.BookieService, "is_closed", property(lambda _: False, lambda *_: None))
