"""Responses of models that nobody asks for again: a worker gives them up in time, whether it asks models or not."""

from __future__ import annotations

import os

from tests.worker.deployment import eventually


def test_an_idle_worker_removes_responses_that_are_too_old(embedded, tmp_path):
    folder = tmp_path / "responses"
    folder.mkdir(mode=0o700)
    old, young = folder / ("a" * 40), folder / ("b" * 40)
    for path in (old, young):
        path.write_bytes(b"paid for")
    os.utime(old, (0, 0))
    embedded.worker(KEEPSTEP_RESPONSE_SPOOL=str(folder))
    eventually(lambda: not old.exists(), what="the end of what is too old")
    assert young.exists()
