"""Lists ledgers. They are read from the metadata store or, while it is unavailable, reported by the leaders, which
know their own logs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from google.protobuf.message import DecodeError

from kvstore.env.ports import Nursery
from kvstore.errors import (
    Corrupted,
    InvalidRequest,
    MetadataError,
    MetadataUnavailable,
    NoSuchLedger,
    StoreError,
)
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.paths import LEDGER_MAX
from kvstore.meta.store import SessionState
from kvstore.partition.partition import Partition
from kvstore.proto import admin_pb2
from kvstore.proto.admin_pb2 import LedgerResponse, LedgersResponse, LedgerStatus
from kvstore.server.peer_calls import PeerCalls
from kvstore.server.status.copy_count import ClusterNode
from kvstore.server.status.overview import servers_of
from kvstore.types import LedgerId, LedgerMetadata, LedgerState, PartitionId, ServerId
from kvstore.wal.creator import owner_of
from kvstore.wal.ledger_list import Listed
from kvstore.wal.lists import LedgerLists
from kvstore.wal.ports import ListedLedger

log = logging.getLogger(__name__)

LEDGERS = PartitionId("@ledgers")
"""The id under which servers ask each other for ledgers. No partition has this id."""
METHOD = "led"
CALL_S = 1.0
READ_S = 8.0
"""Time after which a metadata store that has not returned a page counts as unavailable."""
PAGE_MAX = 2_000
"""Maximum number of ledgers in one answer about all ledgers."""


class Leading(Protocol):
    """The part of kvstore.server.hosting.Hosting that this module uses."""

    def leading(self) -> Mapping[PartitionId, Partition]: ...


class LedgerSurvey:
    """Lists the cluster's ledgers on behalf of one server."""

    def __init__(self, nursery: Nursery, node: ClusterNode, links: PeerCalls, hosting: Leading) -> None:
        self._node, self._links, self._hosting = node, links, hosting
        self._nursery = nursery.child("ledgers")

    async def close(self) -> None:
        await self._nursery.close()

    async def ledgers(self, partition: str = "", *, newest: int = 0) -> LedgersResponse:
        """Return the ledgers of one partition's log, or of the logs of all partitions if `partition` is empty, in
        the order of the log. `newest` limits the answer to that many of the last ledgers of each log; 0 means all.
        Raises InvalidRequest, and MetadataError if neither the metadata store nor a leader answers."""
        ring = self._node.topology.ring
        if partition and partition not in ring.partitions:
            raise InvalidRequest(f"no partition {partition}; expected one of {', '.join(sorted(ring.partitions))}")
        wanted = [PartitionId(partition)] if partition else sorted(ring.partitions)
        try:
            self._check_connected()
            async with asyncio.timeout(READ_S):
                return await self._read(wanted, newest)
        except (TimeoutError, MetadataError) as error:
            log.info("asking the leaders for ledgers, because the metadata store failed: %r", error)
        return await self._ask(wanted, newest)

    async def page(self, first: LedgerId) -> LedgersResponse:
        """Return a page of all ledgers in the metadata store, including ledgers that belong to no log. The page is
        sorted by id and begins at `first`. While the metadata store is unavailable, only ledgers of the partitions'
        logs are returned. Raises the same errors as `ledgers`."""
        try:
            self._check_connected()
            async with asyncio.timeout(READ_S):
                return await self._read_page(first)
        except (TimeoutError, MetadataError) as error:
            log.info("asking the leaders for ledgers, because the metadata store failed: %r", error)
        response = await self._ask(sorted(self._node.topology.ring.partitions), 0)
        rest = sorted((each for each in response.ledgers if each.id >= first), key=lambda each: each.id)
        del response.ledgers[:]
        response.ledgers.extend(rest[:PAGE_MAX])
        if len(rest) > PAGE_MAX:
            response.next = rest[PAGE_MAX].id
        return response

    async def ledger(self, ledger: LedgerId) -> LedgerResponse:
        """Return one ledger. Raises NoSuchLedger, InvalidRequest, and MetadataError if the metadata store is
        unavailable and no leader knows the ledger."""
        if ledger > LEDGER_MAX:
            raise InvalidRequest(f"expected a ledger id up to {LEDGER_MAX}, got {ledger}")
        try:
            self._check_connected()
            async with asyncio.timeout(READ_S):
                metadata, version = await LedgerStore(self._node.store).read(ledger)
                status = ledger_status(metadata)
                status.version = version
                return LedgerResponse(ledger=status)
        except Corrupted as error:
            return LedgerResponse(ledger=LedgerStatus(id=ledger, state=f"unreadable: {error}"))
        except (TimeoutError, MetadataError) as error:
            log.info("asking the leaders for ledger %d, because the metadata store failed: %r", ledger, error)
        found = await self._ask(sorted(self._node.topology.ring.partitions), 0)
        for each in found.ledgers:
            if each.id == ledger:
                return LedgerResponse(ledger=each, from_leaders=True)
        raise MetadataUnavailable(f"ledger {ledger}: the metadata store is unavailable, and no leader's log has it")

    async def answer(self, server: ServerId, method: str, body: bytes) -> bytes:
        """Answer another server with the ledgers of the logs that this server leads. Raises InvalidRequest."""
        if method != METHOD:
            raise InvalidRequest(f"expected the method {METHOD}, got {method!r}")
        return self._own().SerializeToString()

    def _check_connected(self) -> None:
        if self._node.store.state is not SessionState.CONNECTED:
            raise MetadataUnavailable(f"the session is {self._node.store.state.name.lower()}")

    async def _read(self, partitions: list[PartitionId], newest: int) -> LedgersResponse:
        lists, ledgers = LedgerLists(self._node.store), LedgerStore(self._node.store)
        response = LedgersResponse()
        for partition in partitions:
            listed, _ = await lists.read(partition)
            for entry in listed.ledgers[-newest:]:
                try:
                    metadata, version = await ledgers.read(entry.id)
                except NoSuchLedger:
                    continue  # trimmed meanwhile
                except Corrupted as error:
                    status = LedgerStatus(id=entry.id, state=f"unreadable: {error}")
                else:
                    status = ledger_status(metadata)
                    status.version = version
                _place(status, partition, entry)
                response.ledgers.append(status)
        return response

    async def _read_page(self, first: LedgerId) -> LedgersResponse:
        ledgers = LedgerStore(self._node.store)
        ids = sorted(each for each in await ledgers.list_ids() if each >= first)
        response = LedgersResponse(next=ids[PAGE_MAX] if len(ids) > PAGE_MAX else None)
        for ledger in ids[:PAGE_MAX]:
            try:
                metadata, version = await ledgers.read(ledger)
            except NoSuchLedger:
                continue  # deleted meanwhile
            except Corrupted as error:
                response.ledgers.add(id=ledger, state=f"unreadable: {error}")
            else:
                status = ledger_status(metadata)
                status.version = version
                response.ledgers.append(status)
        return response

    async def _ask(self, partitions: list[PartitionId], newest: int) -> LedgersResponse:
        """Ask the leaders of these partitions for the ledgers of their logs. Raises MetadataUnavailable if no leader
        answers."""
        response = LedgersResponse(from_leaders=True)
        rows: dict[str, list[LedgerStatus]] = {}
        others = [each for each in servers_of(self._node.topology) if each != self._node.id]
        asked = [self._nursery.spawn(self._call(each), name=f"ledgers of {each}") for each in others]
        for answer in (self._own(), *[await each for each in asked]):
            logs: dict[str, list[LedgerStatus]] = {}
            for each in answer.ledgers:
                logs.setdefault(each.partition, []).append(each)
            for partition, found in logs.items():
                if partition not in rows or found[-1].epoch > rows[partition][-1].epoch:
                    rows[partition] = found
        for wanted in partitions:
            response.ledgers.extend(rows.get(wanted, [])[-newest:])
            if wanted not in rows:
                response.unknown.append(wanted)
        if not response.ledgers:
            names = ", ".join(partitions[:3])
            raise MetadataUnavailable(
                f"the metadata store is unavailable, and no leader answers for the log of {names}"
            )
        return response

    async def _call(self, server: ServerId) -> LedgersResponse:
        """Ask a server for the ledgers of the logs that it leads. Return an empty response if it does not answer."""
        try:
            async with asyncio.timeout(CALL_S):
                return LedgersResponse.FromString(await self._links.call(server, LEDGERS, METHOD, b"", CALL_S))
        except (StoreError, TimeoutError, DecodeError) as error:
            log.info("server=%s does not report its logs: %r", server, error)
            return LedgersResponse()

    def _own(self) -> LedgersResponse:
        """Return the ledgers of the logs that this server leads, from memory. Open ledgers have their full metadata."""
        response = LedgersResponse()
        for partition, replica in sorted(self._hosting.leading().items()):
            if (known := replica.known_ledgers()) is None:
                continue
            ledgers, open_metadata = known
            for entry in ledgers:
                is_open = entry.id == open_metadata.ledger
                status = ledger_status(open_metadata) if is_open else LedgerStatus(id=entry.id)
                _place(status, partition, entry)
                response.ledgers.append(status)
        return response


def _place(status: LedgerStatus, partition: PartitionId, entry: Listed | ListedLedger) -> None:
    status.partition, status.first_sequence, status.epoch = partition, entry.first_seq, entry.epoch


def ledger_status(metadata: LedgerMetadata) -> admin_pb2.LedgerStatus:
    """Return the metadata of a ledger as a message, which does not contain the password."""
    quorum = metadata.quorum
    status = admin_pb2.LedgerStatus(
        id=metadata.ledger,
        partition=owner_of(metadata) or "",
        state=metadata.state.name,
        ensemble_size=quorum.ensemble,
        write_quorum=quorum.write,
        ack_quorum=quorum.ack,
        length=metadata.length,
        created_ms=metadata.ctime_ms,
        digest=metadata.digest.name,
        custom=dict(metadata.custom),
    )
    if metadata.state is LedgerState.CLOSED:
        status.last_entry = metadata.last_entry
    for fragment in metadata.fragments:
        status.fragments.add(first_entry=fragment.first, bookies=fragment.ensemble)
    return status
