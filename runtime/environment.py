"""What a process runs steps with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import structlog

from keepstep.errors import DatabaseUnavailable
from keepstep.runtime import responsespool
from keepstep.runtime.codec import Codec
from keepstep.runtime.compiled import CompiledGraph, Node
from keepstep.runtime.limits import RunningMax
from keepstep.runtime.policies import Policies
from keepstep.runtime.rates import Rates
from keepstep.runtime.responsespool import ResponseSpool
from keepstep.runtime.secrets import SecretSource
from keepstep.runtime.types import TypeRegistry
from keepstep.runtime.watchdog import Watchdog
from keepstep.settings import Settings
from keepstep.store.admission import Admission, withhold
from keepstep.store.artifacts import Artifacts, LargeValues
from keepstep.store.engine import Store
from keepstep.store.leases import Nudge, Owner
from keepstep.store.workers import carried_text

log = structlog.get_logger("keepstep.step")


def _read_from_store() -> Mapping[str, int]:
    return {}


@dataclass
class Runtime:
    """One process's store, graphs, settings, identity and way to the queue. Never shared across a fork."""

    store: Store
    graphs: Mapping[tuple[str, str], CompiledGraph]
    """By (name, version)."""
    settings: Settings
    owner: Owner
    publish: Callable[[Sequence[Nudge]], None]
    """Puts nudges into the queue, after the commit that they follow; must not raise."""
    end_process: Callable[[], None] | None = None
    """Ends this process when a node cannot be ended otherwise; None where the process is not ours to end."""
    on_failure: Callable[[BaseException], None] | None = None
    """Told every exception that ends an attempt, for a caller who wants the exception itself."""
    on_spawn: Callable[[CompiledGraph], None] | None = None
    """Told every graph that a node spawns a child of, for a process that carries whatever it meets."""
    watchdog: Watchdog = field(default_factory=Watchdog)
    running_max: Callable[[], Mapping[str, int]] = _read_from_store
    """The limits on what runs at once (see `store/limits.py`)."""
    _codecs: dict[tuple[str, str], Codec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the limits from the store, unless somebody else says them; see that large values can be kept."""
        if self.running_max is _read_from_store:
            self.running_max = RunningMax(self.store, self.graphs.values())
        # Now: a deployment without its library must not find out when it has something to store.
        artifacts = Artifacts(self.store, location=self.settings.artifacts)
        self.large_values = LargeValues(artifacts, bytes_min=self.settings.artifact_bytes_min)

    @cached_property
    def responses(self) -> ResponseSpool | None:
        """Responses of models that the database does not have yet; None: they are not kept."""
        return None if self.store.in_memory else responsespool.of_settings(self.settings)

    @cached_property
    def admission(self) -> Admission:
        """What finds due rows of the graphs this process carries."""
        return Admission(self.store, self.graphs)

    @cached_property
    def rates(self) -> Rates:
        """Asks whether a tool may be called now."""
        return Rates(self.store)

    @cached_property
    def policies(self) -> Policies:
        """The policies of tool calls; raises `PolicyError` while they cannot be read."""
        return Policies.load(self.settings.policies)

    @cached_property
    def secrets(self) -> SecretSource:
        """Where this deployment's secrets are."""
        return SecretSource(self.settings.secrets_provider)

    def next_within(self, scopes: Iterable[str]) -> list[Nudge]:
        """Return the nudges of what may run now that one less runs under these limits."""
        if not scopes:
            return []
        try:
            return self.admission.look(lambda _queue: 1, self.running_max(), scopes=scopes).nudges
        except DatabaseUnavailable as error:
            log.info("left_to_sweep", reason=error.message)
            return []

    def in_turn(self, scopes: Iterable[str], own: Nudge) -> list[Nudge]:
        """Return what runs next under these limits when a thread goes on: its own nudge, or who waits for its place.

        Who waits comes first unless it is less urgent; the thread waits in its row then, and is let in by who ends.
        """
        if not scopes:
            return [own]
        first: list[Nudge] = []
        try:
            if not self.admission.is_anybody_due(scopes, own.priority):
                return [own]
            found = self.admission.look(lambda _queue: 1, self.running_max(), scopes=scopes, priority_max=own.priority)
            first = found.nudges
            if not first or not found.is_full:
                return [*first, own]
            withhold(self.store, [own])
        except DatabaseUnavailable as error:
            log.info("left_to_sweep", reason=error.message)
            return [*first, own]
        return first

    def end(self) -> None:
        """End this process, where it is ours to end."""
        if self.end_process is not None:
            self.end_process()

    @cached_property
    def carried(self) -> str:
        """The graphs this process carries, as claims and sweeps spell them."""
        return carried_text(list(self.graphs))

    def carries_more(self) -> None:
        """Heed the graphs that were added to `graphs`."""
        self.__dict__.pop("carried", None)
        self.__dict__.pop("admission", None)
        self.running_max = RunningMax(self.store, self.graphs.values())

    @cached_property
    def plain_codec(self) -> Codec:
        """A codec for values that came as JSON."""
        return Codec(TypeRegistry(), format=self.settings.codec, value_bytes_max=self.settings.value_bytes_max)

    def codec(self, graph: CompiledGraph) -> Codec:
        """Return the codec of a graph's values."""
        key = (graph.name, graph.version)
        found = self._codecs.get(key)
        if found is None:
            found = Codec(graph.types, format=self.settings.codec, value_bytes_max=self.settings.value_bytes_max)
            self._codecs[key] = found
        return found

    def timeout(self, node: Node) -> float:
        """Return a node's timeout in seconds: its own, or the setting's."""
        return self.settings.node_timeout_seconds if node.timeout is None else node.timeout

    def lease_seconds(self, timeout: float) -> float:
        """Return how long a lease lasts for a node of that timeout: its grace time, and that of the routes after it."""
        return timeout + 2 * self.settings.timeout_grace_seconds

    @property
    def undo_lease_seconds(self) -> float:
        """How long a lease lasts under which an effect is undone: an undo has the time that nodes have by default."""
        return self.lease_seconds(self.settings.node_timeout_seconds)
