"""Rows: schema, leases, checkpoints, node runs, effects, waits. Knows no graph and no Celery."""
