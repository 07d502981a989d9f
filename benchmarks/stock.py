"""Celery as its documentation starts it: a chain of tasks that do nothing, each enqueues the next.

Nothing is configured but where the broker and the result backend are. Run it as `celery -A benchmarks.stock worker -E`.
"""

from __future__ import annotations

import os

from celery import Celery

app = Celery("stock", broker=os.environ.get("BENCH_BROKER"), backend=os.environ.get("BENCH_RESULTS"))


@app.task(name="stock.hop")  # type: ignore[untyped-decorator]
def hop(chain: int, number: int) -> None:
    """Do nothing, and enqueue the next."""
    hop.delay(chain, number + 1)
