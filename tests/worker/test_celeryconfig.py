"""A deployment's `celeryconfig` stands over Keepstep's defaults, and those over Celery's."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
sys.path.insert(0, "")
from keepstep.tasks.app import app
names = "worker_max_tasks_per_child", "broker_transport_options", "task_default_queue", "accept_content", "broker_url"
print(json.dumps([app.conf[name] for name in names]))
"""


@pytest.mark.parametrize("own", [True, False])
def test_whose_settings_count(tmp_path, own):
    if own:
        (tmp_path / "celeryconfig.py").write_text(
            "import os\nworker_max_tasks_per_child = 7\nbroker_transport_options = {'visibility_timeout': 1}\n"
        )
    # Of Celery's own variables none counts: a deployment has one broker.
    environment = {**os.environ, "KEEPSTEP_BROKER": "redis://here/0", "CELERY_BROKER_URL": "redis://elsewhere/0"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    children, options, *others = json.loads(ran.stdout)
    assert others == ["keepstep.default", ["json"], "redis://here/0"]
    assert children == (7 if own else 20_000)
    # Of the transport's options each is its own: those that the file does not name stay as they are.
    assert options["ack_emulation"] is False
    assert ("visibility_timeout" in options) is own
