"""What a node is given besides its state: the way to the outside that is safe to retry.

`Context` and `AsyncContext` have the same names over one implementation: the journal and the wait book do the work,
and the two differ only in how they call what they are given.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from keepstep.errors import InvalidInput
from keepstep.runtime import models, performing
from keepstep.runtime.blocks import refuse_inside
from keepstep.runtime.children import Child, ChildBook
from keepstep.runtime.codec import Codec
from keepstep.runtime.effects import effect
from keepstep.runtime.gateway import Gateway
from keepstep.runtime.graph import Graph
from keepstep.runtime.journal import Journal
from keepstep.runtime.leaselook import LeaseLook
from keepstep.runtime.models import ModelOptions, ModelReply
from keepstep.runtime.outcome import Parked
from keepstep.runtime.place import Place
from keepstep.runtime.responsespool import ResponseSpool
from keepstep.runtime.secretbook import SecretBook
from keepstep.runtime.secrets import Secret
from keepstep.runtime.tools import Tool
from keepstep.runtime.transactions import TransactionBook, held
from keepstep.runtime.waits import Decision, Question, Signal, WaitBook, gathered
from keepstep.store.events import NewEvent

if TYPE_CHECKING:
    from sqlalchemy import Connection

R = TypeVar("R")


@dataclass
class Attempt:
    """What an attempt collects while it runs."""

    place: Place
    journal: Journal
    waits: WaitBook
    children: ChildBook
    transactions: TransactionBook
    codec: Codec
    secrets: SecretBook
    gateway: Gateway
    failures: Callable[[], Sequence[Mapping[str, Any]]]
    """What failed, and was to be continued after, in the super-step before."""
    lease: LeaseLook
    responses: ResponseSpool | None = None
    """Responses of models that are not recorded yet."""
    events: list[NewEvent] = field(default_factory=list)
    emitted: int = 0
    published: Callable[[], int] = lambda: 0
    """How many events earlier attempts of this node run, which parked, have published."""
    drawn: int = 0
    acting: set[asyncio.Future[Any]] = field(default_factory=set)
    """What an async node does outside or to other threads, under way."""

    def close(self) -> None:
        """Begin nothing more: the node has ended."""
        self.transactions.close()
        self.journal.close()
        self.children.close()


@effect(idempotent=True, name="keepstep.now")
def _now() -> float:
    return time.time()


class _Facts:
    """What a context knows without asking anybody."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    @property
    def thread(self) -> str:
        """The thread's name."""
        return self._attempt.place.thread

    @property
    def tenant(self) -> str:
        """The thread's tenant."""
        return self._attempt.place.tenant

    @property
    def run(self) -> str:
        """The run's id."""
        return self._attempt.place.run

    @property
    def checkpoint(self) -> str:
        """The id of the checkpoint this super-step runs from."""
        return self._attempt.place.checkpoint

    @property
    def step(self) -> str:
        """The step key, the same on every retry and every worker."""
        return self._attempt.place.step

    @property
    def node(self) -> str:
        """The node's path in its graph."""
        return self._attempt.place.node

    @property
    def attempt(self) -> int:
        """How often the node's body was entered in this super-step, this time included: 1, 2, …."""
        return self._attempt.place.attempt

    @cached_property
    def trace(self) -> str:
        """The trace id of the run: 32 hexadecimal digits, as W3C Trace Context has them."""
        return hashlib.blake2b(self._attempt.place.run.encode(), digest_size=16).hexdigest()

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Failures of the super-step before, of nodes with `on_error="continue"`: [{node, run, type, message}]."""
        refuse_inside("ctx.failures")
        return [dict(failure) for failure in self._attempt.failures()]

    @cached_property
    def log(self) -> Any:
        """A structured logger that carries the ids of this attempt, and shows none of the secrets it resolved."""
        place = self._attempt.place
        return self._attempt.secrets.logger("keepstep.node").bind(
            tenant=place.tenant,
            thread=place.thread,
            run=place.run,
            step=place.step,
            node=place.node_run,
            attempt=place.attempt,
            trace=self.trace,
        )

    def emit(self, event: object) -> None:
        """Publish an event once, with this attempt's outcome: done or parked. An attempt that is retried has none.

        Read it with `Reader.events`. Raises `NotStorable` naming the path of what cannot be stored.
        """
        refuse_inside("ctx.emit")
        payload = self._attempt.codec.encode(event, path="$event")
        self._attempt.emitted += 1
        if self._attempt.emitted > self._attempt.published():
            self._attempt.events.append(NewEvent(self._attempt.place.node_run, payload))

    def _draw(self, kind: str) -> bytes:
        """Return 32 bytes that are the same at this place on every retry, and nowhere else."""
        place = self._attempt.place
        number = self._attempt.drawn
        self._attempt.drawn += 1
        return hashlib.blake2b(
            f"{place.step}\x1f{place.node_run}\x1f{kind}\x1f{number}".encode(), digest_size=32
        ).digest()

    def _random(self) -> float:
        return int.from_bytes(self._draw("random")[:7]) / (1 << 56)

    def _uuid(self) -> uuid.UUID:
        number = int.from_bytes(self._draw("uuid")[:16])
        number = number & ~(0xF << 76) | 8 << 76
        return uuid.UUID(int=number & ~(0b11 << 62) | 0b10 << 62)


class Context(_Facts):
    """The context of a sync node."""

    def effect(self, fn: Callable[..., R], /, *args: Any, key: str | None = None, **kwargs: Any) -> R:
        """Call a function that reaches outside, once: on a retry its recorded result is returned instead.

        `key` names the call; without it the call is known by the function's name, its arguments and how often these
        came before. A function with a parameter `idempotency_key` is given the call's key. Raises `EffectConflict` for
        one key with other arguments, `EffectUnknown` (the thread is blocked) when an earlier attempt began the call and
        left no result that anybody can tell, or the call's answer was lost (a time-out while reading, a connection that
        broke off), `EffectGivenUp` when a person gave it up.
        """
        if inspect.iscoroutinefunction(fn):
            message = f"ctx.effect: {fn.__name__!r} is async: use it in an async node, or give a plain function"
            raise InvalidInput(message)
        procedure = performing.effect(self._attempt.journal, fn, args, kwargs, key)
        return performing.perform(procedure)  # type: ignore[no-any-return]  # what fn returned

    def call(self, tool: Tool[..., Any] | str, arguments: Mapping[str, Any], /, *, key: str | None = None) -> Any:
        """Call a tool through the gateway, once, and return its result; on a retry the recorded one.

        `tool`: a `Tool`, or the name of one of the graph's, as a model gives it. `arguments`: a mapping by name; what a
        model gave is converted to the tool's types. `key` names the call, as in `effect`. Raises `UnknownTool`;
        `ToolArguments` naming every path that does not fit; `CallDenied` when a policy forbids it; `CallRejected` when
        people did, or did not answer in time (both are `CallRefused`); `CallCancelled` when a two-phase tool failed and
        was cancelled; the tool's own error when it failed; what `effect` raises. The node run is put off when the call
        is over a rate.
        """
        gateway = self._attempt.gateway
        chosen = gateway.tool(tool)
        if chosen.is_async:
            message = f"ctx.call: tool {chosen.name!r} is async: call it in an async node, or make it a plain function"
            raise InvalidInput(message)
        return performing.perform(gateway.call(chosen, arguments, key))

    def transaction(
        self, database: str | None = None, /, *, key: str | None = None
    ) -> AbstractContextManager[Connection]:
        """A transaction of the node's own, done once: `with ctx.transaction() as conn:` (a SQLAlchemy `Connection`).

        What it writes and the journal's record of it are committed together when the block ends, and undone together
        when it raises; the block itself neither commits nor rolls back (`conn.begin_nested()` makes savepoints). When
        the node runs again the block's body runs again, too, and its statements are answered as they were, from the
        record: it must say the same. Nothing else is asked of ctx inside. `database`: a name that `graph.database`
        registers; without it the store's own. `key` names it within the node run. Raises `TransactionRefused` for what
        a block cannot do, `UnknownDatabase`, `JournalMissing`, `NotStorable` and `TooLarge` for what cannot be
        recorded, `NodeTimeout` when the node's time is over before the commit, `Diverged` (the thread is blocked) when
        it says something else than the time before.
        """
        return held(self._attempt.transactions.block(database, key))

    def model(
        self,
        call: Callable[..., Any],
        request: Any,
        /,
        *,
        key: str | None = None,
        name: str | None = None,
        prompt_version: str | None = None,
        model_version: str | None = None,
        tools: Sequence[Any] = (),
        on_chunk: Callable[[Any], Any] | None = None,
    ) -> ModelReply:
        """Ask a model once: `call(request)` asks it with any client; on a retry its recorded response is returned.

        `call` returns the response, or an iterator of its chunks: these are taken to the end and recorded together, and
        `on_chunk` is given each as it comes, never on a retry. What it raises breaks the stream off, and a stream that
        breaks off is a failure of which nothing is recorded. A `call` with a parameter `idempotency_key` is given the
        call's key. `key` and `name` (default: the function's) identify the call as in `Context.effect`. Recorded beside
        the response: model, its version, temperature, seed and tokens, from request and response as far as they say it;
        `prompt_version`, `model_version`, and names and versions of `tools` (things or mappings with both), as given.
        Raises `NotStorable` naming the path, `TooLarge`, `EffectConflict` for one key with another request.
        """
        if inspect.iscoroutinefunction(call):
            message = f"ctx.model: {call.__name__!r} is async: use it in an async node, or give a plain function"
            raise InvalidInput(message)
        options = ModelOptions(key, name, prompt_version, model_version, tools, on_chunk)
        return performing.perform(models.model(self._attempt.journal, self._attempt.responses, call, request, options))

    def secret(self, ref: str, /) -> Secret:
        """Return a secret: `env:NAME`, `file:/run/secrets/x`, or a name that the deployment's provider knows.

        Never journaled nor stored: a retry resolves it again. An update, event, question or argument that holds its
        text is refused (`NotStorable`); in results, errors and lines of `ctx.log` the text is masked. As an argument of
        `ctx.effect` the `Secret` itself is known by its reference. Raises `SecretNotFound`, `SecretUnavailable`.
        """
        return self._attempt.secrets.resolve(ref)

    def approve(
        self,
        question: str,
        /,
        *,
        arguments: Any = None,
        context: Any = None,
        to: Sequence[str] | str | None = None,
        quorum: int = 1,
        expires: float | timedelta | None = None,
        on_expiry: str = "reject",
        escalate_to: Sequence[str] | str | None = None,
        choices: Sequence[Any] | None = None,
        schema: Any = None,
        remind: float | timedelta | None = None,
    ) -> Decision:
        """Ask people for approval; the thread holds no worker until they have decided.

        `arguments` are what is approved; an approver may edit them. `context` is shown beside them. `to` names roles or
        people, `quorum` how many different people must approve; one rejection rejects. `choices`: whoever approves
        chooses one, `Decision.answer`. `schema`: a type or JSON schema that edited arguments must fit. `expires`:
        seconds or timedelta; then `on_expiry` is what happens: `"reject"`, `"approve"` (nobody objected), `"escalate"`
        (those in `escalate_to` are asked, for as long again, and then it is rejected), or `"fail"` raises
        `TimeoutError`. `remind` (seconds or timedelta): as long as nobody has answered, an event `approval.reminder`
        says so again and again, each time after so long.
        """
        asked = Question(
            "approve",
            question,
            arguments,
            context,
            to or (),
            quorum,
            expires,
            on_expiry,
            schema,
            escalate_to or (),
            choices,
            remind,
        )
        return self._attempt.waits.decide(asked)

    def ask(
        self,
        question: str,
        /,
        *,
        schema: Any = None,
        context: Any = None,
        to: Sequence[str] | str | None = None,
        expires: float | timedelta | None = None,
        on_expiry: str = "reject",
        escalate_to: Sequence[str] | str | None = None,
        choices: Sequence[Any] | None = None,
        remind: float | timedelta | None = None,
    ) -> Decision:
        """Ask people a question; `Decision.answer` is what they said.

        `schema` is a type or a JSON schema that an answer must fit, `choices` are the only answers there are; both are
        checked before an answer is accepted. The rest is as in `approve`.
        """
        asked = Question(
            "ask",
            question,
            context=context,
            to=to or (),
            expires=expires,
            on_expiry=on_expiry,
            schema=schema,
            escalate_to=escalate_to or (),
            choices=choices,
            remind=remind,
        )
        return self._attempt.waits.decide(asked)

    def wait_signal(
        self, name: str, /, *, key: str | None = None, timeout: float | timedelta | None = None
    ) -> Signal | None:
        """Wait for a named message to this thread; None when none has come in `timeout`. Early ones are kept."""
        return self._attempt.waits.signal(name, key, timeout)

    def check(self) -> None:
        """Go on, or leave the node when nobody wants what it is doing: its thread was cancelled, or it runs elsewhere.

        For a node that works for long by itself, at places where it can be left; it asks the database once a second at
        most. It is left by `StaleLease`: nothing more of this attempt would have been written.
        """
        refuse_inside("ctx.check")
        self._attempt.lease.check()

    def sleep(self, duration: float | timedelta) -> None:
        """Sleep without holding a worker: seconds or timedelta, days if need be."""
        self._attempt.waits.sleep(duration)

    def spawn(
        self, graph: Graph | str, given: object = None, /, *, thread: str | None = None, key: str | None = None
    ) -> Child:
        """Start a thread of another graph as this thread's child, once, whatever is retried; go on without waiting.

        `graph`: a `Graph`, whose state type `given` must fit, or the name of one that other workers carry. `thread`
        names the child's thread (a name made from this thread's unless given; one that is there gets another run, and
        the child fails when it has one that has not ended). `key` names the spawn within the node run; without it the
        spawn is known by graph, input and how often these came before. Cancelling this thread cancels its children.
        Raises `StateError` for input that does not fit, `Conflict` for one key with other input.
        """
        return self._attempt.children.spawn(graph, given, thread, key)

    def join(self, *children: Child, on_failure: str = "raise") -> list[Any]:
        """Wait until all of these children have ended, holding no worker; return their final states in order.

        A state has its type when it was spawned by its `Graph`, or this worker carries that; else it is plain data.
        When one failed or was cancelled, `ChildFailed` is raised; with `on_failure="return"` each result is a
        `ChildResult` instead: child, status, state, error.
        """
        return self._attempt.children.join(children, on_failure)

    def gather(self, *waits: Callable[[], Any]) -> list[Any]:
        """Wait for several things at once: `ctx.gather(lambda: ctx.approve("A?"), lambda: ctx.ask("B?"))`.

        All questions are asked together; the node goes on when all are answered. Returns the results in order.
        """
        results: list[Any] = []
        parked: list[Parked] = []
        for wait in waits:
            try:
                results.append(wait())
            except Parked as signal:
                parked.append(signal)
        if parked:
            gathered(parked)
        return results

    def now(self) -> datetime:
        """Return the time (UTC), the same on every retry."""
        return datetime.fromtimestamp(self.effect(_now), UTC)

    def random(self) -> float:
        """Return a random number from 0 to 1 that is the same on every retry. Not for secrets."""
        return self._random()

    def uuid(self) -> uuid.UUID:
        """Return a UUID (version 8) that is the same on every retry."""
        return self._uuid()


async def _in_thread(own: ThreadPoolExecutor, function: Callable[..., R], *args: Any) -> R:
    return await asyncio.get_running_loop().run_in_executor(own, function, *args)


class AsyncContext(_Facts):
    """The context of an async node: `Context`'s names, awaitable."""

    async def effect(
        self, fn: Callable[..., R | Awaitable[R]], /, *args: Any, key: str | None = None, **kwargs: Any
    ) -> R:
        """Call a function or coroutine function that reaches outside, once; see `Context.effect`."""
        procedure = performing.effect(self._attempt.journal, fn, args, kwargs, key)
        return await self._acting(performing.perform_async(procedure, asks_first=True))

    async def model(
        self,
        call: Callable[..., Any],
        request: Any,
        /,
        *,
        key: str | None = None,
        name: str | None = None,
        prompt_version: str | None = None,
        model_version: str | None = None,
        tools: Sequence[Any] = (),
        on_chunk: Callable[[Any], Any] | None = None,
    ) -> ModelReply:
        """Ask a model once; see `Context.model`. `call` may be a coroutine function, its response an async iterator."""
        options = ModelOptions(key, name, prompt_version, model_version, tools, on_chunk)
        procedure = models.model(self._attempt.journal, self._attempt.responses, call, request, options)
        return await self._acting(performing.perform_async(procedure))

    async def _acting(self, act: Coroutine[Any, Any, R]) -> R:
        performed = asyncio.ensure_future(act)
        self._attempt.acting.add(performed)
        performed.add_done_callback(self._acted)
        # Whoever stops waiting does not stop the call: it ends, and what came of it is recorded.
        return await asyncio.shield(performed)

    def _acted(self, performed: asyncio.Future[Any]) -> None:
        self._attempt.acting.discard(performed)
        if not performed.cancelled():
            performed.exception()  # retrieved: it was told to whoever still waited

    @asynccontextmanager
    async def transaction(self, database: str | None = None, /, *, key: str | None = None) -> AsyncIterator[Connection]:
        """A transaction of the node's own, done once; see `Context.transaction`.

        `async with ctx.transaction() as conn:` begins and commits in a thread; `conn` is the same sync `Connection`.
        """
        block = self._attempt.transactions.block(database, key)
        # A thread of its own: those that all share may all wait for what this one holds.
        own = ThreadPoolExecutor(1, thread_name_prefix="keepstep-transaction")
        try:
            try:
                connection = await self._acting(_in_thread(own, block.begin))
            except asyncio.CancelledError:
                # It may still begin, and nobody would end it.
                await self._acting(_in_thread(own, block.abandon))
                raise
            block.enter()
            try:
                yield connection
            except BaseException as error:
                await self._acting(_in_thread(own, block.undo, error))
                raise
            await self._acting(_in_thread(own, block.commit))
        finally:
            own.shutdown(wait=False)

    @cached_property
    def _sync(self) -> Context:
        return Context(self._attempt)

    async def call(self, tool: Tool[..., Any] | str, arguments: Mapping[str, Any], /, *, key: str | None = None) -> Any:
        """Call a tool through the gateway, once; see `Context.call`. Its functions may be plain or async."""
        procedure = self._attempt.gateway.call(tool, arguments, key)
        return await self._acting(performing.perform_async(procedure, asks_first=True))

    async def secret(self, ref: str, /) -> Secret:
        """Return a secret; see `Context.secret`."""
        return await asyncio.to_thread(self._attempt.secrets.resolve, ref)

    async def approve(self, question: str, /, **options: Any) -> Decision:
        """Ask people for approval; see `Context.approve`."""
        return await asyncio.to_thread(self._sync.approve, question, **options)

    async def ask(self, question: str, /, **options: Any) -> Decision:
        """Ask people a question; see `Context.ask`."""
        return await asyncio.to_thread(self._sync.ask, question, **options)

    async def wait_signal(self, name: str, /, **options: Any) -> Signal | None:
        """Wait for a named message to this thread; see `Context.wait_signal`."""
        return await asyncio.to_thread(self._sync.wait_signal, name, **options)

    async def check(self) -> None:
        """Go on, or leave the node when nobody wants what it is doing; see `Context.check`."""
        await asyncio.to_thread(self._sync.check)

    async def sleep(self, duration: float | timedelta) -> None:
        """Sleep without holding a worker; see `Context.sleep`."""
        await asyncio.to_thread(self._sync.sleep, duration)

    async def spawn(
        self, graph: Graph | str, given: object = None, /, *, thread: str | None = None, key: str | None = None
    ) -> Child:
        """Start a thread of another graph as this thread's child; see `Context.spawn`."""
        return await self._acting(asyncio.to_thread(self._attempt.children.spawn, graph, given, thread, key))

    async def join(self, *children: Child, on_failure: str = "raise") -> list[Any]:
        """Wait until all of these children have ended; see `Context.join`."""
        return await asyncio.to_thread(self._attempt.children.join, children, on_failure)

    async def gather(self, *waits: Awaitable[Any]) -> list[Any]:
        """Wait for several things at once: `await ctx.gather(ctx.approve("A?"), ctx.ask("B?"))`.

        They are begun one after the other, so that each retry numbers them alike.
        """
        results: list[Any] = []
        parked: list[Parked] = []
        for wait in waits:
            try:
                results.append(await wait)
            except Parked as signal:
                parked.append(signal)
        if parked:
            gathered(parked)
        return results

    async def now(self) -> datetime:
        """Return the time (UTC), the same on every retry."""
        return datetime.fromtimestamp(await self.effect(_now), UTC)

    async def random(self) -> float:
        """Return a random number from 0 to 1 that is the same on every retry. Not for secrets."""
        return self._random()

    async def uuid(self) -> uuid.UUID:
        """Return a UUID (version 8) that is the same on every retry."""
        return self._uuid()
