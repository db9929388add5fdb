"""The commands of one Redis client: the queue of waiting commands, and the start of each command.

Commands are submitted as they arrive, many at once; reply_queue.py puts their replies in order. The token of a request
holds its position in that order and, in its low bits, the format of its reply. A client may rely on its commands as if
the server executed one after the other. So two kinds of commands wait until all earlier commands are answered: an
operation on a key that an operation in flight changes, and a command that is more than operations on keys.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Protocol

from kvstore.access import Right
from kvstore.env import Stream
from kvstore.env.networks import network_of
from kvstore.errors import StoreError
from kvstore.partition.state.commands import Op
from kvstore.partition.state.operations import BATCH_RESULT_BYTES_MAX
from kvstore.partition.state.traits import KEYLESS, POINT_READS
from kvstore.server.access.guard import Guard
from kvstore.server.access.identities import UserIdentity
from kvstore.server.redis import replies
from kvstore.server.redis.channels import NAMES_PER_WORK, SUBSCRIBERS_PER_OPERATION
from kvstore.server.redis.commands.channels import OF_SUBSCRIBERS, channels_need, patterns_need
from kvstore.server.redis.commands.performer import CommandConnection
from kvstore.server.redis.commands.row import Alone, InMulti
from kvstore.server.redis.commands.table import known
from kvstore.server.redis.gate import CommandGate
from kvstore.server.redis.parser import OversizedCommand, Words
from kvstore.server.redis.pipeline.fast_path import PLAIN_WORDS, FastPath
from kvstore.server.redis.pipeline.in_flight import InFlight
from kvstore.server.redis.pipeline.reply_queue import FORMAT_BITS, Gather, PipelineServer, ReplyQueue
from kvstore.server.redis.pipeline.subscriber import ClientSubscriber
from kvstore.server.redis.plans import (
    CommandError,
    Context,
    Effect,
    Plan,
    Reply,
    Several,
    Single,
    together,
    value_bytes,
)
from kvstore.server.redis.session import RespSession
from kvstore.server.redis.slot_table import SlotRedirects

log = logging.getLogger(__name__)

AT_ONCE_MAX = 1024
"""Number of commands of one connection after which others have their turn of the event loop. A chunk of 256 KiB may
hold 19,000 PINGs."""
BATCHED_MIN = 4
"""Minimum number of plain GETs or SETs for which one call costs less than beginning them one by one."""


class PipelineConnection(CommandConnection, Protocol):
    """The connection, as its pipeline uses it. Implemented by kvstore.server.redis.connection.RespConnection."""

    def caught_up(self) -> None:
        """Note that all waiting commands have begun."""
        ...

    def abandon(self, text: str) -> None:
        """Drop the commands that have not begun, send the error `text` and close the connection."""
        ...


class Pipeline:
    """Executes the commands of one connection, from when they are parsed until they are answered."""

    stream: Stream
    """Set when the connection is made."""

    def __init__(self, server: PipelineServer, session: RespSession, client: PipelineConnection) -> None:
        self.server, self.session, self.client = server, session, client
        self.replies = ReplyQueue(server, session, flush=self.flush, resume=self.resume)
        self.gate: CommandGate | None = None
        """None if access control is off."""
        self.waiting: deque[Words] = deque()
        """Commands that have been read and not begun."""
        self.is_busy = False
        """True while a command runs that no other command may overtake. Nothing is read meanwhile."""
        self.is_closing = False
        """True when no more commands begin: the connection closes when those in flight are answered."""
        self.is_handed_over = False
        """True when the connection belongs to another server: no commands follow the one that handed it over."""
        self._is_ended = False
        """True when the client sends no more."""
        self._in_flight = InFlight(server.in_flight_limit, server.rounds, self.replies)
        self._fast_path = FastPath(server, session, self.replies, self._in_flight)
        self._resume_below: int | None = None
        """Number of commands in flight below which waiting commands begin; None if none wait."""
        self._subscriber: ClientSubscriber | None = None
        """The client's subscriptions, from its first subscription on."""

    def guard(self, identity: UserIdentity | None) -> None:
        """Use the permissions of this user for later commands. None means that the client has not authenticated."""
        access, self.session.identity = self.server.access, identity
        self.gate, self.replies.backend, self._fast_path.readable = None, self.server.backend, None
        if access.is_on:
            who, address = identity or access.nobody, self.client.address
            self.gate = CommandGate(access, who, address)
            if not who.may_do_every_operation():  # permissions are checked again after each change of the table
                self.replies.backend = Guard(access, who, self.server.backend, address)
                self._fast_path.readable = who.read
        if self._subscriber is not None:
            self._subscriber.change_user(self._owner(), self._fast_path.readable)
            self.server.channels.work.soon(self._check_subscriptions, self._subscriber.count // NAMES_PER_WORK)

    # ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_stalled(self) -> bool:
        """True if commands wait, or if the connection reads nothing until those in flight are answered."""
        return self._resume_below is not None

    def take(self, commands: list[Words]) -> None:
        """Begin the parsed commands, or queue them."""
        if self._resume_below is not None:
            self.waiting.extend(commands)
        elif commands[1:] or self._is_ended or not (commands and self._fast_path.begin_single(commands[0])):
            self._run(commands)
            if self.is_closing or self._is_ended:
                self.close_when_done()

    def _run(self, commands: Sequence[Words]) -> None:
        """Begin commands until one has to wait, and queue that command and the rest. Then send replies that are due."""
        replies, in_flight, fast_path, rounds = self.replies, self._in_flight, self._fast_path, self._in_flight.rounds
        count, issued, values, begun = len(commands), replies.issued, in_flight.value_bytes, 0
        rounds.left -= 1
        if rounds.left <= 0 and in_flight.timed is None:
            in_flight.timed = rounds.begin(commands, issued)
        is_free = count >= BATCHED_MIN and self.session.is_plain and not in_flight.limit.is_full
        if is_free and not in_flight.must_wait():
            begun = fast_path.answer_gets(commands) if len(commands[0]) == 2 else fast_path.begin_puts(commands)
        if begun < count:
            self._begin_all(islice(commands, begun, None))
        if replies.answered == replies.issued and issued == in_flight.accounted and values == in_flight.value_bytes:
            in_flight.accounted = replies.issued  # every command that this round began is answered
        else:
            in_flight.limit.begin(replies.issued - issued, in_flight.value_bytes - values)
        if replies.due:
            in_flight.settle()

    def _begin_all(self, waiting: Iterator[Words]) -> None:
        """Begin commands one by one, until one has to wait."""
        most = self.replies.issued + AT_ONCE_MAX
        for words in waiting:
            if words[0] in PLAIN_WORDS:
                stopped = self._fast_path.begin_plain(chain((words,), waiting))
                if stopped is None:
                    return None
                words = stopped
            if not self._begin(words):
                return self._stall(words, waiting)
            if self.is_busy:
                return self._stall(None, waiting)
            if self.is_closing or self.is_handed_over:
                return None  # later commands must not begin
            if self.replies.issued >= most:
                asyncio.get_running_loop().call_soon(self.resume)
                return self._stall(None, waiting)
        return None

    def _begin(self, words: Words) -> bool:
        """Begin any command. Return False if it must wait. Every command must wait while the client does not read
        its replies."""
        if self.replies.is_full:
            return False
        if isinstance(words, OversizedCommand):
            self.session.abort()
            self.replies.reply(replies.error(f"ERR {words.reason}"))
            return True
        session, gate = self.session, self.gate
        try:
            try:
                command = known(words)
            except CommandError as error:
                raise session.refuse(words, error) from None
            if gate is not None:
                self.check(words)
            if not session.is_plain and session.is_subscriber and command.name not in OF_SUBSCRIBERS:
                raise CommandError(
                    f"ERR Can't execute '{command.name.lower()}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / "
                    "QUIT / RESET are allowed in this context"
                )
            context = Context(session.protocol, session.level, self.server.now_ms, self.publish, session.is_subscriber)
            if session.queued is not None and command.in_multi is not InMulti.AT_ONCE:
                check_ops = None if gate is None else gate.check_ops
                self.replies.reply(session.queue(words, command.plan_in_multi, context, check_ops))
                return True
            handler = command.handler
            if isinstance(handler, Alone):
                return self._act(handler, words)
            plan = handler(words, context)
            if self.server.redirects is not None and not session.level:
                self._redirect(self.server.redirects, plan)
            return self.perform(plan)
        except CommandError as error:
            self.replies.reply(replies.error(str(error)))
            return True

    def check(self, words: Words) -> None:
        """Raise CommandError if the user may not execute the command now. A refusal marks a transaction as failed."""
        if self.gate is None:
            return
        try:
            self.gate.check(words[0][:32].decode("utf-8", "replace").lower(), known(words).need_of(words))
        except CommandError:
            self.session.abort()
            raise

    def _act(self, handler: Alone, words: Words) -> bool:
        """Execute a command that is more than operations on keys. Return False if it has to wait. Raises
        CommandError."""
        if handler.begins_operations and self._in_flight.must_wait():
            return False
        if self.replies.in_flight() or (handler.is_channel_work and not self._may_work_on_channels()):
            return False
        if not self.replies.reserve(handler.reply_bytes(self, words)):
            return False
        handler.act(self, words)
        return True

    def _redirect(self, redirects: SlotRedirects, plan: Plan) -> None:
        """Raise CommandError with MOVED if the client is to send the command to another server."""
        match plan:
            case Single(op, _):
                ops: Sequence[Op] = (op,)
            case Several():
                ops = plan.ops
            case _:
                return
        if ops and not any(op.code in KEYLESS for op in ops):
            moved = redirects.moved_or_none([op.key for op in ops])
            if moved is not None:
                raise CommandError(moved)

    def perform(self, plan: Plan) -> bool:
        """Execute a plan. Return False if it must wait. Raises CommandError."""
        if self.gate is not None and isinstance(plan, Several):
            self.gate.check_ops(plan.ops)  # all operations are allowed or none is submitted
        match plan:
            case Reply(data):
                self.replies.reply(data)
                return True
            case Effect(act):
                if self.replies.in_flight() or not self._may_work_on_channels():
                    return False
                self.replies.reply(act())
                return True
            case Single(op, format_):
                in_flight, answered = self._in_flight, self.replies.answered
                if in_flight.must_wait() or in_flight.hazards.block((op,), answered):
                    return False
                if not self.replies.may_answer(plan):
                    return False
                in_flight.note(plan, (op,))
                number = self.replies.next_number()
                self.replies.backend.submit((op,), self.replies, (number << FORMAT_BITS | format_,))
                return True
            case Several():
                return self._perform_several(plan)

    def _perform_several(self, plan: Several) -> bool:
        in_flight, ops = self._in_flight, plan.ops
        if in_flight.must_wait(len(ops)) or in_flight.hazards.block(ops, self.replies.answered):
            return False
        if plan.is_atomic:
            if not self.replies.reserve(value_bytes((plan,), BATCH_RESULT_BYTES_MAX)):
                return False
            plan = together(plan)
        rates = self.server.rates()
        if rates is not None and (refusal := rates.refusal_or_none(_keys_of(ops))) is not None:
            self.replies.reply(replies.failure(refusal))  # all operations are admitted or none is submitted
            return True
        in_flight.note(plan, ops)
        gathered = Gather(self.replies, self.replies.next_number(), plan)
        in_flight.note_more(gathered.at_once - 1)
        if gathered.at_once < len(plan.ops) and ops[0].code not in POINT_READS:
            in_flight.alone = self.replies.issued - 1
        gathered.submit()
        return True

    # ── waiting ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _stall(self, words: Words | None, rest: Iterable[Words]) -> None:
        """Queue commands until all commands in flight are answered, or half of them if the connection has its
        maximum in flight."""
        if words is not None:
            self.waiting.append(words)
        self.waiting.extend(rest)
        crowded = self.replies.in_flight() >= self.replies.in_flight_max
        self._resume_below = (self.replies.in_flight_max + 1) // 2 if crowded else 1
        if self._in_flight.limit.is_full:
            self._in_flight.limit.wait(self)
        self.stream.pause_reading()

    def resume(self) -> None:
        """Begin the waiting commands, if they may begin."""
        if self.replies.rereads.numbers:
            self.replies.read_again()
        if (
            self.replies.is_full
            or self.is_busy
            or self._resume_below is None
            or self.replies.in_flight() >= self._resume_below
        ):
            return
        if self._in_flight.limit.is_full and (self.replies.in_flight() or not self._in_flight.limit.has_spare()):
            return self._in_flight.limit.wait(self)
        if self.replies.answered < self.replies.rereads.below:
            return
        self._in_flight.hazards.answered(self.replies.issued, self.replies.answered)
        self.replies.widen()
        self._resume_below = None
        queue, self.waiting = self.waiting, deque()
        self._run(queue)
        if self._resume_below is None and not self.replies.is_gone:
            self.client.caught_up()

    def continue_reading(self) -> None:
        """Read more input, because all waiting commands have begun."""
        if self.is_closing or self._is_ended:
            self.close_when_done()
        else:
            self.stream.resume_reading()

    def flush(self) -> None:
        """Send the replies that are due, and begin commands that waited for them."""
        self._in_flight.settle()
        if self._resume_below is not None or self.replies.rereads.numbers:
            self.resume()
        elif self.is_closing or self._is_ended:
            self.close_when_done()

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def close_soon(self) -> None:
        """Begin no more commands; close when those in flight are answered."""
        self.is_closing = True
        self.waiting.clear()
        self.close_when_done()

    def end_input(self) -> bool:
        """Note that the client sends no more. Return True if it still waits for replies."""
        self._is_ended = True
        return self.replies.in_flight() > 0 or bool(self.waiting)

    def lose(self) -> None:
        """Handle the disconnect of the client."""
        self.is_closing = True
        self.waiting.clear()
        self.replies.lose()
        self.unsubscribe()
        self.server.channels.work.forget(self)
        self._in_flight.settle()

    def end(self, text: str) -> None:
        """Close the connection after a last error reply `-text`, which follows the replies that are due before it."""
        if not self.is_closing:
            self._in_flight.limit.begin(1, 0)
            self.replies.reply(replies.error(text))
            self.is_closing = True
        self._in_flight.settle()
        self.close_when_done()

    def close_when_done(self) -> None:
        is_over = self.is_closing or self._is_ended
        if is_over and not self.replies.in_flight() and not self.waiting and not self.replies.is_gone:
            self.unsubscribe()  # the stream may take a while to close if the client does not read
            self.stream.close()

    # ── channels ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def publish(self, words: Words) -> bytes:
        """Execute a PUBLISH, if the user may still do so, and return its reply. EXEC may come long after the command
        was queued."""
        channel, message = words[1], words[2]
        try:
            self.check(words)
        except CommandError as error:
            return replies.error(str(error))
        rates, channels = self.server.rates(), self.server.channels
        if rates is not None:
            operations = 1 + channels.subscribers_of(channel) // SUBSCRIBERS_PER_OPERATION
            if (refusal := rates.refusal_or_none([channel] * operations)) is not None:
                return replies.failure(refusal)
        return replies.number(channels.publish(channel, message))

    def subscriber(self) -> ClientSubscriber:
        """Return the subscriptions of this client."""
        if self._subscriber is None:
            self._subscriber = ClientSubscriber(
                self.server.channels,
                self.session,
                self.replies,
                owner=self._owner(),
                readable=self._fast_path.readable,
                now=self.server.now,
                flush=self.flush,
                note_slow=self.server.note_slow_subscriber,
            )
        return self._subscriber

    def unsubscribe(self) -> None:
        """End all subscriptions of this client."""
        if self._subscriber is not None:
            self._subscriber.end()
            self._subscriber = None

    def _owner(self) -> str:
        identity = self.session.identity
        return network_of(self.client.host) if self.gate is None or identity is None else f"user {identity.name}"

    def _may_work_on_channels(self) -> bool:
        """Return True if a command may work on channels now. Otherwise, it is resumed when it may."""
        work = self.server.channels.work
        if work.is_busy:
            work.wait(self)
            return False
        return True

    def _check_subscriptions(self) -> int:
        """Disconnect the client if its user lacks the right to one of its subscriptions, as Redis does. Return the
        work that this was."""
        own, gate = self._subscriber, self.gate
        if own is None or gate is None or self.is_closing:
            return 1
        count = own.count
        try:
            gate.check("subscribe", channels_need(Right.READ, list(own.channels)))
            gate.check("psubscribe", patterns_need(list(own.patterns)))
        except CommandError as error:
            own.end()
            self.client.abandon(str(error))
        return 1 + count // NAMES_PER_WORK

    # ── for the handlers of the kind Alone ────────────────────────────────────────────────────────────────────────────

    def run_alone(self, work: Coroutine[Any, Any, bytes]) -> None:
        """Reply with the result of `work`. No other command begins before `work` has ended."""
        number = self.replies.next_number()
        self.is_busy = True
        self.server.spawn(self._finish(number, work))

    async def _finish(self, number: int, work: Coroutine[Any, Any, bytes]) -> None:
        reply = await reply_of(work, self.client.address)
        self.is_busy = False
        self.replies.answer(number, reply)
        self.flush()

    def quit(self, farewell: bytes = replies.OK) -> None:
        """Send a last reply and close the connection. Later commands are not read."""
        self.replies.reply(farewell)
        self.is_closing = True


async def reply_of(work: Coroutine[Any, Any, bytes], client: str) -> bytes:
    """Return the result of a command's work, or its error as a reply."""
    try:
        return await work
    except CommandError as error:
        return replies.error(str(error))
    except StoreError as error:
        return replies.failure(error)
    except Exception:  # the root of a task: a client's command must not end the server
        log.exception("a command failed client=%s", client)
        return replies.error("ERR internal error; see the server's log")


def _keys_of(ops: Sequence[Op]) -> list[bytes]:
    return [each.key for op in ops for each in (op.ops or (op,))]
