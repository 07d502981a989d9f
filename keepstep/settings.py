"""Settings: read once, checked once, frozen, passed in.

A setting comes from the keyword it was made with, else the environment (`KEEPSTEP_…`), else `keepstep.toml` in the
working folder, else its default. The defaults run on a laptop with no server: SQLite and a file broker in `.keepstep/`.
"""

from __future__ import annotations

from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from keepstep.errors import InvalidSettings

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
_ARTIFACT_SCHEMES: Final = ("s3", "gs", "az", "file", "memory")


class Settings(BaseSettings):
    """What a deployment may choose. Durations are seconds, sizes are bytes."""

    model_config = SettingsConfigDict(
        env_prefix="KEEPSTEP_", toml_file="keepstep.toml", frozen=True, extra="forbid", hide_input_in_errors=True
    )

    database: str = "sqlite:///.keepstep/keepstep.db"
    """SQLAlchemy URL of the store: `sqlite:///…` or `postgresql+psycopg2://…`."""
    broker: str = "file://.keepstep/broker"
    """Kombu URL of the broker: `file://folder`, `redis://…`, `amqp://…`."""
    graphs: Annotated[tuple[str, ...], NoDecode] = ()
    """Modules (`package.module`) or files (`agent.py`) whose `Graph` objects a worker carries; comma-separated."""
    tenant: str = "default"
    """The tenant of a client or CLI that names none."""
    outboxes: Annotated[tuple[str, ...], NoDecode] = ()
    """SQLAlchemy URLs of producers' databases whose outbox a worker relays; comma-separated."""
    signing_key: str = ""
    """File with the private JSON Web Key that a client and the CLI sign their commands with; empty: they sign none."""
    trusted_keys: str = ""
    """File with the JSON Web Key Set of those whose signed commands a worker takes; empty: it takes unsigned ones."""
    accept_unsigned: bool = False
    """With `trusted_keys`: take unsigned commands all the same, while senders are changed over."""
    audience: str = "keepstep"
    """The audience (`aud`) of signed commands: a deployment's own name, so that none is taken by another."""
    signature_backlog_seconds: Seconds = 7 * 86400.0
    """A signed command is taken this long after its end (`exp`): a queue may have been away. It counts once even so."""
    self_approval: bool = True
    """Whether who started a run may approve or answer what it asks; false: somebody else must (four eyes)."""
    queue: str = "keepstep"
    """Prefix of every queue's name, so that deployments can share a broker."""
    publish_events: bool = True
    """Whether events are published on the broker (topic exchange `<queue>.events`) besides standing in the log."""

    policies: str = ""
    """Folder or file of Cedar policies (`*.cedar`) that say which tools may be called; empty: none, all may."""
    secrets_provider: Annotated[str, Field(pattern=r"^$|^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] = ""
    """Function (`module:function`) that is called with a tenant and a secret's name and returns the secret's text."""

    renew_seconds: Seconds = 3.0
    """How often a worker renews its `alive_until`."""
    liveness_window_seconds: Seconds = 10.0
    """A worker that has not renewed for this long is given up."""
    sweep_seconds: Seconds = 2.0
    """How often a worker looks for due threads that nobody runs (jittered)."""
    sweep_batch: Count = 200
    """At most this many waits whose time has come are answered by one sweep, and as many schedules fire."""
    queue_nudges_max: Count = 1000
    """At most this many nudges of one graph wait in the broker, however many of its threads are due."""

    node_timeout_seconds: Seconds = 600.0
    """Timeout of a node that declares none: every node has a finite one."""
    timeout_grace_seconds: Seconds = 5.0
    """How long a node may take to end once it was told that its time is over, before its process is killed."""
    retry_in_place_seconds_max: Annotated[float, Field(ge=0)] = 1.0
    """Retry waits up to this long are slept in the worker; longer ones release it."""
    deaths_max: Count = 3
    """A node that took its worker down this often is blocked."""
    step_limit: Count = 1000
    """Super-steps of one run, for graphs that set no limit of their own."""
    parallel_inline_max: Count = 4
    """Up to this many node runs of one super-step run in one worker; more are fanned out, one task each."""

    value_bytes_max: Count = 16 * 1024 * 1024
    """Largest single value of a state, an effect's arguments or its result, encoded."""
    artifact_bytes_min: Count = 256 * 1024
    """Results and arguments of effects from this size on, encoded, are kept apart from their rows, as artifacts."""
    artifacts: str = ""
    """Where artifacts are kept; empty: in the database; else `s3://`, `gs://`, `az://`, `file:///` (an extra)."""
    response_spool: str = "auto"
    """Folder of model responses the database does not have yet; `auto`: the user's own in the temporary one; `off`."""
    response_spool_seconds_max: Seconds = 2 * 86400.0
    """Spooled responses older than this are removed."""
    response_spool_count_max: Count = 10_000
    """Beyond this many spooled responses the oldest are removed."""
    response_spool_bytes_max: Count = 256 * 1024 * 1024
    """Beyond this many bytes of spooled responses the oldest are removed."""
    message_bytes_max: Count = 1024 * 1024
    """Largest command message."""
    snapshot_steps_max: Count = 100
    """A full snapshot is stored at least every this many checkpoints."""
    codec: Annotated[str, Field(pattern="^(msgpack|json)$")] = "msgpack"
    """How payloads are written; both are always readable."""
    signals_kept_max: Count = 1000
    """Signals of one thread that wait for somebody to ask for them."""
    signal_ttl_seconds: Seconds = 7 * 86400.0
    """How long a signal waits for somebody to ask for it."""

    @field_validator("graphs", "outboxes", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("artifacts")
    @classmethod
    def _check_artifacts(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and parts.scheme not in _ARTIFACT_SCHEMES:
            message = f"must be empty or a URL of {', '.join(_ARTIFACT_SCHEMES)}"
            raise ValueError(message)
        if "@" in parts.netloc or parts.query or parts.fragment:
            # It is stored with each artifact and shown in errors.
            message = "credentials do not belong into the URL: object stores take them from the environment"
            raise ValueError(message)
        return value.rstrip("/") if parts.path.strip("/") else value

    @classmethod
    def settings_customise_sources(  # the order of the sources is the order of precedence
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003  unused: `.env` files belong to process managers
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003  unused: mounted secrets come as environment
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keyword, environment, `keepstep.toml`."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def load(**overrides: object) -> Settings:
    """Return the settings; raise `InvalidSettings` naming each setting that is unknown or unusable, never its value."""
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)  # type: ignore[arg-type]  # checked by pydantic at run time
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_input=False))
        message = f"settings (KEEPSTEP_… in the environment, or keepstep.toml): {problems}"
        raise InvalidSettings(message) from None
