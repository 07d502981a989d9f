"""Processes are killed around a model's answer: what had been received is not paid for again."""

from __future__ import annotations

import pytest

from tests.crash import evidence
from tests.crash.matrix import OF_MODELS
from tests.worker.deployment import eventually

pytestmark = pytest.mark.kill

CALLS = {"oracle": 1, "sibyl": 1}


@pytest.mark.parametrize("death", OF_MODELS, ids=lambda death: death.id)
def test_a_pool_child_dies_with_a_models_answer(crew, death):
    [worker], thread = crew.workers(1), f"oracle-{death.id}"
    deployment = crew.deployment
    crew.arm(death.point, death.at)

    deployment.client.start("oracle", thread, {})
    deployment.ended(thread)
    point, pid = crew.died()
    assert point == death.point

    assert crew.outside.calls(thread) == {"enter-consult": 2, **CALLS, **death.calls}
    assert evidence.state(deployment, thread)["log"] == [f"oracle of {thread}", f"sibyl of {thread}"]
    assert evidence.history(deployment, thread) == [("input", {}), ("step", {"consult": 2})]
    assert evidence.journal(deployment, thread) == {"ask:oracle": ("done", 1), "ask_for_chunks:sibyl": ("done", 1)}
    assert list((deployment.folder / "responses").iterdir()) == []
    eventually(lambda: [e for e in worker.events("child_lost") if e["pid"] == pid], what="the loss noticed")


def test_undisturbed_nothing_is_asked_twice(crew):
    crew.workers(1)
    crew.deployment.client.start("oracle", "oracle-undisturbed", {})
    crew.deployment.ended("oracle-undisturbed")
    assert crew.outside.calls("oracle-undisturbed") == {"enter-consult": 1, **CALLS}
    assert list((crew.deployment.folder / "responses").iterdir()) == []
