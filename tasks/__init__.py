"""Keepstep on Celery: the app, its worker's services, message models, thin tasks over the runtime.

`celery -A keepstep.tasks worker` finds `app` here.
"""

from __future__ import annotations

from keepstep.tasks.app import app

__all__ = ["app"]
