"""The client: sends commands to a deployment's workers through its broker, and needs nothing else of it.

Every verb is one JSON message (docs/messages.md). Having sent it is not having it accepted: a worker accepts a command
by committing its row, and says so in a reply. Each command has an id and is idempotent, so it can be sent again.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

import kombu

from keepstep import blockage, errors, ids, outbox, signing
from keepstep import broker as brokers
from keepstep.jsonvalue import checked_json
from keepstep.link import Link, Replies
from keepstep.priority import PRIORITIES, Priority
from keepstep.settings import Settings, load
from keepstep.subscription import Subscription

if TYPE_CHECKING:
    import types

Verdict = Literal["approve", "reject", "answer", "delegate", "request_changes"]
_VERDICTS = ("approve", "reject", "answer", "delegate", "request_changes")
_VERSION = 1
_COLLECT_EVERY = 100
_DECLARE_SECONDS = 60.0
# A message that nobody takes is not lost, it waits: sending it again is for those that were.
_RESEND_SECONDS_MIN = 2.0
_RESEND_SECONDS_MAX = 10.0
_WORTH_SECONDS = 0.25
"""Less time than this is too little for another try."""


@dataclass(frozen=True)
class Reply:
    """What a worker said of a command that it accepted."""

    id: str
    """The command's id."""
    thread_id: str | None
    """The internal id of the thread that the command is about."""
    run_id: str | None
    """The run, for commands that make one."""
    duplicate: bool
    """The command had been accepted before; this time nothing was changed."""


@dataclass(frozen=True)
class Receipt:
    """A command that was sent, which is not yet one that was accepted."""

    id: str
    """The command's id: a message with the same id is the same command."""
    _replies: Replies | None = field(repr=False)

    def accepted(self, timeout: float = 10.0) -> Reply:
        """Wait up to `timeout` seconds until a worker has accepted the command, and return what it said.

        Raises the worker's typed error when it refused, and `NotConfirmed` when none said anything in time. Replies
        are kept for ten minutes. Of a start that stands in an outbox nothing is known here: `NotConfirmed` at once.
        """
        if self._replies is None:
            message = f"command {self.id} stands in your outbox: a relay sends it when your transaction has committed"
            raise errors.NotConfirmed(message)
        reply = self._replies.wait(self.id, timeout)
        if reply.get("status") != "accepted":
            error = reply.get("error") or {}
            raise errors.by_code(str(error.get("code")))(error.get("message"))
        return Reply(self.id, reply.get("thread_id"), reply.get("run_id"), bool(reply.get("duplicate")))


class Client:
    """Sends commands; may be shared by threads and kept across a fork. Close it, or use it as a context manager.

    `broker`, `tenant` and `settings` default to the deployment's settings. `timeout` bounds each verb, in seconds: in
    that time the broker is tried again, then `BrokerUnavailable` is raised. With `confirm`, a verb returns when a
    worker has accepted the command and raises the typed error when it was refused; until then the command is sent again
    with the same id, and after `timeout` seconds `NotConfirmed` is raised.

    Where the settings name a `signing_key`, commands are signed: as the word of whoever a verb names with `by`, else of
    `principal` (the key's id when there is none), who has these `roles`.
    """

    def __init__(
        self,
        broker: str | None = None,
        *,
        tenant: str | None = None,
        application: str = "default",
        settings: Settings | None = None,
        principal: str | None = None,
        roles: Sequence[str] = (),
        confirm: bool = False,
        timeout: float = 5.0,
    ) -> None:
        settings = load() if settings is None else settings
        self._url = settings.broker if broker is None else broker
        brokers.kind_of(self._url)
        self._queue = settings.queue
        self._bytes_max = settings.message_bytes_max
        self._tenant = ids.checked_name("tenant", settings.tenant if tenant is None else tenant)
        self._application = ids.checked_name("application", application)
        self._principal = principal
        self._roles = tuple(roles)
        self._signer = None
        if settings.signing_key:
            self._signer = signing.Signer.load(settings.signing_key, audience=settings.audience)
        self._confirm = confirm
        self._timeout = timeout
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._link = Link(self._url, self._queue, self._timeout)
        self._replies = Replies(self._url, self._queue, self._timeout)
        self._commands = brokers.commands_queue(self._url, self._queue)
        self._declared_on: Any = None
        self._declare_at = 0.0
        self._uncollected = 0

    # --- verbs --------------------------------------------------------------------------------------------------------

    def start(
        self,
        graph: str,
        thread: str,
        input: Mapping[str, Any],  # noqa: A002  the design's word
        *,
        request_id: str | None = None,
        if_running: Literal["queue", "reject"] = "queue",
        step_limit: int | None = None,
        priority: Priority | None = None,
        by: str | None = None,
        connection: object = None,
    ) -> Receipt:
        """Give `thread` of `graph` an input, which makes a run; the thread is made when it is not there.

        `input` is what JSON can say; the graph's state schema makes dates, decimals and so on of strings. Two starts
        with one `request_id` are one run. `if_running` says what a thread does whose run has not ended. `priority` is
        the thread's from now on: `high` goes before `normal`, `low` after it; None leaves what it has, `normal`. `by`
        is who wants it, and who may not approve what it asks where policies or the setting `self_approval` say so.

        With a `connection` to your own database (DB-API, SQLAlchemy's Connection or Session, Django's) nothing is sent:
        the start is written to the table `keepstep_outbox` there, in the transaction that the connection is in. It is
        sent by a relay if and when that commits, and never when it does not (docs/producers.md).
        """
        return self._send(
            "start",
            written_with=connection,
            graph=graph,
            thread=thread,
            application=self._application,
            input=_object(input, "$.input"),
            request_id=request_id,
            if_running=_one_of("if_running", if_running, ("queue", "reject")),
            step_limit=step_limit,
            priority=None if priority is None else _one_of("priority", priority, PRIORITIES),
            by=by,
        )

    def decide(
        self,
        approval_id: str | None,
        verdict: Verdict,
        *,
        by: str,
        arguments: Mapping[str, Any] | None = None,
        answer: object = None,
        to: Sequence[str] | str | None = None,
        comment: str | None = None,
        thread: str | None = None,
        graph: str | None = None,
    ) -> Receipt:
        """Decide an approval as the principal `by`; without an id the only one that `thread` asks.

        `arguments` are what is approved when it is not what was asked. `answer` is the answer, or with `approve` what
        was chosen where there are choices. `to`: the people and roles that are asked instead (`delegate`).
        `request_changes` needs a `comment`, which the graph gets.
        """
        fields: dict[str, Any] = {}
        if verdict == "answer" or (verdict == "approve" and answer is not None):
            fields["answer"] = answer
        if arguments is not None:
            fields["arguments"] = _object(arguments, "$.arguments")
        if to is not None:
            fields["to"] = [to] if isinstance(to, str) else list(to)
        if thread is not None:
            fields |= {"thread": thread, "application": self._application}
        return self._send(
            "decide",
            approval=approval_id,
            graph=graph,
            verdict=_one_of("verdict", verdict, _VERDICTS),
            by=by,
            comment=comment,
            nullable=fields,
        )

    def approve(
        self,
        approval_id: str,
        *,
        by: str,
        arguments: Mapping[str, Any] | None = None,
        choice: object = None,
        comment: str | None = None,
    ) -> Receipt:
        """Approve what was asked, or `arguments` in its place; where there are choices, `choice` of them."""
        return self.decide(approval_id, "approve", by=by, arguments=arguments, answer=choice, comment=comment)

    def reject(self, approval_id: str, *, by: str, comment: str | None = None) -> Receipt:
        """Reject what was asked."""
        return self.decide(approval_id, "reject", by=by, comment=comment)

    def request_changes(self, approval_id: str, comment: str, *, by: str) -> Receipt:
        """Neither approve nor reject: the graph gets the comment, and may ask again."""
        return self.decide(approval_id, "request_changes", by=by, comment=comment)

    def delegate(self, approval_id: str, to: Sequence[str] | str, *, by: str, comment: str | None = None) -> Receipt:
        """Let other people or roles decide in the place of `by`."""
        return self.decide(approval_id, "delegate", by=by, to=to, comment=comment)

    def answer(self, approval_id: str, answer: object, *, by: str, comment: str | None = None) -> Receipt:
        """Answer a question."""
        return self.decide(approval_id, "answer", by=by, answer=answer, comment=comment)

    def signal(
        self,
        thread: str,
        name: str,
        payload: object = None,
        *,
        graph: str | None = None,
        key: str | None = None,
        id: str | None = None,  # noqa: A002  the message's word
        by: str | None = None,
    ) -> Receipt:
        """Send `thread` the signal `name`. Two signals with one `id` are one."""
        return self._send(
            "signal",
            id=id,
            graph=graph,
            thread=thread,
            application=self._application,
            name=name,
            key=key,
            by=by,
            nullable={"payload": payload},
        )

    def pause(
        self, thread: str, *, graph: str | None = None, reason: str | None = None, by: str | None = None
    ) -> Receipt:
        """Let `thread` take no further step until it is resumed."""
        return self._control("pause", thread, graph=graph, reason=reason, by=by)

    def resume(
        self, thread: str, *, graph: str | None = None, reason: str | None = None, by: str | None = None
    ) -> Receipt:
        """Let a paused `thread` go on."""
        return self._control("resume", thread, graph=graph, reason=reason, by=by)

    def cancel(
        self, thread: str, *, graph: str | None = None, reason: str | None = None, by: str | None = None
    ) -> Receipt:
        """End the run of `thread`, and its children."""
        return self._control("cancel", thread, graph=graph, reason=reason, by=by)

    def retry(
        self,
        thread: str,
        *,
        graph: str | None = None,
        reason: str | None = None,
        by: str | None = None,
        step_limit: int | None = None,
    ) -> Receipt:
        """Let a failed, blocked or cancelled `thread` go on, with another step limit when one is given."""
        return self._control("retry", thread, graph=graph, reason=reason, by=by, step_limit=step_limit)

    def edit(
        self,
        thread: str,
        values: Mapping[str, Any],
        *,
        by: str,
        graph: str | None = None,
        reason: str | None = None,
        expect: int | str | None = None,
        id: str | None = None,  # noqa: A002  the message's word
    ) -> Receipt:
        """Replace `values` in the state of `thread`, in whose step nobody may be: pause it first if need be.

        The step that is pending keeps what it has done and goes on from the new state. `expect` is the seq or the id of
        the checkpoint that was looked at: another one by now, and the edit is refused. Two edits with one `id` are one.
        """
        return self._send(
            "edit",
            id=id,
            graph=graph,
            thread=thread,
            application=self._application,
            values=_object(values, "$.values"),
            by=by,
            reason=reason,
            expect=expect,
        )

    def resolve(
        self,
        effect: str,
        outcome: Literal["happened", "not_happened", "give_up"],
        *,
        by: str,
        result: object = None,
        reason: str | None = None,
    ) -> Receipt:
        """Say what became of an effect whose outcome is unknown; `effect` is its idempotency key.

        The thread that it blocks goes on: with `result` as what the call returned (`happened`), with another call under
        the same key (`not_happened`), or with an error for its node (`give_up`).
        """
        return self._send(
            "resolve",
            effect=effect,
            outcome=_one_of("outcome", outcome, ("happened", "not_happened", "give_up")),
            by=by,
            reason=reason,
            nullable={"result": result} if outcome == "happened" else {},
        )

    def schedule(
        self,
        name: str,
        graph: str,
        cron: str,
        input: Mapping[str, Any] | None = None,  # noqa: A002  the design's word
        *,
        timezone: str = "UTC",
        thread: str | None = None,
        version: str | None = None,
        missed: Literal["skip", "last", "all"] = "last",
        overlap: Literal["allow", "skip"] = "allow",
        priority: Priority | None = None,
        step_limit: int | None = None,
        by: str | None = None,
        id: str | None = None,  # noqa: A002  the message's word
    ) -> Receipt:
        """Make the schedule `name`: `graph` gets a run with `input` at each tick of `cron`. Or change it to this.

        `cron` has five fields, as `30 2 * * mon-fri`, or is `@daily` and the like; it means the clocks of `timezone`.
        Each tick has a thread of its own, called `{name}-{tick}`, or as `thread` says; without `{tick}` in `thread`
        all are runs of that one. `missed`: which ticks that came while no worker ran start a run afterwards.
        `overlap="skip"`: none starts while the run of an earlier one goes on. The same again changes nothing.
        """
        return self._send(
            "schedule",
            id=id,
            name=name,
            application=self._application,
            graph=graph,
            version=version,
            thread=thread,
            input=_object({} if input is None else input, "$.input"),
            cron=cron,
            timezone=timezone,
            missed=_one_of("missed", missed, ("skip", "last", "all")),
            overlap=_one_of("overlap", overlap, ("allow", "skip")),
            priority=None if priority is None else _one_of("priority", priority, PRIORITIES),
            step_limit=step_limit,
            by=by,
        )

    def unschedule(self, name: str, *, reason: str | None = None, by: str | None = None) -> Receipt:
        """Remove the schedule `name`. Runs that it has started go on."""
        return self._send("unschedule", name=name, application=self._application, reason=reason, by=by)

    def pause_schedule(self, name: str, *, reason: str | None = None, by: str | None = None) -> Receipt:
        """Let no tick of the schedule `name` start a run until it is resumed."""
        return self._schedule_control("pause", name, reason=reason, by=by)

    def resume_schedule(self, name: str, *, reason: str | None = None, by: str | None = None) -> Receipt:
        """Let the schedule `name` go on, from its next tick."""
        return self._schedule_control("resume", name, reason=reason, by=by)

    def _schedule_control(self, action: str, name: str, **fields: Any) -> Receipt:
        return self._send("schedule_control", action=action, name=name, application=self._application, **fields)

    def _control(self, action: str, thread: str, **fields: Any) -> Receipt:
        return self._send("control", action=action, thread=thread, application=self._application, **fields)

    # --- sending ------------------------------------------------------------------------------------------------------

    def _send(
        self,
        verb: str,
        *,
        id: str | None = None,  # noqa: A002  the message's word
        nullable: Mapping[str, Any] | None = None,
        written_with: object = None,
        **fields: Any,
    ) -> Receipt:
        """Send or write one command: `fields` that are None are left out, those of `nullable` are not."""
        message = {
            "v": _VERSION,
            "verb": verb,
            "id": ids.new_id() if id is None else id,
            "tenant": self._tenant,
            **{name: value for name, value in fields.items() if value is not None},
            **(nullable or {}),
        }
        for name in ("id", "graph", "thread", "approval", "name", "key", "by", "request_id"):
            if name in message:
                ids.checked_name(name, message[name])
        checked_json(message)
        sent, signer = message, self._signer
        if signer is not None:
            principal = message.get("by") or self._principal or signer.kid
            sent = signer.signed(message, principal=principal, roles=self._roles)
        body = json.dumps(sent, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        if len(body) > self._bytes_max:
            text = f"the {verb} message has {len(body)} bytes; message_bytes_max allows {self._bytes_max}"
            raise errors.TooLarge(text)
        if written_with is not None:
            outbox.write(written_with, message["id"], body)
            return Receipt(message["id"], None)
        deadline = time.monotonic() + self._timeout
        receipt = self._published(message["id"], body, deadline)
        if self._confirm:
            self._confirmed(receipt, body, deadline)
        return receipt

    # --- listening ----------------------------------------------------------------------------------------------------

    def events(
        self, queue: str, *, kind: str = "*", graph: str | None = None, timeout: float | None = None
    ) -> Subscription:
        """Return the tenant's events as they come, gathered in a durable queue of this name, from now on.

        Subscribers that share a queue share the events. `kind` is one of docs/messages.md, or `approval.*` and the
        like; `graph` the name of one, None for all. The iteration ends when nothing came for `timeout` seconds; None:
        never. What happened before there was the queue stands in the log: `Reader.events`.
        """
        return Subscription(
            self._url,
            self._queue,
            ids.checked_name("queue", queue),
            tenant=self._tenant,
            kind=ids.checked_name("kind", kind),
            graph=None if graph is None else ids.checked_name("graph", graph),
            timeout=timeout,
            patience=self._timeout,
        )

    def forward(self, command_id: str, body: bytes) -> Receipt:
        """Send a command that was written before, as it stands in an outbox; `body` is the whole message."""
        return self._published(command_id, body, time.monotonic() + self._timeout)

    def _published(self, command_id: str, body: bytes, deadline: float) -> Receipt:
        if os.getpid() != self._pid:
            self._begin()  # a forked child must not talk on its parent's sockets
        self._publish(command_id, body, deadline)
        return Receipt(command_id, self._replies)

    def _publish(self, command_id: str, body: bytes, deadline: float) -> None:
        if not self._sending.acquire(timeout=max(deadline - time.monotonic(), 0)):
            message = f"the broker at {brokers.redacted(self._url)} has not taken another thread's message yet"
            raise errors.BrokerUnavailable(message)
        try:
            self._link.run(lambda channel: self._publish_on(channel, command_id, body, deadline), deadline)
            self._uncollected += 1
            collect = self._uncollected >= _COLLECT_EVERY
            if collect:
                self._uncollected = 0
        finally:
            self._sending.release()
        if collect:
            self._replies.collect(deadline)

    def _publish_on(self, channel: Any, command_id: str, body: bytes, deadline: float) -> None:
        blockage.check(channel)
        now = time.monotonic()
        if self._declared_on is not channel or now >= self._declare_at:
            # The reply queue vanishes when nobody uses it, and declaring it is a use.
            for queue in (self._commands, brokers.replies_queue(self._replies.name)):
                queue(channel).declare()
            self._declared_on, self._declare_at = channel, now + _DECLARE_SECONDS
        kombu.Producer(channel, auto_declare=False).publish(
            body,
            exchange="",
            routing_key=self._commands.name,
            content_type="application/json",
            content_encoding="utf-8",
            correlation_id=command_id,
            reply_to=self._replies.name,
            headers={brokers.SENT_AT: round(time.time(), 3)},
            delivery_mode="persistent",
            confirm_timeout=max(deadline - now, 0.05),
        )

    def _confirmed(self, receipt: Receipt, body: bytes, deadline: float) -> None:
        """Wait for the reply to a command, and send it again and again until there is one."""
        pause = _RESEND_SECONDS_MIN
        while True:
            left = deadline - time.monotonic()
            try:
                receipt.accepted(min(pause, left) if left > pause else max(left, 0))
            except errors.NotConfirmed:
                if time.monotonic() + _WORTH_SECONDS >= deadline:
                    message = (
                        f"no worker has confirmed command {receipt.id} within {self._timeout:g} s: "
                        "it may still be accepted later, and may be sent again with the same id"
                    )
                    raise errors.NotConfirmed(message) from None
            else:
                return
            pause = min(pause * 2, _RESEND_SECONDS_MAX)
            self._publish(receipt.id, body, deadline)

    def close(self) -> None:
        """Close the connections. What was sent stays sent; replies that nobody waited for are dropped."""
        if os.getpid() != self._pid:
            return
        self._replies.close()
        with self._sending:
            if self._link.channel is not None:
                # Tidying up; the queue would vanish by itself.
                with suppress(Exception):
                    self._link.channel.queue_purge(self._replies.name)
                    self._link.channel.queue_delete(self._replies.name)
            self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self.close()


def _object(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        message = f"{path}: an object (a mapping) is needed, not a {type(value).__name__}"
        raise errors.NotStorable(message)
    return dict(value)


def _one_of(name: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        message = f"{name} must be one of {', '.join(allowed)}"
        raise errors.InvalidInput(message)
    return value
