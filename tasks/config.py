"""Celery's configuration: the defaults under a deployment's `celeryconfig`.

The database is the truth and a nudge is a hint, so nothing here buys reliability from the broker: no results, no acks,
no retries, no delays, no events. Each of them costs a hop, and the sweep covers all of them.
"""

from __future__ import annotations

from typing import Any

from keepstep import broker
from keepstep.settings import Settings

STEP_TASK = "keepstep.step"
NODE_TASK = "keepstep.node"


def celery_defaults(settings: Settings) -> dict[str, Any]:
    """Return the configuration of a worker that serves these settings."""
    connection = broker.celery_settings(settings.broker, queue=settings.queue)
    return {
        **connection,
        **_not_behind_a_long_node(settings),
        # These two win over Celery's own environment variables: one deployment has one broker, KEEPSTEP_BROKER.
        "broker_read_url": connection["broker_url"],
        "broker_write_url": connection["broker_url"],
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_pool_acquire_timeout": 5,
        # A node goes on without a broker: what it writes goes to the database.
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_enable_prefetch_count_reduction": False,
        # The worker adds the queues of the graphs that it carries; nothing is ever sent to this one.
        "task_default_queue": default_queue(settings),
        "task_create_missing_queues": False,
        "task_serializer": "json",
        "accept_content": ["json"],
        "task_ignore_result": True,
        "task_publish_retry_policy": {
            "max_retries": 1,
            "interval_start": 0,
            "interval_step": 0.1,
            "interval_max": 0.2,
        },
        "worker_prefetch_multiplier": 1,
        # Delays are rows (`due_at`), never messages; a guard against somebody else's.
        "worker_eta_task_limit": 100,
        # Bounds what a leak in a node's libraries can cost.
        "worker_max_tasks_per_child": 20_000,
        # A child that imports much on a busy machine takes longer than Celery's 4 s and is no less alive.
        "worker_proc_alive_timeout": 30.0,
        # How long a lost child's task counts as running, in case its result is still under way: nudges have none.
        "worker_lost_wait": 0.2,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
        "worker_enable_remote_control": False,
        "worker_send_task_events": False,
        "worker_consumer": "keepstep.tasks.consumer:NudgeConsumer",
        "enable_utc": True,
    }


def default_queue(settings: Settings) -> str:
    """Return the name that Celery wants for tasks sent without a queue; nobody consumes it."""
    return f"{settings.queue}.default"


def _not_behind_a_long_node(settings: Settings) -> dict[str, Any]:
    """Return what keeps a worker from fetching a nudge that it has no free child for.

    Such a nudge would lie in the worker, behind a node of hours, while others are idle; the sweep would find its row,
    but later. On RabbitMQ `handouts` puts it back.
    """
    kind = broker.kind_of(settings.broker)
    if kind == "redis":
        return {"worker_disable_prefetch": True}
    if kind == "file":
        # A claimed message is a file, and goes back to the queue when the worker that holds it dies.
        return {"broker_transport": "keepstep.tasks.fileloop:Transport", "task_acks_late": True}
    if kind == "amqp":
        # RabbitMQ closes a channel for many reasons; unless told so, a worker dies of it with all that it runs.
        return {"broker_channel_error_retry": True}
    return {}
