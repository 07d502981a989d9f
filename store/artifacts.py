"""Artifacts: large values, kept by the digest of their content and referred to by it.

An artifact is written before the row that refers to it, and never changed: whoever has the digest has the value. Where
it is kept is the deployment's choice: in the database's own table, or in an object store, of which the table then says
where. What is read is checked against its digest, wherever it came from.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import structlog
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.sql.base import Executable

from keepstep.errors import ArtifactCorrupt, ArtifactsUnavailable, InvalidSettings
from keepstep.store.schema import artifact
from keepstep.store.statements import Statement, db_now, param

if TYPE_CHECKING:
    from keepstep.store.engine import Store

log = structlog.get_logger("keepstep.artifacts")

# A value that cannot be put there is kept in the database: nobody waits long. A single request may take the 30 seconds
# that are the library's default; giving it another would shut out what the environment says of the connection.
_RETRIES_MAX: Final = 2
_RETRY_SECONDS_MAX: Final = 5


def _put(dialect: str) -> Executable:
    insert: Any = postgresql_insert(artifact) if dialect == "postgresql" else sqlite_insert(artifact)
    insert = insert.values(
        **{name: param(name) for name in ("tenant", "digest", "bytes_count", "data", "location")}, created_at=db_now()
    )
    # The content is the same, for the digest is. Where it is kept may not be, and its age is that of its last use.
    again = {name: insert.excluded[name] for name in ("data", "location", "created_at")}
    kept: Executable = insert.on_conflict_do_update(index_elements=["tenant", "digest"], set_=again).returning(
        artifact.c.digest
    )
    return kept


_PUT = Statement(_put)
_GET = Statement(
    lambda _dialect: select(artifact.c.data, artifact.c.location).where(
        artifact.c.tenant == param("tenant"), artifact.c.digest == param("digest")
    )
)


class Artifacts:
    """The artifacts of one database. Threads may share it.

    `location`: where new ones are kept: `""`: in the database; or the URL of a folder in an object store (`s3://bucket`,
    `gs://bucket/folder`, `az://container`, `file:///folder`). Existing ones are found wherever they were put. Raises
    `InvalidSettings` when the object store's library, an extra, is not installed.
    """

    def __init__(self, store: Store, *, location: str = "") -> None:
        if location and importlib.util.find_spec("obstore") is None:
            raise InvalidSettings(_missing(location))
        self._store = store
        self._location = location

    def put(self, tenant: str, data: bytes) -> str:
        """Keep `data` and return its digest, 64 hexadecimal digits; putting the same again is harmless.

        While the object store cannot be reached it is kept in the database: of an effect at risk whose result is not
        stored nobody would know whether it happened. Raises `DatabaseUnavailable`, `InvalidSettings` for a location
        that cannot be used.
        """
        digest = digest_of(data)
        is_outside = self._put_outside(tenant, digest, data)
        values = {"tenant": tenant, "digest": digest, "bytes_count": len(data)}
        where = {"data": None, "location": self._location} if is_outside else {"data": data, "location": None}
        self._store.rows(_PUT, {**values, **where})
        return digest

    def _put_outside(self, tenant: str, digest: str, data: bytes) -> bool:
        if not self._location:
            return False
        try:
            _object_store(self._location).put(_path(tenant, digest), data)
        except ArtifactsUnavailable as error:
            log.warning("artifact_kept_in_database", reason=error.message, digest=digest, bytes=len(data))
            return False
        return True

    def get(self, tenant: str, digest: str) -> bytes:
        """Return the value of a digest.

        Raises `ArtifactCorrupt`, naming digest and place, when it is gone or is not what was put there;
        `ArtifactsUnavailable` or `DatabaseUnavailable`.
        """
        rows = self._store.rows(_GET, {"tenant": tenant, "digest": digest})
        if not rows:
            message = f"artifact {digest} of tenant {tenant!r} is not in the database: restore it"
            raise ArtifactCorrupt(message)
        stored, location = rows[0]
        if location is None:
            where, data = "the database", None if stored is None else bytes(stored)
        else:
            where = f"{location.rstrip('/')}/{_path(tenant, digest)}"
            data = _object_store(location).get(_path(tenant, digest))
        if data is None:
            message = f"artifact {digest} is gone from {where}: restore it"
            raise ArtifactCorrupt(message)
        if digest_of(data) != digest:
            message = f"artifact {digest} in {where} is not what was put there: restore it"
            raise ArtifactCorrupt(message)
        return data


class LargeValues:
    """Values that stand in a row while they are small, and are artifacts from `bytes_min` on."""

    def __init__(self, artifacts: Artifacts, *, bytes_min: int) -> None:
        self._artifacts = artifacts
        self._bytes_min = bytes_min

    def placed(self, tenant: str, value: bytes | None, column: str, digest_column: str) -> dict[str, Any]:
        """Return a row's two columns for a value, which is put away when it is large: one of them is None."""
        if value is None or len(value) < self._bytes_min:
            return {column: value, digest_column: None}
        return {column: None, digest_column: self._artifacts.put(tenant, value)}

    def fetched(self, tenant: str, value: bytes | None, digest: str | None) -> bytes | None:
        """Return the value of those two columns."""
        return value if digest is None else self._artifacts.get(tenant, digest)


def digest_of(data: bytes) -> str:
    """Return the digest by which a value is known."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def _path(tenant: str, digest: str) -> str:
    # A tenant's name may hold what a path must not; and no object store likes a folder of a million.
    folder = hashlib.blake2b(tenant.encode(), digest_size=8).hexdigest()
    return f"{folder}/{digest[:2]}/{digest}"


class _ObjectStore:
    """An object store, as `obstore` reaches it."""

    def __init__(self, location: str) -> None:
        try:
            import obstore  # noqa: PLC0415  an extra: only deployments that name an object store have it
            from obstore.exceptions import BaseError, NotFoundError  # noqa: PLC0415  the same
            from obstore.store import LocalStore, MemoryStore, from_url  # noqa: PLC0415  the same
        except ImportError as error:
            raise InvalidSettings(_missing(location)) from error
        self._obstore, self._location = obstore, location
        self._gone, self._failed = (NotFoundError, FileNotFoundError), (BaseError, OSError)
        retries: Any = {"max_retries": _RETRIES_MAX, "retry_timeout": timedelta(seconds=_RETRY_SECONDS_MAX)}
        try:
            if location.startswith("file://"):
                self._store: Any = LocalStore(location.removeprefix("file://"), mkdir=True)
            elif location.startswith("memory://"):
                self._store = MemoryStore()
            else:
                self._store = from_url(location, retry_config=retries)
        except (BaseError, OSError, ValueError) as error:
            message = f"artifacts: {location!r} cannot be used: {_first_line(error)}"
            raise InvalidSettings(message) from error

    def put(self, path: str, data: bytes) -> None:
        try:
            self._obstore.put(self._store, path, data)
        except self._failed as error:
            raise self._unavailable(error) from error

    def get(self, path: str) -> bytes | None:
        try:
            return bytes(self._obstore.get(self._store, path).bytes())
        except self._gone:
            return None
        except self._failed as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> ArtifactsUnavailable:
        return ArtifactsUnavailable(f"artifacts in {self._location}: {_first_line(error)}")


@functools.lru_cache(maxsize=64)
def _object_store(location: str) -> _ObjectStore:
    """Return the object store of a location: made once in a process, for it keeps its connections."""
    return _ObjectStore(location)


def _missing(location: str) -> str:
    return f"artifacts: {location!r} needs an extra: pip install 'keepstep[artifacts]'"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
