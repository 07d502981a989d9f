"""Runs migrations on the connection that `store/migrate.py` hands over."""

from __future__ import annotations

from alembic import context

from keepstep.store.schema import metadata

VERSION_TABLE = "keepstep_schema_version"

connection = context.config.attributes.get("connection")
if connection is None:
    message = "run migrations with 'keepstep db upgrade', which knows the database"
    raise SystemExit(message)

context.configure(
    connection=connection,
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    include_name=lambda name, kind, _parents: kind != "table" or (name or "").startswith("keepstep_"),
    render_as_batch=connection.dialect.name == "sqlite",
    transactional_ddl=connection.dialect.name == "postgresql",
)
with context.begin_transaction():
    context.run_migrations()
