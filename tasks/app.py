"""The Celery app. Its configuration is read when it is first needed: importing this reads no setting."""

from __future__ import annotations

import importlib.util
from typing import Any

from celery import Celery, signals

from keepstep import settings
from keepstep.tasks import config, logs


class _App(Celery):
    """Celery with Keepstep's defaults under the deployment's file: `add_defaults` would put them over it."""

    def prepare_config(self, c: Any) -> dict[str, Any]:
        """Return the deployment's configuration with what it does not say itself."""
        given = {name: c[name] for name in c or () if not name.startswith("_")}
        defaults = config.celery_defaults(settings.load())
        # One by one: what is not said here names the keys under which nudges are published.
        options = {**defaults["broker_transport_options"], **given.get("broker_transport_options", {})}
        return {**defaults, **given, "broker_transport_options": options}


@signals.setup_logging.connect
def _set_up_logging(loglevel: int, **_: object) -> None:
    """Log as Keepstep does; connected here because Celery sets its logging up before it loads the worker's steps."""
    logs.configure(loglevel)


def _make_app() -> Celery:
    made = _App("keepstep", include=["keepstep.tasks.nudges"])
    # Looked for by name, so that an error inside it is an error.
    if importlib.util.find_spec("celeryconfig") is not None:
        made.config_from_object("celeryconfig")
    # By name: other commands of Celery's need neither the store nor the runtime.
    made.steps["worker"].add("keepstep.tasks.worker:KeepstepStep")
    return made


app = _make_app()
