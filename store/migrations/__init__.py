"""Alembic's environment: how the schema came to be what `store/schema.py` says it is."""
